"""The searcher of exact partitions: stages of any size on devices of any kinds, family by family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from penstock.search.bounds.by_ops import Bound, family_bound, promise_s, subspace_bound
from penstock.search.choice import FORMULA_OFF
from penstock.search.partition.annealed import AnnealedPipelines
from penstock.search.partition.by_neighbours import NeighbourBound
from penstock.search.partition.pipelines import best_pipeline, bound_of_subspace
from penstock.search.progress import Progress, ProofLine, weakest
from penstock.search.space.families import PlanFamily, Subspace

__all__ = ["Partitions"]

_CAPS = (1.3, 3.0, math.inf)
"""Search below 1.3×, 3×, ∞ times the best promise in turn; a tight cap keeps the stage tables small."""

_ANYWHERE_OPS = 128
"""Chains up to this many ops are cut anywhere at once also over several kinds of devices, if nothing good is cut between blocks."""

# Plans that are looked for by the clock: each family costs another search.
_CLOCKED = 12
"""The fastest plans that are timed to see how much of their messages is hidden, and the most families that are then solved again."""
_HIDDEN = 0.02
"""Share of the time by which formula and clock must differ for that: below, both prefer the same plans."""

# Annealing over several kinds of devices, where the best plan by formula may be far from the best.
_ANNEAL_GAIN = 0.1
"""A family is annealed if its bound lies further than this share below the best plan: little can be gained in others."""


class _AnnealingRound(NamedTuple):
    """How much work goes into annealing, for how many families."""

    most_times_best: float
    """Families whose first look takes longer than this many times the best plan are left out: no more was seen to be gained in a round."""
    families: int
    steps: int
    starts: int


_ANNEALING = (_AnnealingRound(1.15, 6, 50_000, 2), _AnnealingRound(1.1, 1, 150_000, 8))
"""A rough round over several families, then a thorough one in the best of them."""

# The proof over several kinds of devices: how much time it may take, in stages looked at, which are the same on every machine.
_MOST_STAGES, _MOST_STAGES_OF_SUBSPACE = 350_000_000, 45_000_000
"""Stages that all bounds together look at, and each where there are few subspaces. More take longer and narrow the gap."""
_FIRST_GAP = 0.098
"""The gap aimed at first. It is proven quickly, as most plans are then too slow to matter, where the limited proof of a narrow one might
end with a wider gap."""
_FIRST_SHARE = 0.5
"""A narrower gap is tried where the first took less than this share of the stages."""
_PRICED_GAP = 0.04
"""Subspaces with a gap below this are bounded once more with prices of devices, which says more than neighbours only there."""


class Partitions:
    """Plans whose replicas are equal and whose ops are cut into stages anywhere."""

    def __init__(self, families: Sequence[PlanFamily]) -> None:
        """Bounds each family by its ops."""
        bounds = [(family_bound(family).time_s, family) for family in families]
        self._ranked = sorted(bounds, key=lambda pair: (pair[0], pair[1].replicas, pair[1].samples))
        self._lines: list[ProofLine] | None = None

    @property
    def families(self) -> list[PlanFamily]:
        """The families, those with the least bounds first."""
        return [family for _, family in self._ranked]

    def bound(self) -> float:
        """The least bound of all families; after the proof, that of its weakest line."""
        if self._lines is not None:
            return weakest(self._lines)
        return self._ranked[0][0] if self._ranked else math.inf

    def best(self, progress: Progress) -> None:
        """Solves families in the order of what equal stages would take: a short plan makes the rest quick."""
        promising = sorted(((max(promise_s(family), bound_s), bound_s, family) for bound_s, family in self._ranked), key=lambda e: e[:2])
        least_s = promising[0][0] if promising and math.isfinite(promising[0][0]) else progress.bound_s
        for cap in _CAPS if progress.best_s == math.inf else (math.inf,):
            self._solve(progress, promising, cap * least_s)
            if progress.best_s <= cap * least_s:
                break
        # Over several kinds whole blocks may be too large for the smallest devices, or leave only odd plans.
        small = [entry for entry in promising if len(entry[2].pools) > 1 and entry[2].request.model.num_ops <= _ANYWHERE_OPS]
        if small and progress.best_s > _CAPS[1] * least_s:
            for cap in _CAPS[1:]:
                self._solve(progress, small, cap * least_s, anywhere=True)
                if progress.best_s <= cap * least_s:
                    break

    def _solve(
        self, progress: Progress, promising: Sequence[tuple[float, float, PlanFamily]], most_s: float, anywhere: bool = False
    ) -> None:
        """Adds the plans of families that are faster than all before them, and than some time."""
        limit_s = min(progress.limit_s, most_s)
        for _, bound_s, family in promising:
            if progress.out_of_time():
                return
            # The clock, which hides messages behind compute, may prefer a plan that is slower by formula.
            enough_s = limit_s * (1.0 if len(family.pools) == 1 else 1 + FORMULA_OFF)
            if bound_s < enough_s:
                progress.tell(str(family))
                progress.add(best_pipeline(family, enough_s, anywhere))
                limit_s = min(limit_s, progress.limit_s)

    def anneal(self, progress: Progress) -> None:
        """Pipelines over several kinds, annealed in the families in which a first look promises most."""
        worth_s = progress.best_s / (1 + _ANNEAL_GAIN)
        mixed = [family for bound_s, family in self._ranked if bound_s < worth_s and family.mixed and family.subspaces]
        annealings = [AnnealedPipelines(family) for family in mixed if not family.subspaces[0].divided]
        progress.tell("annealing")
        looked = [(annealing.looked[0][0].time_s, annealing) for annealing in annealings if not progress.out_of_time() and annealing.looked]
        for level in _ANNEALING:
            found, most_s = [], level.most_times_best * progress.best_s
            for _, annealing in sorted((entry for entry in looked if entry[0] < most_s), key=lambda entry: entry[0])[: level.families]:
                progress.tell(f"annealing: {annealing.family}")
                choice = None if progress.out_of_time() else annealing.best(level.steps, level.starts)
                progress.add(choice)
                found += [(choice.estimate.formula_s, annealing)] if choice is not None else []
            looked = found

    def look_by_clock(self, progress: Progress) -> None:
        """Adds pipelines over one kind that are slow by formula and fast by the clock, which hides messages behind compute.

        How far the two are apart for the plans at hand says how much slower by formula the best by the clock may be; where messages
        take next to nothing they agree, and nothing is looked for.
        """
        timed = [(choice.estimate.formula_s, choice.clocked().estimate.time_s) for choice in progress.fastest(_CLOCKED)]
        hidden = max((formula_s / time_s - 1 for formula_s, time_s in timed), default=0.0)
        if hidden < _HIDDEN:
            return
        best_s, limit_s = min(time_s for _, time_s in timed), progress.best_s * (1 + 2 * hidden)
        hopeful = [family for bound_s, family in self._ranked if bound_s < best_s and len(family.pools) == 1 and family.count > 1]
        for family in hopeful[:_CLOCKED]:
            progress.tell(f"by the clock: {family}")
            choice = None if progress.out_of_time() else best_pipeline(family, limit_s)
            progress.clocked += [choice.clocked()] if choice is not None else []

    def prove(self, progress: Progress) -> None:
        """Bounds the subspaces by whole stages, the weakest first, until all are near enough; plans that are met on the way count."""
        best_s = progress.best_s
        weak = sorted((
            (bound, family, subspace) for early_s, family in self._ranked if early_s < best_s
            for subspace in family.subspaces if (bound := subspace_bound(family, subspace, best_s)).time_s < best_s
        ), key=lambda entry: entry[0].time_s)  # fmt: skip

        self._lines = [ProofLine(family.replicas, family.samples, subspace, bound.time_s, None) for bound, family, subspace in weak]
        self._prove_several_kinds(progress, weak)
        # Over several kinds neighbours say more than devices that are paid for, unless both are near.
        lines = zip(weak, self._lines, strict=True)
        tried = [len(family.pools) == 1 or line.bound_s > best_s / (1 + _PRICED_GAP) for (_, family, _), line in lines]
        enough_s = min([progress.enough_s, *(line.bound_s for line, is_tried in zip(self._lines, tried, strict=True) if not is_tried)])
        for index, (_, family, subspace) in enumerate(weak):
            bound_s = self._lines[index].bound_s
            if bound_s < enough_s and tried[index] and not progress.out_of_time():
                progress.tell(f"bound: {family}")
                schedules = family.request.unchunked
                found = [bound_of_subspace(family, subspace, name, best_s, bound_s, enough_s) for name in schedules]
                progress.choices += [choice for _, choices in found for choice in choices]
                self._lines[index] = replace(self._lines[index], by_stages_s=min(proven_s for proven_s, _ in found))
            enough_s = min(enough_s, self._lines[index].bound_s)  # no line needs to be better than the worst
            progress.bound_s = max(progress.bound_s, min(enough_s, weakest(self._lines)))
        progress.lines += self._lines

    def _prove_several_kinds(self, progress: Progress, weak: Sequence[tuple[Bound, PlanFamily, Subspace]]) -> None:
        """Bounds subspaces of several kinds with their neighbours, always the weakest of all."""
        several = [index for index, (_, family, _) in enumerate(weak) if len(family.pools) > 1]
        most, good_s = min(_MOST_STAGES, _MOST_STAGES_OF_SUBSPACE * len(several)), progress.enough_s
        looked = self._sharpened(progress, weak, several, min(good_s, progress.best_s / (1 + _FIRST_GAP)), most)
        if looked < _FIRST_SHARE * most and self.bound() < good_s:
            self._sharpened(progress, weak, several, good_s, most)

    def _sharpened(
        self, progress: Progress, weak: Sequence[tuple[Bound, PlanFamily, Subspace]], several: Sequence[int], good_s: float, most: int
    ) -> int:
        """Bounds some subspaces until all are `good_s` or so many stages were looked at; returns how many were."""
        lines, bounds, looked = self._lines or [], dict[int, NeighbourBound](), 0
        for index in several:
            plain, family, subspace = weak[index]
            bounds[index] = NeighbourBound(family, subspace, plain, progress.best_s, good_s)
        while looked < most and bounds and not progress.out_of_time():
            index = min(bounds, key=lambda index: bounds[index].time_s)
            progress.tell(f"bound: {weak[index][1]}")
            if bounds[index].time_s >= good_s or not (more := bounds[index].sharpen()):
                break
            looked += more
        for index, neighbours in bounds.items():
            lines[index] = replace(lines[index], by_stages_s=max(neighbours.time_s, lines[index].bound_s))
        return looked
