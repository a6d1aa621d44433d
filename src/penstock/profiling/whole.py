"""A chain as a whole beside the sum of its measured parts: small work, which waits for the host, and large work, which the device decides.

Parts are measured with marks between them, each in a moment of its own. A host's pace changes from second to second, by half where others
share its machine, and clocks of a device change with its load; so each model is compared in several rounds, with other models in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.costs.profile import HOST_COLUMNS, WholeFactors
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
LASTING_S = 2.0
"""How long small work runs in each round to see the host at its own pace."""
TURNS = 9
"""How often it runs at least."""
USUAL_TOKENS = (7_000, 9_500, 13_000, 17_000, 22_000, 28_000)
"""Sizes of large work, some for each round."""
AHEAD = 0.8
"""Of the device's time that the host may need at most where the two are told apart: beyond, a pass takes as long as the host."""


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
        host = plain_s / host_s
        return WholeFactors(self._device_factor(round_number, host), host, recompute_host_s)

    def _calmest_s(self, batch: Batch, ways: Sequence[Sequence[int]]) -> list[float]:
        """The shortest times of a forward and a backward pass that recompute this and that, taken in turns: what is compared sees the same
        moments, and enough of them that one is calm."""
        times: list[list[float]] = [[] for _ in ways]
        began = time.perf_counter()
        while len(times[0]) < TURNS or time.perf_counter() - began < LASTING_S:
            for found, recompute in zip(times, ways, strict=True):
                found.append(self._passes_s(batch, recompute))
        return [min(found) for found in times]

    def _device_factor(self, round_number: int, host: float) -> float:
        """Measured over predicted time of large work, which the host is well ahead of: the geometric mean over shapes that are not in the
        grid, others each round."""
        ratios = []
        for lengths in (one for size in USUAL_TOKENS[round_number - 1 :: ROUNDS] for one in usual_lengths(self.model, size)):
            batch = random_model_batch(self.model, lengths, self.device)
            parts_s = self._sum_of_parts(batch.shape, ("forward_s", "backward_s"))
            if host * self._sum_of_parts(batch.shape, HOST_COLUMNS) > AHEAD * parts_s:
                continue
            try:
                self._warm_up(batch)
                took_s = self._passes_s(batch, (), 2)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            ratios.append(took_s / parts_s)
        return statistics.geometric_mean(ratios) if ratios else 1.0

    def _warm_up(self, batch: Batch) -> None:
        """A pass that finds kernels and memory, and others until clocks are those of lasting load."""
        began = time.perf_counter()
        self._passes_s(batch, (), 1)
        while time.perf_counter() - began < self.warm_up_s:
            self._passes_s(batch, (), 1)

    def _sum_of_parts(self, shape: Shape, names: Sequence[str]) -> float:
        found = [self.costs.columns(place.op, self.model.dtype, [shape], 1, 0, names) or {} for place in self.model.ops]
        return sum(float(column[0]) for columns in found for column in columns.values())

    def _passes_s(self, batch: Batch, recompute: Sequence[int], count: int = 4) -> float:
        """Mean time of some forward and backward passes, one after the other."""
        start = time.perf_counter()
        for _ in range(count):
            run_backward([self.chain(batch, recompute=recompute)["loss"]])
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count
