"""Search over Aceso's tables for chains of very many ops: coarse cuts first, fine ones near them, and a bound from cuts in between.

The published experiment repeats one layer up to 1,024 times, 13,315 ops: a table of all stages between any two of them would take
tens of gigabytes. A plan is therefore found between groups of layers first, then between layers or parts of them, then between ops near
its cuts. The bound allows cuts anywhere: they are rounded down to a thousand places or two, and each stage is let off what lies before
the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from penstock.search.partition import Blocks, Machine, OptionCosts, Partition, StageSpace, best_partition, build_space
from penstock.search.space.levels import Levels
from penstock.search.space.stage_costs import Ints

__all__ = ["LongAnswer", "LongSearch"]

COARSE_CUTS, FINE_CUTS = 128, 1100
"""Cuts of the first look at every micro-batch size, and of the second at those that promise something; at most about so many."""
BOUND_CUTS, PEAKS = (300, 1100, 1700), 4
"""Cuts of bounds, in turn until one excludes a micro-batch size or is near enough, and ranges of what recomputation brings back at once."""
GOOD_GAP = 0.019
"""A bound so near to the best plan is near enough."""
TOLERANCE = 1e-3
NEAR = 1.04
"""Micro-batch sizes are looked at twice whose first plans are slower than the best by no more than this."""


@dataclass(frozen=True)
class LongAnswer:
    """The stages of the best plan of one micro-batch size with the space they are in, and the bound of all sizes."""

    micro_batch: int
    space: StageSpace
    partition: Partition
    bound: float


@dataclass(frozen=True)
class LongSearch:
    """A chain of many ops on equal devices; costs in any one unit of time and of memory."""

    blocks: Blocks
    machine: Machine
    global_batch: int
    max_stages: int
    places: Ints
    """Ops at which a stage may begin, and the end."""

    def best(self, costs: Mapping[int, Sequence[OptionCosts]], loose: Mapping[int, Sequence[OptionCosts]]) -> LongAnswer:
        """The best plan met over all micro-batch sizes, without stages where none fits; bounds are made from `loose` costs."""
        with ThreadPoolExecutor(2) as pool:
            coarse = dict(zip(costs, pool.map(lambda b: self._solved(costs[b], b, self._cuts(COARSE_CUTS)), costs), strict=True))
            known = min(partition.time for _, partition in coarse.values())
            near = [b for b, (_, partition) in coarse.items() if partition.stages and partition.time <= NEAR * known]
            fine = dict(zip(near, pool.map(lambda b: self._refined(costs[b], b, *coarse[b]), near), strict=True))
            if not fine:
                return LongAnswer(next(iter(costs)), *next(iter(coarse.values())), np.inf)
            winner = min(fine, key=lambda b: fine[b][1].time)
            known = fine[winner][1].time
            bounds = pool.map(lambda b: self._bound(loose[b], b, known * (1 + 1e-9)), costs)
            return LongAnswer(winner, *fine[winner], min(bounds))

    def _cuts(self, most: int) -> Ints:
        """About so many cuts at most: between groups of blocks, between blocks, or between as many parts of each."""
        parts = most // len(self.blocks.kind)
        return self._allowed(self.blocks.within(parts)) if parts else self.blocks.every(self.blocks.stride(most))

    def _allowed(self, cuts: Ints) -> Ints:
        """Those of some cuts at which a stage may begin."""
        return np.intersect1d(cuts, self.places)

    def _solved(
        self, costs: Sequence[OptionCosts], b: int, cuts: Ints, known: float = np.inf, levels: Sequence[Levels] | None = None
    ) -> tuple[StageSpace, Partition]:
        count = self.global_batch // b
        space = build_space(
            costs, self.blocks, self.machine, max_stages=self.max_stages, longest=known / count, count=count, cuts=cuts, levels=levels,
            num_devices=self.machine.num_devices,
        )  # fmt: skip
        return space, best_partition(space, count, known, TOLERANCE)

    def _refined(self, costs: Sequence[OptionCosts], b: int, space: StageSpace, coarse: Partition) -> tuple[StageSpace, Partition]:
        """The best plan of many cuts, then of all ops near those it has."""
        _, fine = self._solved(costs, b, self._cuts(FINE_CUTS), coarse.time * (1 + 1e-9), space.levels)
        near = [stage.first for found in (coarse, fine) for stage in found.stages[1:]]
        return self._solved(costs, b, self._allowed(self.blocks.ops_near(near)), fine.time * (1 + 1e-9), space.levels)

    def _bound(self, loose: Sequence[OptionCosts], b: int, known: float) -> float:
        """What no plan with cuts anywhere is below, or `known` where it would be above."""
        least, count = 0.0, self.global_batch // b
        for most in BOUND_CUTS:
            cuts = self._cuts(most)
            space = build_space(
                [_rounded(c, cuts) for c in loose], self.blocks, self.machine, max_stages=self.max_stages, longest=known / count,
                count=count, cuts=cuts, recompute="bounded", peaks=PEAKS, num_devices=self.machine.num_devices,
            )  # fmt: skip
            inner = replace(space.inner(), enter=space.enter, leave=space.leave)
            least = max(least, best_partition(inner, count, known, TOLERANCE).bound)
            if least >= known * (1 - GOOD_GAP):
                break
        return least


def _rounded(costs: OptionCosts, cuts: Ints) -> OptionCosts:
    """Costs by which no stage between these cuts holds or sends more than one that is cut up to the next of them.

    A stage that begins at a later op may have a smaller input, and the last op before its last cut may be recomputed with those after it.
    """
    entering, enter, leave = costs.entering.copy(), costs.enter.copy(), costs.leave.copy()
    following = np.minimum.reduceat(costs.entering, cuts[:-1])
    entering[cuts[1:-1]] = np.minimum(following[:-1], costs.entering[cuts[1:-1]])
    for sent, own in ((enter, costs.enter), (leave, costs.leave)):
        sent[:, cuts[1:-1]] = np.minimum.reduceat(own[:, :-1], cuts[:-1], axis=1)[:, 1:]
    return replace(costs, entering=entering, enter=enter, leave=leave, passed=costs.kept)
