"""Times of collectives and transfers by latency and bandwidth, inside a node and across nodes.

A collective among p ranks moves a tensor of S bytes (the whole, unsplit one) over links of bandwidth B and latency a. Large messages
go round a ring, small ones up and down a tree; r(p) = ⌈log₂ p⌉ is the number of rounds whose latency cannot be hidden:

    reduce_scatter, all_gather   r(p)·a + (p-1)/p · S/B
    all_reduce                   both of them one after the other, 2·r(p)·a + 2(p-1)/p · S/B
    all_to_all                   r(p)·a + (p-1)/p · (S/p)/B         each rank holds S/p
    broadcast                    r(p)·a + S/B                       pipelined along a chain

Several nodes, k ranks of the group on each of m nodes, have two ways, of which the cheaper is taken:

    flat           one ring over all ranks, on as many channels as a node has ranks, so that all rails of the network carry it:
                   the formulas above with p = k·m, the longer latency, and B = min(link inside, k × flow)
    hierarchical   reduce-scatter inside each node; then k groups, one per place in the node, work across nodes on S/k each,
                   every one at the bandwidth of a flow; then all-gather inside each node (all_reduce; the others do their part)

A flow is one rank's share of its node's network while all the group's ranks on that node send: network / max(rails, k · sharing),
where `sharing` is the number of groups that use the same network at the same time. A node that holds fewer of the ranks than others
leaves only the flat way, on as many channels as it has ranks, which is then k. Among unequal links the slowest counts. A transfer
is latency + size / bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.clusters import Cluster, Link
from penstock.clusters.hardware import slowest
from penstock.costs.table import Floats
from penstock.errors import InputError, near_misses

__all__ = ["BUCKET_BYTES", "COLLECTIVES", "Group", "Line", "collective_s", "group_of", "point_to_point_s", "sync_gradients_s"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in pieces of this size, so that the first can leave before the last is computed."""

Line = tuple[float, float]
"""A time that is linear in a size: (seconds at zero, seconds per byte)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that take part in a collective, reduced to what its time depends on."""

    num_ranks: int
    num_nodes: int = 1
    inside: Link | None = None
    """The slowest link inside any of the nodes; None where each node holds one rank."""
    network_latency_s: float = 0.0
    flow_bytes_per_s: float = math.inf
    """One channel's share of the network while all channels of this group, and of those it shares the network with, send."""
    least_per_node: int = 1
    """Ranks on the node that holds the fewest."""

    def lines(self, kind: str) -> tuple[Line, ...]:
        """The ways to run a collective, each as a line; its time is the least of them."""
        if kind not in COLLECTIVES:
            raise InputError(f"collective '{kind}' is not known. {near_misses(kind, COLLECTIVES)}")
        if self.num_ranks <= 1:
            return ((0.0, 0.0),)
        if self.num_nodes == 1:
            return (_inside(kind, self.num_ranks, self.inside),)
        flat = self._flat(kind)
        even = self.least_per_node * self.num_nodes == self.num_ranks
        return (flat, self._hierarchical(kind)) if even and self.least_per_node > 1 else (flat,)

    def time_s(self, kind: str, size_bytes: float) -> float:
        """Time of a collective of this whole size."""
        return min(start + slope * size_bytes for start, slope in self.lines(kind))

    def times_s(self, kind: str, sizes_bytes: Floats) -> Floats:
        """Times of many sizes at once."""
        first, *others = (start + slope * sizes_bytes for start, slope in self.lines(kind))
        for other in others:
            first = np.minimum(first, other)
        return first

    def _flat(self, kind: str) -> Line:
        """All ranks as one ring; in an all-to-all each rank sends most of its part over the network at the pace of a flow."""
        latency, bandwidth = self.network_latency_s, self.flow_bytes_per_s * self.least_per_node
        if self.inside is not None:
            latency, bandwidth = max(latency, self.inside.latency_s), min(bandwidth, self.inside.bandwidth_bytes_per_s)
        if kind == "all_to_all":
            bandwidth = min(self.flow_bytes_per_s * self.least_per_node * self.num_nodes / self.num_ranks, bandwidth)
        return _ring(kind, self.num_ranks, latency, bandwidth)

    def _hierarchical(self, kind: str) -> Line:
        """Inside the nodes, and across them on the part of each place; see the module's text."""
        each, parts = self.least_per_node, self.num_nodes
        within = _inside("reduce_scatter", each, self.inside)
        start, slope = _ring(kind, parts, self.network_latency_s, self.flow_bytes_per_s)
        across = (start, slope / each)
        if kind in ("all_reduce", "broadcast"):
            return _sum(within, across, within)
        return _sum(_inside(kind, each, self.inside, parts if kind == "all_to_all" else 1), across)


