"""The searcher of plans for one device of several, while the others idle: small models are often fastest there.

Such a device waits for no other, keeps its clock and needs no memory to talk. One of each kind is searched as a cluster of its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.search.assemble import estimated
from penstock.search.choice import Choice
from penstock.search.partition.partitions import Partitions
from penstock.search.progress import Progress
from penstock.search.space.device_kinds import kinds_of
from penstock.search.space.families import families
from penstock.search.space.request import Request

__all__ = ["OneDevice"]


class OneDevice:
    """Plans of one stage on the first device of each kind."""

    def __init__(self, request: Request) -> None:
        """Bounds them by their ops; there are none where a device has no others, or all nodes are to be used."""
        self._request, cluster = request, request.cluster
        several = cluster.num_devices > 1 and not (request.every_node and cluster.num_nodes > 1)
        firsts = [kind.ranks[0] for kind in kinds_of(cluster)] if several else []
        self._parts = [(rank, Partitions([*families(request.on(cluster.one_of(rank)))])) for rank in firsts]

    def bound(self) -> float:
        """The bound of the kind of device that is fastest alone."""
        return min((part.bound() for _, part in self._parts), default=math.inf)

    def best(self, progress: Progress) -> None:
        """Adds the best plans on one device of each kind."""
        for rank, part in self._parts:
            own = replace(progress, known_s=progress.limit_s, choices=[])
            part.best(own)
            self._take(own, progress, rank)

    def prove(self, progress: Progress) -> None:
        """Sharpens the bounds as for clusters of one device."""
        for rank, part in self._parts:
            own = replace(progress, known_s=progress.best_s, choices=[])
            part.prove(own)
            self._take(own, progress, rank)

    def _take(self, own: Progress, progress: Progress, rank: int) -> None:
        """What was found for one device, as a plan for the cluster."""
        progress.stopped = progress.stopped or own.stopped
        progress.choices += [self._placed(choice, rank) for choice in own.choices]

    def _placed(self, choice: Choice, rank: int) -> Choice:
        stages = tuple(replace(stage, devices=((rank,),)) for stage in choice.plan.stages)
        return estimated(self._request, replace(choice.plan, cluster=self._request.frame.cluster, stages=stages), choice.kind)
