"""Which rank sends which part of the carry to which rank, where neighbouring stages may be split differently.

Each rank holds, of each tensor, an interval of rows (its share of the samples; under sequence parallelism its part of those) and
intervals of columns (its tensor-parallel part, where the tensor is split). A receiver takes from the other side what overlaps:

    rows      stage 0, dp 2      stage 1, dp 1          columns   stage 0, tp 1      stage 1, tp 2   (q, k, v divided one by one)
      0:5     rank 0 ──────────► rank 2 rows 0:5          q k v   rank 0 ──────────► rank 1  first halves of q, k and v
      5:9     rank 1 ──────────► rank 2 rows 5:9                         ──────────► rank 2  second halves

What several senders hold alike comes from one of them, chosen so that receivers spread over senders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from penstock.errors import InputError
from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model, TensorSpec
from penstock.plans.plan import Stage
from penstock.programs.instructions import Dtype, Need, Part, Tensor

__all__ = [
    "Carried",
    "Cut",
    "Interval",
    "Message",
    "Side",
    "TensorLayout",
    "carried",
    "cut_of",
    "entry_side",
    "exit_side",
    "needs_of",
    "shard",
]

Interval = tuple[int, int]
_SEQUENCE = ("tokens", "dec_tokens")


class Message(NamedTuple):
    """A message from one rank to another; ranks are positions among those of their stage and replica."""

    sender: int
    receiver: int
    sent: tuple[Part, ...]
    received: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Side:
    """The division of the carry among the ranks of a stage, at one end of it."""

    tp: int
    dp: int
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """Ranks in one replica."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class Carried:
    """A tensor of the carry at a cut, with the dtype it travels in."""

    name: str
    dtype: Dtype
    feature: str
    """What its rows count (`tokens`, `dec_tokens`, `samples`); empty where it has no rows."""
    dims: tuple[int, ...]
    """All sizes, or those after the rows."""
    widths: tuple[int, ...]
    """Where tp divides the last dimension: the widths that are divided one by one; none where every rank has the whole."""
    differentiable: bool

    def divides_rows(self, side: Side) -> bool:
        """Whether the tp ranks of a side hold different rows."""
        return side.sequence_parallel and side.tp > 1 and not self.widths and self.feature in _SEQUENCE


