"""The searcher of interleaved pipelines: several chunks with cuts of their own on each group of devices."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.search.interleaved.chunked_plans import best_interleaved, divides_evenly
from penstock.search.interleaved.ways import Interleaving, interleavings
from penstock.search.progress import Progress, ProofLine, weakest
from penstock.search.space.families import PlanFamily

__all__ = ["InterleavedPlans"]

_TRIED_WAYS, _TRIED_RANKS = 24, 200_000
"""Ways to interleave that are looked at, and about the ranks of all of them together."""


class InterleavedPlans:
    """Plans of equal groups of devices with several chunks each, on devices of one kind."""

    def __init__(self, families: Sequence[PlanFamily]) -> None:
        """Looks for plans in all these families."""
        self._families = families
        self._lines: list[ProofLine] = []
        self._ways: list[Interleaving] = []

    def bound(self) -> float:
        """The least bound of ways that might have been faster than the best plan when they were searched."""
        return weakest(self._lines)

    def best(self, progress: Progress) -> None:
        """Solves ways that might be faster than the best plan so far, in the order of their bounds."""
        every = (way for family in self._families for way in interleavings(family))
        self._ways = sorted((way for way in every if way.bound_s < progress.limit_s and divides_evenly(way)), key=lambda way: way.bound_s)
        self._lines = [self._line(way) for way in self._ways]
        num_devices = self._families[0].request.cluster.num_devices if self._families else 1
        for way in self._ways[: min(_TRIED_WAYS, max(_TRIED_RANKS // num_devices, 4))]:
            if progress.out_of_time() or way.bound_s >= progress.limit_s:
                break
            progress.tell(f"interleaved: {way}")
            progress.add(best_interleaved(way, progress.limit_s))

    def prove(self, progress: Progress) -> None:
        """Bounds ways by the places of their cuts, as far as they would be the weakest of all."""
        enough_s, ways = progress.enough_s, [way for way in self._ways if way.bound_s < progress.best_s]
        self._lines = [self._line(way) for way in ways]
        for index, way in enumerate(ways):
            if way.bound_s < enough_s and not progress.out_of_time():
                self._lines[index] = self._line(way, way.sharper_bound_s())
            enough_s = min(enough_s, self._lines[index].bound_s)
        progress.lines += self._lines

    def _line(self, way: Interleaving, sharper_s: float | None = None) -> ProofLine:
        return ProofLine(way.family.replicas, way.family.samples, way.subspace, way.bound_s, sharper_s)
