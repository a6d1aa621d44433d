"""The searcher of replicas of unequal speed: on different kinds of devices, or with unequal numbers of micro-batches."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from penstock.search.progress import Progress, ProofLine
from penstock.search.replicas.replica_families import ReplicaFamily, replica_families
from penstock.search.space.request import Request

__all__ = ["UnequalReplicas"]


class UnequalReplicas:
    """Plans whose replicas have the same stages, each on devices of its own kind with as many micro-batches as suit its speed."""

    def __init__(self, request: Request) -> None:
        """Bounds the pipelines of each family by their ops."""
        self._families = sorted(replica_families(request), key=lambda family: family.pipelines_s)
        self._proven_s: float | None = None

    def _ranked(self) -> Iterator[ReplicaFamily]:
        """The families with the least bounds first. What follows the last micro-batch takes long to work out where many replicas sum
        gradients, and is, as far as somebody asks for more: most families are beaten by what their pipelines take."""
        waiting: list[tuple[float, int, ReplicaFamily]] = []
        for number, family in enumerate(self._families):
            while waiting and waiting[0][0] <= family.pipelines_s:
                yield heapq.heappop(waiting)[2]
            heapq.heappush(waiting, (family.bound_s, number, family))
        while waiting:
            yield heapq.heappop(waiting)[2]

    def bound(self) -> float:
        """The least bound of all families; after the proof, that of its weakest line."""
        if self._proven_s is not None:
            return self._proven_s
        return next((family.bound_s for family in self._ranked()), math.inf)

    def best(self, progress: Progress) -> None:
        """Solves families in the order of their bounds."""
        for family in self._ranked():
            if family.bound_s >= progress.best_s or progress.out_of_time():
                return
            progress.tell(str(family))
            progress.add(family.best(progress.best_s))

    def prove(self, progress: Progress) -> None:
        """Bounds families by the programme over all cuts, as far as they would be the weakest of all."""
        enough_s, proven_s = progress.enough_s, math.inf
        for family in self._ranked():
            if family.bound_s >= progress.best_s:
                break
            sharper_s = None
            if family.bound_s < enough_s and not progress.out_of_time():
                progress.tell(f"bound: {family}")
                sharper_s = family.sharper_bound_s(progress.best_s)
            line = ProofLine(len(family.replicas), family.samples, family.subspace, family.bound_s, sharper_s)
            progress.lines.append(line)
            enough_s, proven_s = min(enough_s, line.bound_s), min(proven_s, line.bound_s)
        self._proven_s = proven_s
