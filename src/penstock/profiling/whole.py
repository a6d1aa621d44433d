"""A chain as a whole beside the sum of its measured parts: small work, which waits for the host, and large work, which the device decides.

Parts are measured with marks between them, each in a moment of its own. A host's pace changes from second to second, by half where others
share its machine, and clocks of a device change with its load; so each model is compared in several rounds, with other models in between.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.costs.profile import DEVICE_COLUMNS, HOST_COLUMNS, WholeFactors
from penstock.costs.profiled import DeviceCosts
from penstock.models.modules import Batch, Chain, run_backward
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.profiling.grid import Lengths, usual_lengths
from penstock.profiling.measure import random_model_batch
from penstock.timing.pass_times import rerun_positions

__all__ = ["ROUNDS", "WholeChain"]

ROUNDS = 3
"""How often each model is compared."""
LASTING_S = 1.0
"""How long small work runs in each round to see the host at its own pace."""
TURNS = 9
"""How often it runs at least."""
USUAL_TOKENS = (7_000, 9_500, 13_000, 17_000, 22_000, 28_000)
"""Sizes of large work, some for each round."""
RECORDED_ROWS, RECORDED_LENGTH = (2, 8), 96
"""Rows of small work that is played from recordings, or images."""


@dataclass(frozen=True)
class WholeChain:
    """A model's whole chain on a device, its gradients held, and what is known of its parts."""

    model: Model
    chain: Chain
    costs: DeviceCosts
    device: torch.device
    warm_up_s: float
    """How long large work runs before it is timed."""

    def factors(self, smallest: Lengths, round_number: int) -> WholeFactors:
        """The factors by one round; `smallest` is the work that a host takes longest for, beside the device."""
        small = random_model_batch(self.model, smallest, self.device)
        flags = range(1, len(self.chain.places) - 3)
        plain_s, again_s = self._calmest_s(small, ((), flags))
        host_s = self._sum_of_parts(small.shape, HOST_COLUMNS)
        recompute_host_s = max(again_s - plain_s, 0.0) / len(rerun_positions(self.model.ops, flags))
        mark_s = self._mark_s()
        return WholeFactors(self._device_factor(round_number, mark_s), plain_s / host_s, recompute_host_s, mark_s)

    def _calmest_s(self, batch: Batch, ways: Sequence[Sequence[int]]) -> list[float]:
        """The shortest times of a forward and a backward pass that recompute this and that, taken in turns: what is compared sees the same
        moments, and enough of them that one is calm."""
        times: list[list[float]] = [[] for _ in ways]
        began = time.perf_counter()
        while len(times[0]) < TURNS or time.perf_counter() - began < LASTING_S:
            for found, recompute in zip(times, ways, strict=True):
                found.append(self._passes_s(batch, recompute))
        return [min(found) for found in times]

    def _device_factor(self, round_number: int, mark_s: float) -> float:
        """Measured over predicted time of large work: the geometric mean over shapes that are not in the grid, others each round."""
        ratios = []
        for lengths in (one for size in USUAL_TOKENS[round_number - 1 :: ROUNDS] for one in usual_lengths(self.model, size)):
            batch = random_model_batch(self.model, lengths, self.device)
            took_s = self._lasting_s(batch)
            if took_s is not None:
                ratios.append(took_s / self._sum_of_parts(batch.shape, DEVICE_COLUMNS, mark_s))
        return statistics.geometric_mean(ratios) if ratios else 1.0

    def _mark_s(self) -> float:
        """What marks add to each pass of an op: the difference between small work as the sum of its parts and played from a recording."""
        if self.device.type != "cuda":
            return 0.0
        found = []
        for rows in RECORDED_ROWS:
            length = min(RECORDED_LENGTH, self.model.seq_length)
            lengths = Lengths(rows, length, length // 2 if self.model.dec_length else 0)
            batch = replace(random_model_batch(self.model, lengths, self.device), at_once=True)
            played_s = self._lasting_s(batch)
            if played_s is not None:
                found.append((self._sum_of_parts(batch.shape, DEVICE_COLUMNS) - played_s) / (2 * len(self.chain.places)))
        return max(0.0, statistics.mean(found)) if found else 0.0

    def _lasting_s(self, batch: Batch) -> float | None:
        """Mean time of a forward and a backward pass under lasting load, of which no host is a part: on a GPU they are played from a
        recording. None where memory does not suffice, or a kernel cannot be recorded."""
        try:
            once = partial(self._passes_s, batch, (), 1) if self.device.type != "cuda" else self._recorded(batch)
            once()
        except RuntimeError as error:
            warnings.warn(f"passes of {self.model.name} of {batch.shape} are not compared: {error}", stacklevel=2)
            return None
        count, began = 0, time.perf_counter()
        while not count or time.perf_counter() - began < self.warm_up_s:
            once()
            count += 1
        began = time.perf_counter()
        for _ in range(count):
            once()
        took_s = (time.perf_counter() - began) / count
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # one is kept for each stream, which would count as what libraries need
        return took_s

    def _recorded(self, batch: Batch) -> Callable[[], object]:
        """What plays a forward and a backward pass, and waits for its end."""
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._passes_s(batch, (), 2)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run_backward([self.chain(batch)["loss"]])

        def play() -> None:
            graph.replay()
            torch.cuda.synchronize()

        return play

    def _sum_of_parts(self, shape: Shape, names: Sequence[str], mark_s: float = 0.0) -> float:
        found = [self.costs.columns(place.op, self.model.dtype, [shape], 1, 0, names) or {} for place in self.model.ops]
        marked = WholeFactors(mark_s=mark_s)
        return sum(float(marked.of_device(column)[0]) for columns in found for column in columns.values())

    def _passes_s(self, batch: Batch, recompute: Sequence[int], count: int = 4) -> float:
        """Mean time of some forward and backward passes, one after the other."""
        start = time.perf_counter()
        for _ in range(count):
            run_backward([self.chain(batch, recompute=recompute)["loss"]])
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count
