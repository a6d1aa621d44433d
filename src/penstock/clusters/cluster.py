"""The cluster: runs of equal nodes, ranks numbered node by node, and the link between any two ranks."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, combinations

from penstock.clusters.hardware import SLOWED_MARK, Device, Link, Node, slowest
from penstock.errors import InputError

__all__ = ["Cluster", "LinkOverride", "NodeRun"]


@dataclass(frozen=True, slots=True)
class NodeRun:
    """`count` equal nodes, one after the other."""

    node: Node
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(f"node '{self.node.name}': count is {self.count}, 1 or more was expected.")

    @property
    def num_devices(self) -> int:
        """Devices of all nodes of the run."""
        return self.count * self.node.num_devices


@dataclass(frozen=True, slots=True)
class LinkOverride:
    """A link that replaces the usual one between two sets of ranks, each given as (first, one past the last) ranges."""

    first: tuple[tuple[int, int], ...]
    second: tuple[tuple[int, int], ...]
    link: Link
    across_nodes_only: bool = False
    """Set for overrides between nodes: the links inside a node stay as they are."""

    def sides(self, rank: int) -> tuple[bool, bool]:
        """Whether `rank` is in the first set, and whether it is in the second."""
        return _within(rank, self.first), _within(rank, self.second)

    def covers(self, rank_a: int, rank_b: int, same_node: bool) -> bool:
        """Whether the pair, in either order, takes this link."""
        if same_node and self.across_nodes_only:
            return False
        (a_first, a_second), (b_first, b_second) = self.sides(rank_a), self.sides(rank_b)
        return (a_first and b_second) or (a_second and b_first)


def _within(rank: int, ranges: tuple[tuple[int, int], ...]) -> bool:
    return any(start <= rank < stop for start, stop in ranges)


@dataclass(frozen=True)  # no slots: the sums below are computed once and cached
class Cluster:
    """Nodes and the links between them. Everything is answered from the runs: no table grows with the number of ranks."""

    name: str
    runs: tuple[NodeRun, ...]
    overrides: tuple[LinkOverride, ...] = ()
    """Of two that cover the same pair, the later one counts."""
    slowed: frozenset[int] = frozenset()
    """Ranks that differ in speed from others of their kind: their devices have a name of their own, and times (`costs.speeds`)."""
    at_work: int = 0
    """Devices that a plan has work for, where the others idle; 0: all."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError(f"cluster '{self.name}' has no nodes; give at least one.")
        for start, stop in chain.from_iterable((*override.first, *override.second) for override in self.overrides):
            if not 0 <= start < stop <= self.num_devices:
                last = self.num_devices - 1
                raise InputError(f"link override of ranks {start} to {stop - 1}: cluster '{self.name}' has ranks 0 to {last}.")

    @cached_property
    def _rank_stops(self) -> list[int]:
        return list(accumulate(run.num_devices for run in self.runs))

    @cached_property
    def _node_stops(self) -> list[int]:
        return list(accumulate(run.count for run in self.runs))

    @property
    def num_devices(self) -> int:
        """How many ranks there are."""
        return self._rank_stops[-1]

    @property
    def num_at_work(self) -> int:
        """How many of them work at once."""
        return self.at_work or self.num_devices

    @property
    def num_nodes(self) -> int:
        """How many machines there are."""
        return self._node_stops[-1]

    @property
    def nodes(self) -> Iterator[Node]:
        """Each node in rank order, equal ones repeated."""
        return (run.node for run in self.runs for _ in range(run.count))

    @cached_property
    def kinds(self) -> tuple[tuple[Device, int], ...]:
        """The distinct device kinds with how many there are of each, in rank order."""
        counts: dict[Device, int] = {}
        for run in self.runs:
            counts[run.node.device] = counts.get(run.node.device, 0) + run.num_devices
        return tuple(counts.items())

    @property
    def price_usd_per_h(self) -> float | None:
        """Price of all nodes together, or None if any node has no price."""
        prices = [run.node.price_usd_per_h for run in self.runs]
        known = [price * run.count for price, run in zip(prices, self.runs, strict=True) if price is not None]
        return math.fsum(known) if len(known) == len(prices) else None

    def _locate(self, rank: int) -> tuple[NodeRun, int, int]:
        """The run of a rank, the index of its node in the cluster, and its place within that node."""
        found = self._located.get(rank)  # a search asks a hundred thousand times
        if found is not None:
            return found
        if not 0 <= rank < self.num_devices:
            raise IndexError(f"rank {rank} is outside cluster '{self.name}', which has ranks 0 to {self.num_devices - 1}")
        index = bisect_right(self._rank_stops, rank)
        run = self.runs[index]
        node_in_run, place = divmod(rank - (self._rank_stops[index] - run.num_devices), run.node.num_devices)
        return self._located.setdefault(rank, (run, self._node_stops[index] - run.count + node_in_run, place))

    @cached_property
    def _located(self) -> dict[int, tuple[NodeRun, int, int]]:
        """What `_locate` has found."""
        return {}

    def node_of(self, rank: int) -> Node:
        """The node kind that holds a rank."""
        return self._locate(rank)[0].node

    def node_index(self, rank: int) -> int:
        """The position of the rank's node, from 0, in rank order."""
        return self._locate(rank)[1]

    def device(self, rank: int) -> Device:
        """The device of a rank."""
        device = self._locate(rank)[0].node.device
        return device if rank not in self.slowed else dataclasses.replace(device, name=f"{device.name}{SLOWED_MARK}{rank}")

    def device_id(self, rank: int) -> int:
        """The accelerator index a rank uses on its own node (the N of `cuda:N`)."""
        run, _, place = self._locate(rank)
        return run.node.device_ids[place] if run.node.device_ids else place

    def ranks_of(self, node_index: int) -> range:
        """The ranks of one node."""
        if not 0 <= node_index < self.num_nodes:
            raise IndexError(f"node {node_index} is outside cluster '{self.name}', which has nodes 0 to {self.num_nodes - 1}")
        index = bisect_right(self._node_stops, node_index)
        run = self.runs[index]
        later = self._node_stops[index] - node_index
        start = self._rank_stops[index] - later * run.node.num_devices
        return range(start, start + run.node.num_devices)

    def _override(self, rank_a: int, rank_b: int, same_node: bool) -> Link | None:
        covering = (override.link for override in reversed(self.overrides) if override.covers(rank_a, rank_b, same_node))
        return next(covering, None)

    def link(self, rank_a: int, rank_b: int) -> Link:
        """The link between two ranks: an override, the node's own link, or the slower of the two nodes' networks."""
        run_a, index_a, _ = self._locate(rank_a)
        run_b, index_b, _ = self._locate(rank_b)
        same_node = index_a == index_b
        override = self._override(rank_a, rank_b, same_node)
        if override is not None:
            return override
        return run_a.node.intra if same_node else slowest((run_a.node.inter, run_b.node.inter))

    def link_likeness(self, rank_a: int, rank_b: int) -> tuple[int, ...]:
        """Equal for pairs of ranks whose links are alike, so that one of many pairs can stand for the others."""
        (run_a, index_a, _), (run_b, index_b, _) = self._locate(rank_a), self._locate(rank_b)
        if self.overrides:
            return rank_a, rank_b
        return id(run_a), id(run_b), index_a == index_b, rank_a == rank_b

    def flow_bandwidth_bytes_per_s(self, rank_a: int, rank_b: int, num_flows: int = 1) -> float:
        """What the pair gets while `num_flows` pairs use the same two nodes' network at once.

        One flow alone drives one rail of a node (one of the eight cards of a p5), many share them all. Inside a node, and
        over an override, a pair has the link to itself.
        """
        run_a, index_a, _ = self._locate(rank_a)
        run_b, index_b, _ = self._locate(rank_b)
        link = self.link(rank_a, rank_b)
        if index_a == index_b or self._override(rank_a, rank_b, False) is not None:
            return link.bandwidth_bytes_per_s
        return min(node.inter.bandwidth_bytes_per_s / max(node.num_rails, num_flows) for node in (run_a.node, run_b.node))

    def slowest_link(self, ranks: Iterable[int]) -> Link:
        """The slowest link between any two of the ranks.

        Ranks of one run on the same sides of all overrides are interchangeable, so a few representatives stand for all pairs.
        """
        by_node: dict[int, dict[tuple[object, ...], list[int]]] = {}
        for rank in dict.fromkeys(ranks):
            run, node_index, _ = self._locate(rank)
            likes = by_node.setdefault(node_index, {}).setdefault((id(run), *(o.sides(rank) for o in self.overrides)), [])
            if len(likes) < 2:
                likes.append(rank)
        pairs = list(_representative_pairs(by_node))
        if not pairs:
            raise ValueError("the slowest link is asked of fewer than two ranks")
        return slowest(self.link(a, b) for a, b in pairs)

    def describe(self) -> str:
        """The content in one line: '2 × p4d.24xlarge (8 × a100-40gb) + 6 × g5.24xlarge (4 × a10g)'."""
        return " + ".join(_describe_run(run) for run in self.runs)

    def one_of(self, rank: int) -> Cluster:
        """The device of a rank as a cluster of its own."""
        node = self.node_of(rank)
        one = dataclasses.replace(node, num_devices=1, device_ids=(self.device_id(rank),) if node.device_ids else ())
        return Cluster(self.name, (NodeRun(one),))

    def first_nodes(self, num_devices: int) -> Cluster:
        """As many nodes as it takes for so many devices, or all, as a cluster of their own."""
        runs: list[NodeRun] = []
        for run in self.runs:
            if num_devices > 0:
                runs.append(NodeRun(run.node, min(run.count, -(-num_devices // run.node.num_devices))))
                num_devices -= runs[-1].num_devices
        return Cluster(self.name, tuple(runs))

    def with_nodes(self, nodes: Iterable[Node]) -> Cluster:
        """The same cluster with the node of each run replaced, in order; the numbers of devices must stay."""
        runs = tuple(NodeRun(node, run.count) for node, run in zip(nodes, self.runs, strict=True))
        return dataclasses.replace(self, runs=runs)


def _describe_run(run: NodeRun) -> str:
    label = run.node.label
    if "(" in label:
        return f"{run.count} × {label}"
    return label if run.count == 1 else f"{run.count} × ({label})"


def _representative_pairs(by_node: dict[int, dict[tuple[object, ...], list[int]]]) -> Iterator[tuple[int, int]]:
    """Pairs inside each distinct node, then pairs across nodes: two nodes per kind of rank are enough for those."""
    seen: set[tuple[tuple[object, int], ...]] = set()
    reps: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for node_index, kinds in by_node.items():
        signature = tuple((kind, len(likes)) for kind, likes in kinds.items())
        if signature not in seen:
            seen.add(signature)
            yield from combinations(chain.from_iterable(kinds.values()), 2)
        for kind, likes in kinds.items():
            if len(reps.setdefault(kind, [])) < 2:
                reps[kind].append((node_index, likes[0]))
    for (node_a, a), (node_b, b) in combinations(chain.from_iterable(reps.values()), 2):
        if node_a != node_b:
            yield a, b
