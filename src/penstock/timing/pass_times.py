"""The only reader of a cost table's times: what the passes of ops, and of whole stages, take for one micro-batch.

A stage's forward pass is the arithmetic of its ops, their tensor-parallel collectives, and the time its device waits for the host.
Its backward pass is that of its own ops and everything that runs again because it was not kept. Where a schedule splits the backward
pass, the weight half is half the backward arithmetic of ops with trained weights; all else is the input half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import CostTable, Floats
from penstock.models.ops import Model, Op, PlacedOp, Split
from penstock.models.segments import Segment, segments
from penstock.models.shapes import NOTHING, Shape

__all__ = [
    "OpPasses", "OpSlice", "StagePasses", "has_weight_gradients", "op_passes", "pass_grid_s", "rerun", "rerun_positions",
    "stage_passes", "waited_s",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpPasses:
    """Seconds of single ops for one micro-batch on one rank; arrays [ops], or [ops, shapes] for several micro-batches."""

    forward_s: Floats
    """Arithmetic; infinite where an op cannot be split so."""
    backward_s: Floats
    forward_tp_s: Floats
    """Tensor-parallel collectives."""
    backward_tp_s: Floats
    weight_s: Floats
    """The part of `backward_s` that is weight gradients."""

    @property
    def forward_pass_s(self) -> Floats:
        """Arithmetic and collectives of the forward pass."""
        return self.forward_s + self.forward_tp_s

    @property
    def backward_pass_s(self) -> Floats:
        """Arithmetic and collectives of the backward pass."""
        return self.backward_s + self.backward_tp_s

    @property
    def both_s(self) -> Floats:
        """Both passes."""
        return self.forward_pass_s + self.backward_pass_s


@dataclass(frozen=True, slots=True)
class OpSlice:
    """Ops [first, last) of a model as one rank of a device kind runs them; `algos` and `recompute` are by position within the slice."""

    model: Model
    first: int
    last: int
    device: str
    tp: int = 1
    algos: Sequence[int] = ()
    """The split of each op; the first one unless given."""
    recompute: Collection[int] = frozenset()
    """What is not kept but run again."""
    recorded: float = 0.0
    """The share of passes that are issued at once, see `recorded`: a device never waits for its host in these."""

    @property
    def places(self) -> tuple[PlacedOp, ...]:
        """The ops."""
        return self.model.ops[self.first : self.last]

    @property
    def kinds(self) -> NDArray[np.int64]:
        """[ops] the split of each."""
        return np.array(list(self.algos) or [0] * (self.last - self.first), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Seconds of a stage for one micro-batch, on the slowest of its ranks, by pass and by cause."""

    forward_s: float = 0.0
    """Arithmetic."""
    backward_s: float = 0.0
    recompute_s: float = 0.0
    """Arithmetic of ops that run again, in the backward pass."""
    forward_tp_s: float = 0.0
    """Tensor-parallel collectives, and moving the carry between ops of different degrees."""
    backward_tp_s: float = 0.0
    """The same in the backward pass, with those of ops that run again."""
    forward_wait_s: float = 0.0
    """The device waits for the host, which issues small work more slowly than the device does it."""
    backward_wait_s: float = 0.0
    transfer_in_s: float = 0.0
    """Activations from the stage before."""
    transfer_out_s: float = 0.0
    """Gradients from the stage after, for what was sent to it."""
    weight_s: float = 0.0
    """The part of `backward_s` that is weight gradients; not counted again in sums."""

    @property
    def forward_pass_s(self) -> float:
        """The whole forward pass, messages apart."""
        return self.forward_s + self.forward_tp_s + self.forward_wait_s

    @property
    def backward_pass_s(self) -> float:
        """The whole backward pass, messages apart."""
        return self.backward_s + self.recompute_s + self.backward_tp_s + self.backward_wait_s

    @property
    def tp_s(self) -> float:
        """Tensor-parallel collectives and changes of degree of both passes."""
        return self.forward_tp_s + self.backward_tp_s

    @property
    def waiting_s(self) -> float:
        """Waits for the host in both passes."""
        return self.forward_wait_s + self.backward_wait_s

    @property
    def total_s(self) -> float:
        """Both passes and the messages that the stage receives, one after the other."""
        return self.forward_pass_s + self.backward_pass_s + self.transfer_in_s + self.transfer_out_s

    def __add__(self, other: StagePasses) -> StagePasses:
        return StagePasses(*(getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)))


def has_weight_gradients(op: Op) -> bool:
    """Whether half of an op's backward pass is the gradients of its own weights."""
    return op.trainable and op.parameters != NOTHING


def op_passes(
    model: Model, table: CostTable, shape: Shape | None, *, device: str, tp: int = 1, algos: int | NDArray[np.int64] = 0,
    ops: NDArray[np.int32] | None = None,
) -> OpPasses:  # fmt: skip
    """Times of the ops with these numbers, of all distinct ones unless given; at every shape of the table where `shape` is None."""
    which = np.arange(len(table.op_names), dtype=np.int32) if ops is None else ops
    s = slice(None) if shape is None else table.shape_index(shape)
    at = (which, s, table.tp_index(tp), algos, table.device_index(device))
    backward = table.backward_s[at]
    trained = np.array([has_weight_gradients(op) for op in model.distinct_ops])[which]
    half = (trained / 2).reshape(-1, *[1] * (backward.ndim - 1))
    # An infinite time times the half of an untrained op would be no number.
    weight = np.multiply(backward, half, out=np.zeros_like(backward), where=half > 0)
    return OpPasses(table.forward_s[at], backward, table.forward_comm_s[at], table.backward_comm_s[at], weight)


