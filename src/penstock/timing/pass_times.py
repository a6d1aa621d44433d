"""Times of a run of ops for one micro-batch: forward, backward, what recomputation adds, and tensor-parallel collectives."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import CostTable, Floats
from penstock.models.ops import Model, PlacedOp, Split
from penstock.models.segments import Segment, segments
from penstock.models.shapes import NOTHING, Shape

__all__ = ["StageTimes", "rerun", "rerun_positions", "stage_times", "waiting_s"]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds for one micro-batch on one rank."""

    forward_s: float
    backward_s: float
    recompute_s: float
    forward_comm_s: float
    backward_comm_s: float
    waiting_s: float = 0.0
    """The device waits this long for the host, which issues small work more slowly than the device does it."""
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Everything, one after the other."""
        compute_s = self.forward_s + self.backward_s + self.recompute_s + self.optimizer_s
        return compute_s + self.forward_comm_s + self.backward_comm_s + self.waiting_s


def waiting_s(device_s: Floats, host_s: Floats) -> float:
    """How long a device waits in all for a host that issues its work in this order, one piece after the other.

    A piece starts when the one before has ended and the host has issued it, so the last ends at the largest, over all
    pieces, of (host time up to and with it) + (device time from it on).
    """
    before = np.cumsum(device_s) - device_s
    return float(np.max(np.cumsum(host_s) - before, initial=0.0))


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


def rerun_positions(places: Sequence[PlacedOp], recompute: Collection[int], algos: Sequence[int] = ()) -> list[int]:
    """Positions of all ops that run again when those in `recompute` are recomputed."""
    return _rerun_positions(places, segments(places, recompute), list(algos) or [0] * len(places))


def _rerun_positions(places: Sequence[PlacedOp], parts: Sequence[Segment], algos: Sequence[int]) -> list[int]:
    return [
        index for part in parts if part.recomputed
        for index in range(part.start, part.start + rerun(places[part.start : part.stop], algos[part.start : part.stop]))
    ]  # fmt: skip


def stage_times(
    model: Model, table: CostTable, start: int, stop: int, shape: Shape, *, device: str, tp: int = 1, algos: Sequence[int] = (),
    recompute: Collection[int] = frozenset(), optimizer: tuple[float, float] = (0.0, 0.0),
) -> StageTimes:  # fmt: skip
    """Adds up ops `start` to `stop`; `algos` and `recompute` are by position within the slice.

    `optimizer` is the (device, host) time of a step that follows at once, as where one micro-batch is the whole batch.
    """
    places = model.ops[start:stop]
    kinds = np.array(list(algos) or [0] * len(places), dtype=np.int64)
    s, t, d = table.shape_index(shape), table.tp_index(tp), table.device_index(device)
    ops = table.chain[start:stop]
    parts = segments(places, recompute)
    again = _rerun_positions(places, parts, kinds.tolist())
    forward, backward = table.forward_s[ops, s, t, kinds, d], table.backward_s[ops, s, t, kinds, d]
    forward_comm, backward_comm = table.forward_comm_s[ops, s, t, kinds, d], table.backward_comm_s[ops, s, t, kinds, d]
    device_s = np.stack([forward + forward_comm, backward + backward_comm, forward + forward_comm])
    if len(table.host_s):
        order = _issue_order(parts, set(again))
        device_s, host_s = device_s[order[:, 0], order[:, 1]], table.host_s[ops[order[:, 1]], order[:, 0], d]
    else:  # nothing waits for the host but the optimizer
        device_s, host_s = np.array([device_s[:2].sum() + device_s[2, again].sum()]), np.zeros(1)
    return StageTimes(
        forward_s=float(forward.sum()),
        backward_s=float(backward.sum()),
        recompute_s=float(forward[again].sum()),
        forward_comm_s=float(forward_comm.sum() + forward_comm[again].sum()),
        backward_comm_s=float(backward_comm.sum()),
        waiting_s=waiting_s(np.append(device_s, optimizer[0]), np.append(host_s, optimizer[1])),
        optimizer_s=optimizer[0],
    )


def _issue_order(parts: Sequence[Segment], again: Collection[int]) -> NDArray[np.int64]:
    """(0 forward, 1 backward or 2 forward again; position) of every piece of work in the order the host issues it."""
    order = [(0, index) for part in parts for index in range(part.start, part.stop)]
    for part in reversed(parts):
        order += [(2, index) for index in range(part.start, part.stop) if index in again]
        order += [(1, index) for index in range(part.stop - 1, part.start - 1, -1)]
    return np.array(order, dtype=np.int64).reshape(-1, 2)