def shard(count: int, parts: int, index: int) -> Interval:
    """One of equal parts of `count` items; where they do not divide, the last ones are shorter."""
    part = -(-count // parts)
    return min(index * part, count), min((index + 1) * part, count)


def entry_side(stage: Stage) -> Side:
    """The division of the carry that the first op of a stage wants."""
    run = stage.run_of(stage.first)
    return Side(run.tp, run.dp, stage.sequence_parallel)


def exit_side(stage: Stage) -> Side:
    """The division of the carry that the last op of a stage leaves."""
    run = stage.run_of(stage.last - 1)
    return Side(run.tp, run.dp, stage.sequence_parallel)


def carried(model: Model, op: int) -> tuple[Carried, ...]:
    """The carry that enters op `op`."""
    return tuple(_carried(model, op, spec) for spec in model.carry_before(op))


def _carried(model: Model, op: int, spec: TensorSpec) -> Carried:
    feature = spec.dims[0] if spec.dims and isinstance(spec.dims[0], str) else ""
    dims = [dim for dim in (spec.dims[1:] if feature else spec.dims) if isinstance(dim, int)]
    if len(dims) + bool(feature) != len(spec.dims):
        raise InputError(f"tensor '{spec.name}' before op {op} has dims {spec.dims}: only the first may name a feature of the micro-batch.")
    dtype: Dtype = model.dtype if spec.dtype == "compute" else spec.dtype  # type: ignore[assignment]
    widths = _widths(model, op, spec.name, dims[-1]) if spec.split else ()
    return Carried(spec.name, dtype, feature, tuple(dims), widths, spec.differentiable)


def _widths(model: Model, op: int, name: str, width: int) -> tuple[int, ...]:
    """The widths that tp divides one by one (q, k and v), as the op that made the tensor says."""
    for place in reversed(model.ops[:op]):
        if place.op.config.get("output") == name:
            parts = tuple(place.op.config.get("parts") or ())
            return parts if sum(parts) == width else (width,)
    return (width,)


def cut_of(model: Model, before: Stage, after: Stage) -> Cut:
    """The cut between two neighbouring stages."""
    return Cut(exit_side(before), entry_side(after), carried(model, after.first))


class Cut:
    """The cut between two stages, and what crosses it of any micro-batch."""

    def __init__(self, before: Side, after: Side, carry: Sequence[Carried]) -> None:
        self.before, self.after = before, after
        self.carry = tuple(carry)
        self.gradients = tuple(tensor for tensor in carry if tensor.differentiable)
        self._columns: dict[tuple[str, int, int, int, int], tuple[tuple[Interval, Interval], ...]] = {}

    def messages(self, before: TensorLayout, after: TensorLayout, gradient: bool = False) -> tuple[Message, ...]:
        """All messages of a micro-batch over this cut: its activations, or its gradients back."""
        source, target = (after, before) if gradient else (before, after)
        receivers = target.side
        found: dict[tuple[int, int], tuple[list[Part], list[Part]]] = {}
        for tensor in self.gradients if gradient else self.carry:
            for share in target.live:
                shares = self._sources(tensor, share, source, target, gradient)
                for place in range(receivers.tp):
                    for pair, sent, got in self._parts(tensor, source, target, shares, share, place):
                        lists = found.setdefault(pair, ([], []))
                        lists[0].append(sent)
                        lists[1].append(got)
        return tuple(Message(*pair, tuple(sent), tuple(got)) for pair, (sent, got) in sorted(found.items()))

    def _sources(self, tensor: Carried, share: int, source: TensorLayout, target: TensorLayout, gradient: bool) -> list[int]:
        """The sending shares that have something of a receiving one."""
        if tensor.feature:
            first, last = target.rows(tensor, share)
            spans = ((sender, source.rows(tensor, sender)) for sender in source.live)
            return [sender for sender, (start, end) in spans if start < last and first < end] or source.live[:1]
        if not gradient:
            return [_spread(share, target.live, source.live)]
        return [sender for sender in source.live if _spread(sender, source.live, target.live) == share]

    def _parts(
        self, tensor: Carried, source: TensorLayout, target: TensorLayout, shares: Sequence[int], share: int, place: int
    ) -> Iterator[tuple[tuple[int, int], Part, Part]]:
        """((sender, receiver), the part as the sender has it, as the receiver has it) of one tensor on one receiver."""
        senders, receivers = source.side, target.side
        wanted = target.held(tensor, share, place)
        receiver = share * receivers.tp + place
        if tensor.widths or tensor.divides_rows(senders):
            lanes: Sequence[int] = range(senders.tp)
        else:
            lanes = (place * senders.tp // receivers.tp,)
        empty = wanted[0] == wanted[1]
        for sender in shares:
            for lane in lanes:
                had = source.held(tensor, sender, lane)
                rows = max(had[0], wanted[0]), min(had[1], wanted[1])
                if rows[0] >= rows[1] and tensor.feature and not empty:
                    continue
                for own, its in self._column_pairs(tensor, senders.tp, lane, receivers.tp, place):
                    sent = source.part(tensor, sender, lane, (0, 0) if empty else (rows[0] - had[0], rows[1] - had[0]), own)
                    rows_got = (0, 0) if empty else (rows[0] - wanted[0], rows[1] - wanted[0])
                    got = target.part(tensor, share, place, rows_got, its, add=not tensor.feature and sender != shares[0])
                    yield (sender * senders.tp + lane, receiver), sent, got
                if empty and not tensor.widths:
                    return

    def _column_pairs(self, tensor: Carried, tp: int, lane: int, other_tp: int, place: int) -> tuple[tuple[Interval, Interval], ...]:
        """Intervals of columns that a sender and a receiver share, each in its own numbering."""
        if not tensor.widths:
            width = tensor.dims[-1] if tensor.dims else 1
            return (((0, width), (0, width)),)
        key = (tensor.name, tp, lane, other_tp, place)
        if key not in self._columns:
            self._columns[key] = tuple(_overlaps(tensor.widths, tp, lane, other_tp, place))
        return self._columns[key]


def _spread(item: int, items: Sequence[int], others: Sequence[int]) -> int:
    """The one of `others` that serves `item`: neighbours are served by the same or by neighbours."""
    return others[items.index(item) * len(others) // len(items)]


def _overlaps(widths: Sequence[int], tp: int, lane: int, other_tp: int, place: int) -> Iterator[tuple[Interval, Interval]]:
    own_at = its_at = 0
    if tp == other_tp:
        if lane == place:
            width = sum(last - first for first, last in (shard(w, tp, lane) for w in widths))
            yield (0, width), (0, width)
        return
    for width in widths:
        own, its = shard(width, tp, lane), shard(width, other_tp, place)
        first, last = max(own[0], its[0]), min(own[1], its[1])
        if first < last:
            yield (own_at + first - own[0], own_at + last - own[0]), (its_at + first - its[0], its_at + last - its[0])
        own_at += own[1] - own[0]
        its_at += its[1] - its[0]


class TensorLayout:
    """One micro-batch on one side: who has which rows."""

    def __init__(self, side: Side, micro: MicroBatch) -> None:
        self.side, self.micro = side, micro
        shares = [micro.share(side.dp, index) for index in range(side.dp)]
        self.live = [index for index, (first, last) in enumerate(shares) if first < last]
        """Shares with samples; ranks of the others skip the micro-batch."""
        self.shapes = [micro.shape(side.dp, index) for index in range(side.dp)]
        self._starts: dict[str, list[int]] = {}

    def rows(self, tensor: Carried, share: int) -> Interval:
        """The rows of a share, counted in the whole micro-batch; one row for a tensor without."""
        if not tensor.feature:
            return 0, 1
        starts = self._starts.get(tensor.feature)
        if starts is None:
            counts = (getattr(shape, tensor.feature) for shape in self.shapes)
            starts = self._starts[tensor.feature] = [0, *accumulate(counts)]
        return starts[share], starts[share + 1]

    def held(self, tensor: Carried, share: int, place: int) -> Interval:
        """The rows of one rank."""
        first, last = self.rows(tensor, share)
        if not tensor.divides_rows(self.side):
            return first, last
        own = shard(last - first, self.side.tp, place)
        return first + own[0], first + own[1]

    def shape(self, tensor: Carried, share: int, place: int) -> tuple[int, ...]:
        """The tensor on one rank."""
        dims = tensor.dims
        if tensor.widths:
            own = (shard(width, self.side.tp, place) for width in tensor.widths)
            dims = (*dims[:-1], sum(last - first for first, last in own))
        if not tensor.feature:
            return dims
        first, last = self.held(tensor, share, place)
        return (last - first, *dims)

    def part(self, tensor: Carried, share: int, place: int, rows: Interval, columns: Interval, add: bool = False) -> Part:
        """Some rows and columns of the tensor on one rank."""
        shape = self.shape(tensor, share, place)
        whole_rows = not tensor.feature or rows == (0, shape[0])
        whole_columns = not tensor.widths or columns == (0, shape[-1])
        return Part(tensor.name, tensor.dtype, shape, None if whole_rows else rows, None if whole_columns else columns, add)

    def tensors(self, carry: Sequence[Carried], index: int) -> tuple[Tensor, ...]:
        """All tensors on one rank of the side."""
        share, place = divmod(index, self.side.tp)
        return tuple(Tensor(tensor.name, tensor.dtype, self.shape(tensor, share, place)) for tensor in carry)


def needs_of(model: Model, first: int, last: int) -> tuple[Need, ...]:
    """Inputs that ops [first, last) read besides the carry: embeddings ids, the model's first op inputs, the last labels.

    A stage of somebody's module runs the code between all its units, which may read anything.
    """
    if any(place.op.kind == "traced" for place in model.ops[first:last]):
        return ("inputs", "dec_inputs", "labels") if model.dec_length else ("inputs", "labels")
    needs: dict[Need, None] = {"inputs": None} if first == 0 else {}
    for place in model.ops[first:last]:
        if place.op.kind == "embedding":
            needs["dec_inputs" if place.op.config.get("side") == "decoder" else "inputs"] = None
    if last == model.num_ops:
        needs["labels"] = None
    return tuple(needs)