def _rounds(num_ranks: int) -> int:
    return (num_ranks - 1).bit_length()


def _ring(kind: str, num_ranks: int, latency_s: float, bandwidth_bytes_per_s: float) -> Line:
    """A collective among ranks with equal links."""
    start, share = _rounds(num_ranks) * latency_s, (num_ranks - 1) / num_ranks
    passes = {"all_reduce": 2 * share, "all_to_all": share / num_ranks, "broadcast": 1.0}.get(kind, share)
    return (2 if kind == "all_reduce" else 1) * start, passes / bandwidth_bytes_per_s


def _inside(kind: str, num_ranks: int, link: Link | None, divisor: int = 1) -> Line:
    """A collective inside a node, on a tensor `divisor` times smaller than the group's."""
    assert link is not None
    start, slope = _ring(kind, num_ranks, link.latency_s, link.bandwidth_bytes_per_s)
    return start, slope / divisor


def _sum(*lines: Line) -> Line:
    return math.fsum(start for start, _ in lines), math.fsum(slope for _, slope in lines)


def group_of(cluster: Cluster, ranks: Sequence[int], sharing: int = 1) -> Group:
    """What a collective among these ranks meets, while `sharing` such groups use the nodes' networks at once."""
    if sharing < 1:
        raise InputError(f"sharing={sharing}: the number of groups on one network is at least 1, the group itself.")
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(cluster.node_index(rank), []).append(rank)
    several = {cluster.link_likeness(here[0], here[1]): here for here in nodes.values() if len(here) > 1}
    links = [cluster.slowest_link(here) for here in several.values()]
    inside = slowest(links) if links else None
    if len(nodes) <= 1:
        return Group(len(ranks), 1, inside)
    ring = [here[0] for here in nodes.values()]
    pairs = list({cluster.link_likeness(*pair): pair for pair in zip(ring, [*ring[1:], ring[0]], strict=True)}.values())
    counts = [len(here) for here in nodes.values()]
    flows = min(counts) * sharing
    return Group(
        len(ranks), len(nodes), inside,
        network_latency_s=max(cluster.link(a, b).latency_s for a, b in pairs),
        flow_bytes_per_s=min(cluster.flow_bandwidth_bytes_per_s(a, b, flows) for a, b in pairs),
        least_per_node=min(counts),
    )  # fmt: skip


def collective_s(kind: str, size_bytes: float, cluster: Cluster, ranks: Sequence[int], sharing: int = 1) -> float:
    """Time of a collective among `ranks` on a tensor of this whole size."""
    return group_of(cluster, ranks, sharing).time_s(kind, size_bytes)


def point_to_point_s(size_bytes: float, cluster: Cluster, sender: int, receiver: int, sharing: int = 1) -> float:
    """Time of one message between two ranks, of `sharing` that cross the same network at once."""
    if sender == receiver:
        return 0.0
    bandwidth = cluster.flow_bandwidth_bytes_per_s(sender, receiver, sharing)
    return cluster.link(sender, receiver).latency_s + size_bytes / bandwidth


def sync_gradients_s(
    size_bytes: float, cluster: Cluster, ranks: Sequence[int], *, zero: int = 0, micro_batches: int = 1, sharing: int = 1,
    bucket_bytes: float = BUCKET_BYTES, weight_share: float = 1.0,
) -> float:  # fmt: skip
    """Time to make gradients of this size equal on all ranks that hold the same weights, bucket by bucket, nothing overlapped.

    ZeRO 0 all-reduces; 1 reduce-scatters the gradients and gathers the new weights, `weight_share` bytes for each of a gradient; 2
    reduce-scatters after every micro-batch; 3 gathers the weights twice for each besides, for the forward and for the backward pass.
    """
    group = group_of(cluster, ranks, sharing)
    kinds = {
        0: ["all_reduce"], 1: ["reduce_scatter", "all_gather"], 2: ["reduce_scatter"] * micro_batches + ["all_gather"],
        3: ["reduce_scatter", "all_gather", "all_gather"] * micro_batches,
    }[zero]  # fmt: skip

    def sent_s(num_bytes: float) -> float:
        return sum(group.time_s(kind, num_bytes * (weight_share if kind == "all_gather" else 1.0)) for kind in kinds)

    full, rest = divmod(size_bytes, bucket_bytes)
    return sent_s(bucket_bytes) * full + (sent_s(rest) if rest else 0.0)
