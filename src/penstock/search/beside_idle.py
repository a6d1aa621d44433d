"""The searcher of plans for one device or one node of several, while the others idle: small models, and slow networks, are best left so.

Such a device waits for no other, keeps its clock and needs no memory to talk. One device and one node of each kind are searched as clusters
of their own.
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

__all__ = ["BesideIdle"]


class BesideIdle:
    """Plans of one stage on the first device of each kind, and of any on its first node."""

    def __init__(self, request: Request) -> None:
        """Bounds them by their ops; there are none where nothing is left to idle, or all nodes are to be used."""
        self._request, cluster = request, request.cluster
        several = cluster.num_devices > 1 and not (request.every_node and cluster.num_nodes > 1)
        firsts = [kind.ranks[0] for kind in kinds_of(cluster)] if several else []
        parts = [(rank, cluster.one_of(rank)) for rank in firsts]
        if cluster.num_nodes > 1 and not cluster.overrides:
            parts += [(rank, cluster.node_alone(rank)) for rank in firsts if cluster.node_of(rank).num_devices > 1]
        self._parts = [(rank, Partitions([*families(request.on(part))])) for rank, part in parts]

    def bound(self) -> float:
        """The bound of the device or node that is fastest alone."""
        return min((part.bound() for _, part in self._parts), default=math.inf)

    def best(self, progress: Progress) -> None:
        """Adds the best plans on one device and one node of each kind."""
        for rank, part in self._parts:
            own = replace(progress, known_s=progress.limit_s, choices=[])
            part.best(own)
            self._take(own, progress, rank)

    def prove(self, progress: Progress) -> None:
        """Sharpens the bounds as for clusters of their own."""
        for rank, part in self._parts:
            own = replace(progress, known_s=progress.best_s, choices=[])
            part.prove(own)
            self._take(own, progress, rank)

    def _take(self, own: Progress, progress: Progress, first: int) -> None:
        """What was found for a part that begins at a rank, as plans for the cluster."""
        progress.stopped = progress.stopped or own.stopped
        placed = (self._placed(choice, first) for choice in own.choices)
        progress.choices += [choice for choice in placed if choice.estimate.fits]

    def _placed(self, choice: Choice, first: int) -> Choice:
        stages = tuple(
            replace(stage, devices=tuple(tuple(first + rank for rank in group) for group in stage.devices)) for stage in choice.plan.stages
        )
        return estimated(self._request, replace(choice.plan, cluster=self._request.frame.cluster, stages=stages), choice.kind)