def stage_passes(table: CostTable, ops: OpSlice, shape: Shape, slower: float = 1.0) -> StagePasses:
    """Both passes of a run of ops; collectives take `slower` times what the table says."""
    sums = _sums(table, ops, shape, slower)
    return StagePasses(**{name: float(value) for name, value in sums.items()})


def pass_grid_s(table: CostTable, ops: OpSlice, slower: float) -> Floats:
    """[shapes, 2] the whole forward and backward pass of a run of ops at every shape of a table, as `stage_passes` has them."""
    sums = _sums(table, ops, None, slower)
    forward = sums["forward_s"] + sums["forward_tp_s"] + sums["forward_wait_s"]
    backward = sums["backward_s"] + sums["recompute_s"] + sums["backward_tp_s"] + sums["backward_wait_s"]
    return np.stack([forward, backward], axis=-1)


def _sums(table: CostTable, ops: OpSlice, shape: Shape | None, slower: float) -> dict[str, Floats]:
    """The fields of `StagePasses`, each a number, or [shapes] where no shape is given."""
    places, kinds = ops.places, ops.kinds
    parts = segments(places, ops.recompute)
    again = _rerun_positions(places, parts, kinds.tolist())
    own = _own_passes(table, ops, shape, slower)
    forward_wait = backward_wait = np.zeros(own.forward_s.shape[1:])
    if len(table.host_s) and ops.recorded < 1.0:
        device_s, host_s = _issued(table, ops, shape, own, parts, again)
        waits = (1.0 - ops.recorded) * waited_s(device_s, host_s)
        forward_wait, backward_wait = waits[len(places) - 1], waits[-1] - waits[len(places) - 1]
    return {
        "forward_s": own.forward_s.sum(axis=0),
        "backward_s": own.backward_s.sum(axis=0),
        "recompute_s": own.forward_s[again].sum(axis=0),
        "forward_tp_s": own.forward_tp_s.sum(axis=0),
        "backward_tp_s": own.backward_tp_s.sum(axis=0) + own.forward_tp_s[again].sum(axis=0),
        "forward_wait_s": forward_wait,
        "backward_wait_s": backward_wait,
        "weight_s": own.weight_s.sum(axis=0),
    }


def _own_passes(table: CostTable, ops: OpSlice, shape: Shape | None, slower: float) -> OpPasses:
    chain = table.chain[ops.first : ops.last]
    own = op_passes(ops.model, table, shape, device=ops.device, tp=ops.tp, algos=ops.kinds, ops=chain)
    if slower == 1.0:
        return own
    return dataclasses.replace(own, forward_tp_s=slower * own.forward_tp_s, backward_tp_s=slower * own.backward_tp_s)


def _issued(
    table: CostTable, ops: OpSlice, shape: Shape | None, own: OpPasses, parts: Sequence[Segment], again: Sequence[int]
) -> tuple[Floats, Floats]:
    """(device, host) time of each piece of work of one micro-batch, in the order in which the host issues it."""
    order = _issue_order(parts, set(again))
    device_s = np.stack([own.forward_pass_s, own.backward_pass_s, own.forward_pass_s])[order[:, 0], order[:, 1]]
    if not len(table.host_s):
        return device_s, np.zeros(device_s.shape)
    host_s = table.host_s[..., table.tp_index(ops.tp), table.device_index(ops.device)].swapaxes(1, 2)  # [distinct ops, 3, shapes]
    found = host_s[table.chain[ops.first : ops.last][order[:, 1]], order[:, 0]]
    return device_s, found if shape is None else found[:, table.shape_index(shape)]


def _issue_order(parts: Sequence[Segment], again: Collection[int]) -> NDArray[np.int64]:
    """(0 forward, 1 backward or 2 forward again; position) of every piece of work in the order the host issues it."""
    order = [(0, index) for part in parts for index in range(part.start, part.stop)]
    for part in reversed(parts):
        order += [(2, index) for index in range(part.start, part.stop) if index in again]
        order += [(1, index) for index in range(part.stop - 1, part.start - 1, -1)]
    return np.array(order, dtype=np.int64).reshape(-1, 2)


def waited_s(device_s: Floats, host_s: Floats) -> Floats:
    """How long a device has waited for its host when each piece of work begins.

    A piece starts when the one before has ended and the host has issued it, so the last ends at the largest, over all
    pieces, of (host time up to and with it) + (device time from it on).
    """
    late = np.cumsum(host_s, axis=0) - (np.cumsum(device_s, axis=0) - device_s)
    return np.asarray(np.maximum.accumulate(np.maximum(late, 0.0), axis=0))


def rerun(places: Sequence[PlacedOp], algos: Sequence[int]) -> int:
    """How many ops of a recomputed segment run again: recomputation stops as soon as all saved tensors are back.

    Ops at the end that save nothing never run again, nor does the last op that saves only its input, as a linear op does;
    a gated activation is a Python function, and those save their input after they have run.
    """
    for position in range(len(places) - 1, -1, -1):
        split = places[position].op.splits[algos[position]]
        if split.kept != NOTHING or split.saves_out:
            return position + 1
        if split != Split(split.collectives):
            return position + bool(places[position].op.config.get("gated"))
    return 0


def rerun_positions(places: Sequence[PlacedOp], recompute: Collection[int]) -> list[int]:
    """Positions of all ops that run again when those in `recompute` are recomputed."""
    return _rerun_positions(places, segments(places, recompute), [0] * len(places))


def _rerun_positions(places: Sequence[PlacedOp], parts: Sequence[Segment], algos: Sequence[int]) -> list[int]:
    return [
        index for part in parts if part.recomputed
        for index in range(part.start, part.start + rerun(places[part.start : part.stop], algos[part.start : part.stop]))
    ]  # fmt: skip
