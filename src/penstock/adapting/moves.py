"""From one plan to another: which boxes of which tensors go from which rank to which, and what that costs.

    old  rank 0  ██████            new  rank 0  ███              rank 0 lets go of three, rank 1 keeps two and receives
         rank 1        ██               rank 1     █████         what it lacks: one move of three

A rank receives what it needs under the new plan and lacks under the old one, once, and nothing else. A half-precision weight that comes
with its fp32 master does not travel: it is the master rounded. Of several ranks that hold a box, one on the receiver's node sends it, and
among those the one that sends least so far. Loss scale and data position are no tensors and are told with the new plan; random numbers are
functions of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from penstock.adapting.boxes import Region, chopped
from penstock.adapting.holdings import STATE, HeldTensor, Holdings, Layouts, Sizes, holdings
from penstock.clusters import Cluster
from penstock.costs.memory import CUDA_CONTEXT_BYTES, SLACK
from penstock.errors import InputError, PenstockError
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.runtime.checkpoints.layout import WEIGHTS
from penstock.runtime.checkpoints.manifest import Box, intersection, outside, volume

__all__ = ["MAX_MOVE_BYTES", "Move", "Moves", "moves"]

MAX_MOVE_BYTES = 16 * 2**20
"""The most that one move carries: buffers stay small, and several ranks that hold a large tensor share the work of sending it."""

LinkFactor = Callable[[int, int], float]
"""How many times longer a message between two ranks takes than the cluster says."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a global tensor that one rank sends to another."""

    kind: str
    """`weights`, `buffers`, `master`, or what the optimizer calls it: `exp_avg`, `exp_avg_sq`, `step`, `momentum_buffer`."""
    name: str
    """`op.parameter`, as in checkpoints."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box
    source: int
    target: int
    num_bytes: int


@dataclass(frozen=True)  # no slots: sums are computed once and cached
class Moves:
    """All that travels between two plans, and what each rank holds before, during and after."""

    boxes: tuple[Move, ...]
    before_bytes: Mapping[int, int]
    """What each rank of the old plan holds of weights, optimizer state and buffers."""
    arriving_bytes: Mapping[int, int]
    """What comes new to each rank, weights included that it rounds from masters."""
    after_bytes: Mapping[int, int]

    @property
    def num_bytes(self) -> int:
        """All that travels."""
        return sum(self.link_bytes.values())

    @cached_property
    def link_bytes(self) -> dict[tuple[int, int], int]:
        """Bytes that each rank sends to each other."""
        found: defaultdict[tuple[int, int], int] = defaultdict(int)
        for move in self.boxes:
            found[move.source, move.target] += move.num_bytes
        return dict(found)

    @cached_property
    def peak_bytes(self) -> dict[int, int]:
        """The most that each rank holds while it moves: a donor lets go of nothing before all have what they need, so that a move can be
        undone, and then takes its parts into place, where it makes room for them first.

        Gradients and activations are not counted: between two steps the former are zero, and the latter are gone.
        """
        parts = self.before_bytes, self.arriving_bytes, self.after_bytes
        return {rank: sum(own.get(rank, 0) for own in parts) for rank in sorted(set().union(*parts))}

    def unfit(self, cluster: Cluster) -> str:
        """Which rank has no room for the move; nothing if all have."""
        for rank, held in self.peak_bytes.items():
            device = cluster.device(rank)
            context = 0.0 if device.name.startswith("cpu") else CUDA_CONTEXT_BYTES
            if held * (1 + SLACK) + context > device.memory_bytes:
                return f"rank {rank} would hold {held / 1e9:.3g} GB of both plans, of {device.memory_bytes / 1e9:.3g} GB"
        return ""

    def time_s(self, cluster: Cluster, factor: LinkFactor = lambda _a, _b: 1.0) -> float:
        """Seconds for which training stands still if all links are busy at once: until the last rank has sent and received its share.

        A rank sends to one peer at a time and receives from one; a node's network is shared by all of its ranks.
        """
        busy: defaultdict[tuple[str, int], float] = defaultdict(float)
        counts: defaultdict[tuple[str, int], int] = defaultdict(int)
        latency_s = 0.0
        for (source, target), num_bytes in self.link_bytes.items():
            link, slower = cluster.link(source, target), factor(source, target)
            taken_s = slower * num_bytes / cluster.flow_bandwidth_bytes_per_s(source, target)
            nodes = cluster.node_index(source), cluster.node_index(target)
            for key in (("send", source), ("receive", target)):
                busy[key] += taken_s
                counts[key] += 1
            if nodes[0] != nodes[1]:
                busy["out", nodes[0]] += slower * num_bytes / cluster.node_of(source).inter.bandwidth_bytes_per_s
                busy["in", nodes[1]] += slower * num_bytes / cluster.node_of(target).inter.bandwidth_bytes_per_s
            latency_s = max(latency_s, link.latency_s)
        return max(busy.values(), default=0.0) + latency_s * max(counts.values(), default=0)


def moves(old: Plan, new: Plan, *, layouts: Layouts | None = None, cluster: Cluster | None = None) -> Moves:
    """The moves that are needed so that ranks that hold what `old` gives them hold what `new` does.

    `layouts` are those of the plans' model, worth keeping where many plans are compared; `cluster` says which ranks share a node, and is
    the old plan's unless given.
    """
    for word in ("model", "precision", "optimizer"):
        before, after = getattr(old, word), getattr(new, word)
        if before != after:
            raise InputError(f"{word} is '{after}' in the new plan, but '{before}' in the old one: what was learned does not fit. "
                             "Use plans of one model, precision and optimizer.")  # fmt: skip
    layouts = layouts or Layouts(model_of(old))
    cluster = cluster or cluster_of(old)
    sizes = Sizes.of(new)
    had, wanted = holdings(old, layouts), holdings(new, layouts)
    lacking = _lacking(had, wanted)
    boxes = _Sources(had, sizes, cluster).moves(_travelling(lacking, wanted, sizes))
    return Moves(tuple(boxes), _held_bytes(had, sizes), _lacking_bytes(lacking, sizes), _held_bytes(wanted, sizes))


@dataclass(frozen=True, slots=True)
class _Lacking:
    """A part of a tensor that a rank needs and does not have."""

    tensor: HeldTensor
    rank: int
    region: list[Box]


def _lacking(had: Holdings, wanted: Holdings) -> list[_Lacking]:
    found = []
    for key, tensor in wanted.items():
        before = had[key].regions if key in had else {}
        for rank, region in tensor.regions.items():
            own = before.get(rank, ())
            if own != region and (missing := outside(region, own)):
                found.append(_Lacking(tensor, rank, missing))
    return found


def _travelling(lacking: list[_Lacking], wanted: Holdings, sizes: Sizes) -> Iterator[_Lacking]:
    """Without the weights that a rank can round from masters which it has afterwards."""
    for one in lacking:
        masters: Region = ()
        if one.tensor.group == WEIGHTS and sizes.has_masters and (STATE, one.tensor.name) in wanted:
            masters = wanted[STATE, one.tensor.name].regions.get(one.rank, ())
        if region := outside(one.region, masters):
            yield _Lacking(one.tensor, one.rank, region)


class _Sources:
    """Chooses who sends: a rank on the receiver's node, then the one that sends least so far."""

    def __init__(self, had: Holdings, sizes: Sizes, cluster: Cluster) -> None:
        self.had, self.sizes, self.cluster = had, sizes, cluster
        self.sent: defaultdict[int, int] = defaultdict(int)

    def moves(self, lacking: Iterator[_Lacking]) -> Iterator[Move]:
        wanted = []
        for one in lacking:
            element_bytes = self.sizes.element_bytes(one.tensor.group)
            pieces = (piece for box in one.region for piece in chopped(box, MAX_MOVE_BYTES // max(1, element_bytes)))
            wanted += [(-volume(piece) * element_bytes, one.tensor.group, one.tensor.name, one.rank, piece) for piece in pieces]
        for _, group, name, rank, box in sorted(wanted):  # the largest first: small ones then even out what senders have to do
            left = [box]
            while left:
                part = left.pop()
                source, shared = self._source(self.had.get((group, name)), rank, part)
                left += outside([part], [shared])
                yield from self._kinds(self.had[group, name], source, rank, shared)

    def _source(self, tensor: HeldTensor | None, rank: int, box: Box) -> tuple[int, Box]:
        node = self.cluster.node_index(rank)
        found = [
            (self.cluster.node_index(source) != node, self.sent[source], source, shared)
            for source, region in (tensor.regions if tensor else {}).items()
            for own in region
            if (shared := intersection(own, box)) is not None
        ]
        if not found:
            raise PenstockError(f"rank {rank} needs a tensor that no rank of the old plan holds; is the old plan valid?")
        _, _, source, shared = min(found)
        return source, shared

    def _kinds(self, tensor: HeldTensor, source: int, rank: int, box: Box) -> Iterator[Move]:
        for kind, element_bytes in self.sizes.kinds[tensor.group].items():
            num_bytes = volume(box) * element_bytes
            self.sent[source] += num_bytes
            yield Move(kind, tensor.name, tensor.shape, box, source, rank, num_bytes)


def _held_bytes(held: Holdings, sizes: Sizes) -> dict[int, int]:
    found: defaultdict[int, int] = defaultdict(int)
    for tensor in held.values():
        for rank, region in tensor.regions.items():
            found[rank] += sum(map(volume, region)) * sizes.element_bytes(tensor.group)
    return dict(found)


def _lacking_bytes(lacking: list[_Lacking], sizes: Sizes) -> dict[int, int]:
    found: defaultdict[int, int] = defaultdict(int)
    for one in lacking:
        found[one.rank] += sum(map(volume, one.region)) * sizes.element_bytes(one.tensor.group)
    return dict(found)
