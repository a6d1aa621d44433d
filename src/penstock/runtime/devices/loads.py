"""A load inside a rank's own process, which slows its GPU down for this rank and for no other that shares it.

    penstock disturb RUN --slow 3=1.5 ──► loads/3-….json ◄── rank 3 looks before each step ──► multiplies matrices on a stream of its own
                                          loads/3-….told ◄── what it reached, after each step

The share of the time for which it multiplies is steered so that the rank's passes take so many times as long as before. Another process
would take the GPU from all ranks alike that share it. A load ends after its steps, when its file is gone, with whoever asked, and with the
run.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from penstock.files import write_bytes
from penstock.processes.burners import Steering
from penstock.runtime.telemetry.process_files import RankProcess

if TYPE_CHECKING:
    import torch

__all__ = ["GpuLoad", "LoadReport", "LoadRequest", "RankLoads", "forget_loads", "load_path", "report_path"]

_FOLDER = "loads"
_SIZE, _PERIOD_S = 2048, 0.05
"""Rows and columns of matrices, of which a product takes a millisecond of a quarter of a large GPU; how often some are issued."""
_USUAL, _SETTLING = 20, 2
"""Steps from which it is known what passes usually take; steps after a load begins or ends of which a GPU's times do not tell yet."""
_GAIN = 0.8


class LoadRequest(msgspec.Struct, frozen=True):
    """A load, and for how long."""

    factor: float
    """By which the rank's passes are to take longer."""
    first: int
    last: int
    """Steps."""
    asker: RankProcess
    """With whom it ends."""
    share: float = 0.0
    """Of the time, where it is to stay as it is."""


class LoadReport(msgspec.Struct, frozen=True):
    """A rank's report on a load."""

    share: float
    factor: float | None = None
    """By which its passes took longer lately, as long as the plan was the same."""
    failed: bool = False


def load_path(folder: str | Path, rank: int, name: str) -> Path:
    """The file in which a load is asked for."""
    return Path(folder) / _FOLDER / f"{rank}-{name}.json"


def report_path(path: Path) -> Path:
    """The file in which the rank reports on it."""
    return path.with_suffix(".told")


def forget_loads(folder: str | Path) -> None:
    """Removes what was asked of a run that has ended."""
    for path in (Path(folder) / _FOLDER).glob("*"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # there is none
        (Path(folder) / _FOLDER).rmdir()


class DeviceLoad(Protocol):
    """Something that keeps a device busy until it is closed."""

    share: float
    """Of the time."""

    @property
    def failed(self) -> bool:
        """Whether it has ended by itself."""

    def close(self) -> None:
        """Ends it."""


class GpuLoad:
    """A thread that multiplies matrices for a share of every period.

    Its stream goes before those of the rank, which have the rest of the time: of streams that are equal, one of many short kernels gets
    next to nothing beside one of large ones.
    """

    def __init__(self, device: torch.device, share: float) -> None:
        self.share, self._device, self._ended = share, device, threading.Event()
        self._thread = threading.Thread(target=self._burn, name="load", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the thread has ended by itself: there was no memory for it."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _burn(self) -> None:
        import torch

        with torch.no_grad(), torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device, priority=-1)):
            one = torch.full((_SIZE, _SIZE), 1.0 / _SIZE, device=self._device)  # random numbers would be taken from training
            found, done = torch.empty_like(one), torch.cuda.Event(blocking=True)
            product_s = _PERIOD_S
            while not self._ended.is_set():
                start = time.perf_counter()
                # All at once: the rank's own thread lets this one go on some milliseconds late.
                count = max(1, round(self.share * _PERIOD_S / product_s))
                for _ in range(count):
                    torch.mm(one, one, out=found)
                done.record()
                done.synchronize()
                product_s = min(product_s, (time.perf_counter() - start) / count)
                self._ended.wait(max(0.0, start + count * product_s / self.share - time.perf_counter()))


class RankLoads:
    """One rank's view of the loads that are asked of it; there is one at a time."""

    def __init__(self, folder: str | Path, rank: int, make: Callable[[float], DeviceLoad]) -> None:
        """`make` begins a load that is busy for a share of the time."""
        self._folder, self._rank, self._make = Path(folder) / _FOLDER, rank, make
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._ignored = 0
        """Measured steps that count neither as usual nor as slowed."""
        self._path: Path | None = None
        self._load: DeviceLoad | None = None
        self._steering: Steering | None = None

    def look(self, step: int) -> None:
        """Begins and ends what is to begin or end with a step; one call of the system where nothing ever is."""
        if self._load is not None and (self._path is None or self._asked(self._path, step) is None):
            self.close()
        if self._load is None and self._folder.is_dir():
            for path in sorted(self._folder.glob(f"{self._rank}-*.json")):
                if (asked := self._asked(path, step)) is not None:
                    return self._begin(path, asked)

    def _asked(self, path: Path, step: int) -> LoadRequest | None:
        """The load that is asked for in a step, by a process that still runs."""
        try:
            asked = msgspec.json.decode(path.read_bytes(), type=LoadRequest)
        except OSError:
            return None
        return asked if asked.first <= step <= asked.last and asked.asker.is_here else None

    def _begin(self, path: Path, asked: LoadRequest) -> None:
        steering = Steering(asked.factor)
        steering.share = 1.0 - 1.0 / asked.factor  # the rank has the rest of the time
        self._steering = None if asked.share or not self._usual else steering
        self._path, self._ignored = path, _SETTLING
        self._load = self._make(asked.share or steering.share)
        self._tell(None)

    def measured(self, pace: float) -> None:
        """What the passes of a step took over what they would usually; 0: nobody knows."""
        if pace <= 0:
            return
        if self._ignored:
            self._ignored -= 1
        elif self._load is None:
            self._usual.append(pace)
        elif self._steering is not None:
            self._load.share = self._steering.steer(pace / statistics.median(self._usual), _GAIN)
            self._ignored = 1  # that step ran, or runs, with the share before
            self._tell(self._steering.reached)

    def plan_changed(self) -> None:
        """Passes are others from now on: a load stays as large as it is, and what is usual has to be learned anew."""
        self._steering, self._ignored = None, _SETTLING
        self._usual.clear()

    def _tell(self, factor: float | None) -> None:
        assert self._load is not None and self._path is not None
        with suppress(OSError):  # whoever asked has just ended it
            write_bytes(report_path(self._path), msgspec.json.encode(LoadReport(self._load.share, factor, self._load.failed)))

    def close(self) -> None:
        """Ends a load."""
        if self._load is not None:
            self._load.close()
        self._load, self._path, self._steering, self._ignored = None, None, None, _SETTLING
