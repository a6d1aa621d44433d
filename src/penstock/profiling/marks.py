"""Marks between ops: points in device time, or in the allocator's books, without stopping the device."""

from __future__ import annotations

import functools
import time
from typing import Any, Protocol

import torch

__all__ = ["CpuTimes", "CudaBytes", "CudaTimes", "Marks", "times_for"]


class Marks(Protocol):
    """Sets a mark now; reads what lies between two marks later."""

    def mark(self) -> Any: ...

    def between(self, first: Any, second: Any) -> float: ...

    def finish(self) -> None:
        """Waits until all marks can be read."""


class CudaTimes:
    """Event timestamps of the current stream, and the host's clock when it set them, in seconds."""

    def mark(self) -> tuple[torch.cuda.Event, float]:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, time.perf_counter()

    def between(self, first: tuple[torch.cuda.Event, float], second: tuple[torch.cuda.Event, float]) -> float:
        return first[0].elapsed_time(second[0]) * 1e-3

    def host_between(self, first: tuple[torch.cuda.Event, float], second: tuple[torch.cuda.Event, float]) -> float:
        """Seconds that the host took to issue what lies between."""
        return max(second[1] - first[1] - self.mark_s, 0.0)

    @functools.cached_property
    def mark_s(self) -> float:
        """Seconds that setting a mark takes the host."""
        start = time.perf_counter()
        for _ in range(200):
            self.mark()
        return (time.perf_counter() - start) / 200

    def get_ahead(self, seconds: float) -> None:
        """Keeps the device busy, so that the host is ahead when the work to be timed begins."""
        torch.cuda._sleep(int(seconds * 2e9))

    def finish(self) -> None:
        torch.cuda.synchronize()


class CpuTimes:
    """The wall clock, in seconds: CPU ops have ended when they return."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        return second - first

    def host_between(self, first: float, second: float) -> float:
        """On a CPU issuing an op is running it."""
        return 0.0

    def get_ahead(self, seconds: float) -> None:
        """Host and device are one."""

    def finish(self) -> None:
        """Nothing is outstanding on a CPU."""


class CudaBytes:
    """Marks that record the allocator's bytes, and their peak since the mark before; its books are kept on the host."""

    def mark(self) -> tuple[int, int]:
        reading = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return reading

    def between(self, first: tuple[int, int], second: tuple[int, int]) -> float:
        return float(second[0] - first[0])

    def peak(self, first: tuple[int, int], second: tuple[int, int]) -> float:
        """The peak between the two marks above the level at the first."""
        return float(second[1] - first[0])

    def finish(self) -> None:
        """The allocator's books need no waiting."""


def times_for(device: torch.device) -> Marks:
    """The clock that fits a device."""
    return CudaTimes() if device.type == "cuda" else CpuTimes()
