"""The searcher of plans for a part of a cluster, while the others idle: small models, slow networks and odd numbers of nodes are best so.

A device that works alone waits for no other, keeps its clock and needs no memory to talk. Parts are searched as clusters of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from penstock.clusters import Cluster, NodeRun
from penstock.search.assemble import estimated
from penstock.search.choice import Choice
from penstock.search.interleaved.interleaved_plans import InterleavedPlans
from penstock.search.op_degrees.per_op_degrees import PerOpDegrees
from penstock.search.partition.partitions import Partitions
from penstock.search.progress import Progress, Searcher
from penstock.search.replicas.unequal import UnequalReplicas
from penstock.search.space.device_kinds import kinds_of
from penstock.search.space.families import families
from penstock.search.space.request import Request

__all__ = ["BesideIdle"]

_FEW = 64
"""Devices of a cluster up to which parts of several nodes count as well, and plans of every sort: more of them are seldom an odd number."""


class BesideIdle:
    """Plans for the first device of each kind, the first node of each run, and the nodes of a run that suit each other and the batch."""

    def __init__(self, request: Request) -> None:
        """Bounds them by their ops; there are none where nothing is left to idle, or all nodes are to be used."""
        self._request = request
        cluster, is_small = request.cluster, request.cluster.num_devices <= _FEW
        parts = [] if request.every_node and cluster.num_nodes > 1 else _parts(cluster, request.frame.global_batch if is_small else 0)
        self._parts = [(rank, _searchers(request.on(part), is_small)) for rank, part in parts]

    def bound(self) -> float:
        """The bound of the part that is fastest alone."""
        return min((searcher.bound() for _, searchers in self._parts for searcher in searchers), default=math.inf)

    def best(self, progress: Progress) -> None:
        """Adds the best plans of each part."""
        for rank, searchers in self._parts:
            own = replace(progress, known_s=progress.limit_s, choices=[])
            for searcher in searchers:
                searcher.best(own)
            self._take(own, progress, rank)

    def prove(self, progress: Progress) -> None:
        """Sharpens the bounds as for clusters of their own."""
        for rank, searchers in self._parts:
            own = replace(progress, known_s=progress.best_s, choices=[])
            for searcher in searchers:
                searcher.prove(own)
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


def _parts(cluster: Cluster, global_batch: int) -> Iterator[tuple[int, Cluster]]:
    """Parts of a cluster that are worth searching alone, each with its first rank; with a batch of 0 none of several nodes.

    Other searchers take nodes of one kind for several of the size that divides them all, joined by one network.
    """
    if cluster.num_devices > 1:
        yield from ((kind.ranks[0], cluster.one_of(kind.ranks[0])) for kind in kinds_of(cluster))
    if any(not override.across_nodes_only for override in cluster.overrides):
        return
    first, seen = 0, set[tuple[object, ...]]()
    for run in cluster.runs:
        counts = {1}
        if global_batch and not _is_cut(cluster, range(first, first + run.num_devices)):
            alike = sum(other.node.device == run.node.device for other in cluster.runs)
            counts |= {run.count} if alike > 1 else _even(run, global_batch) if len(cluster.runs) == 1 else set()
        for count in sorted(counts):
            node, part = run.node, NodeRun(run.node, count)
            likeness = (node.device, node.num_devices, node.intra, count, node.inter if count > 1 else None)
            if part.num_devices > 1 and count < cluster.num_nodes and likeness not in seen:
                seen.add(likeness)
                yield first, Cluster(cluster.name, (part,))
        first += run.num_devices


def _is_cut(cluster: Cluster, ranks: range) -> bool:
    """Whether some of these ranks are joined by links of their own."""

    def within(side: tuple[tuple[int, int], ...]) -> bool:
        return any(start < ranks.stop and stop > ranks.start for start, stop in side)

    return any(within(override.first) and within(override.second) for override in cluster.overrides)


def _even(run: NodeRun, global_batch: int) -> set[int]:
    """The most nodes among whose devices the batch divides, where all of them are too many."""
    return set(next(([count] for count in range(run.count, 0, -1) if global_batch % (count * run.node.num_devices) == 0), []))


def _searchers(request: Request, is_small: bool) -> list[Searcher]:
    """Those of a cluster of its own."""
    partitions = Partitions([*families(request)])
    if not is_small or request.asynchronous or request.cluster.num_devices == 1:
        return [partitions]
    return [partitions, UnequalReplicas(request), PerOpDegrees(partitions.families), InterleavedPlans(partitions.families)]
