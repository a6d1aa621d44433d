"""Memory of one device: weights and what the optimizer keeps for them, activations of micro-batches in flight, and the rest."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from penstock.costs.collectives import BUCKET_BYTES
from penstock.costs.replay import MemoryTimeline, OpBytes, OpBytesSource, OpPeaks, Replay, activation_timeline, formula_bytes
from penstock.errors import InputError, near_misses
from penstock.models.ops import Model, Op, PlacedOp
from penstock.models.shapes import Shape

__all__ = [
    "CUDA_CONTEXT_BYTES",
    "NCCL_BYTES",
    "OPTIMIZER_CHUNK",
    "GradientRoom",
    "MemoryBreakdown",
    "MemoryTimeline",
    "OpBytes",
    "OpBytesSource",
    "OpPeaks",
    "activation_timeline",
    "bytes_per_parameter",
    "formula_bytes",
    "gradient_room",
    "rank_parameters",
    "stage_memory",
    "state_bytes",
]  # fmt: skip

CUDA_CONTEXT_BYTES = 2**29
"""What CUDA and its libraries take on a device before the first tensor."""
NCCL_BYTES = 2**30
"""What NCCL's channels and the driver's own buffers take on a device that talks to others: 0.3 to 1.5 GiB, more with more groups."""
OPTIMIZER_CHUNK = 2**24
"""Weights whose gradients the optimizer holds in fp32 at a time."""
SLACK = 0.02
"""Share of the other bytes that the allocator loses to rounding and fragments."""

_PRECISIONS = {"bf16": (2, 4), "fp16": (2, 4), "fp32": (4, 0)}
"""Bytes of a weight, and of its fp32 master copy."""
_MOMENTS = {"adamw": 8, "lamb": 8, "sgd": 4}
"""Bytes of fp32 moments per weight; sgd is with momentum."""
_UNIT = Shape(1)


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes on one device at the fullest moment, by purpose."""

    weights_bytes: float = 0.0
    gradients_bytes: float = 0.0
    master_weights_bytes: float = 0.0
    moments_bytes: float = 0.0
    activations_bytes: float = 0.0
    """Held between forward and backward passes by all micro-batches in flight."""
    workspace_bytes: float = 0.0
    """What the fullest moment of a pass, or of the optimizer's step, adds: gradients of activations, recomputed segments, scratch."""
    buffers_bytes: float = 0.0
    """Messages to and from the neighbours, gradient buckets, gathered weights."""
    slack_bytes: float = 0.0
    context_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """The sum of all parts."""
        return sum(size for _, size in self._items())

    @property
    def state_bytes(self) -> float:
        """Weights, gradients and what the optimizer keeps."""
        return self.weights_bytes + self.gradients_bytes + self.master_weights_bytes + self.moments_bytes

    def _items(self) -> list[tuple[str, float]]:
        return [(field.name.removesuffix("_bytes"), getattr(self, field.name)) for field in fields(self)]

    def rows(self) -> list[tuple[str, float, float]]:
        """(purpose, bytes, share of the total) for a table, the total last."""
        total = self.total_bytes
        rows = [(name.replace("_", " "), size, size / total if total else 0.0) for name, size in self._items()]
        return [*rows, ("total", total, 1.0)]

    def __add__(self, other: MemoryBreakdown) -> MemoryBreakdown:
        return MemoryBreakdown(*(mine + its for (_, mine), (_, its) in zip(self._items(), other._items(), strict=True)))


def bytes_per_parameter(precision: str, optimizer: str, gradients: str) -> tuple[int, int, int, int]:
    """Bytes of a trained weight: itself, its gradient (summed in the dtype `gradients`, or its own), its fp32 master copy, its moments."""
    if precision not in _PRECISIONS:
        raise InputError(f"precision '{precision}' is not known. {near_misses(precision, _PRECISIONS)}")
    if optimizer not in _MOMENTS:
        raise InputError(f"optimizer '{optimizer}' is not known. {near_misses(optimizer, _MOMENTS)}")
    weight, master = _PRECISIONS[precision]
    return weight, _PRECISIONS[gradients or precision][0], master, _MOMENTS[optimizer]


def state_bytes(
    num_parameters: float, precision: str = "bf16", optimizer: str = "adamw", zero: int = 0, dp: int = 1, trainable: bool = True,
    gradients: str = "",
) -> MemoryBreakdown:  # fmt: skip
    """What weights cost before any micro-batch comes; ZeRO divides optimizer state (1), gradients (2) and weights (3) by `dp`."""
    if not 0 <= zero <= 3 or dp < 1:
        raise InputError(f"zero={zero}, dp={dp}: ZeRO stages are 0 to 3, and dp is at least 1.")
    weight, gradient, master, moments = bytes_per_parameter(precision, optimizer, gradients)
    shares = [num_parameters / (dp if zero >= level else 1) for level in (3, 2, 1)]
    if not trainable:
        return MemoryBreakdown(weight * shares[0])
    return MemoryBreakdown(weight * shares[0], gradient * shares[1], master * shares[2], moments * shares[2])


def rank_parameters(placed: Sequence[PlacedOp], tp: int = 1) -> list[tuple[Op, float]]:
    """Weights of each op on one of `tp` ranks; a weight shared with an op of the same slice is counted at its owner."""
    tied = {place.op.tied_to for place in placed} - {""}
    owners = {place.name for place in placed if place.name in tied} if tied else tied
    known: dict[str, float] = {}
    counts = []
    for place in placed:
        if place.op.signature not in known:
            known[place.op.signature] = place.op.parameters.at(_UNIT, tp)
        count = known[place.op.signature]
        if place.op.tied_to in owners:
            count -= (place.op.parameters.at(_UNIT) - float(place.op.config.get("untied_parameters", 0))) / tp
        counts.append((place.op, count))
    return counts


def stage_memory(
    model: Model, start: int, stop: int, shape: Shape, *, in_flight: int = 1, versions: int = 1, tp: int = 1, dp: int = 1, zero: int = 0,
    algos: Sequence[int] | None = None, recompute: Collection[int] = frozenset(), precision: str = "", optimizer: str = "adamw",
    device: str = "cuda", slack: float = SLACK, context_bytes: float | None = None, bucket_bytes: float = BUCKET_BYTES,
    bytes_of: OpBytesSource = formula_bytes, base_bytes: float = 0.0, replay: Replay | None = None, gradients: str = "",
) -> MemoryBreakdown:  # fmt: skip
    """Memory of one device that runs ops `start` to `stop` on micro-batches of `shape` (its own share where dp divides them).

    `dp` counts the ranks that hold the same weights. `device` is a catalogue name; only `cpu` matters, it has no CUDA context.
    Of `in_flight` micro-batches one is at its fullest moment, the others hold what they keep. `base_bytes` is what libraries hold.
    Asynchronous schedules hold several `versions` of the weights, one for each micro-batch in flight.
    `replay` is one of the same model, shape, degree and bytes where several slices are asked for.
    """
    if in_flight < 1:
        raise InputError(f"in_flight={in_flight}: at least one micro-batch is in flight.")
    precision = precision or model.dtype
    counts = rank_parameters(model.ops[start:stop], tp)
    trained, frozen = (sum(count for op, count in counts if op.trainable == wanted) for wanted in (True, False))
    states = state_bytes(trained, precision, optimizer, zero, dp, True, gradients)
    states += state_bytes(frozen, precision, optimizer, zero, dp, False)
    states = replace(states, weights_bytes=states.weights_bytes + (versions - 1) * state_bytes(trained, precision).weights_bytes)
    timeline = (replay or Replay(model, shape, tp, bytes_of)).timeline(start, stop, algos, recompute)
    activations = timeline.held_bytes * in_flight
    room = gradient_room(counts, precision, optimizer, zero, dp, gradients)
    fullest = max(timeline.forward_peak_bytes, timeline.backward_peak_bytes + room.cast_bytes, room.late_cast_bytes)
    # The optimizer's step comes when no micro-batch is in flight, so that it may use the room of their activations.
    workspace = base_bytes + max(fullest - timeline.held_bytes, room.step_bytes - activations)
    buffers = _message_bytes(model, start, stop, shape, tp)
    buffers += _sync_bytes(model.ops[start:stop], counts, bytes_per_parameter(precision, optimizer, gradients), zero, dp, bucket_bytes)
    used = states.state_bytes + activations + workspace + buffers
    if context_bytes is None:
        # A rank without peers makes no communicator.
        alone = tp == dp == 1 and start == 0 and stop == model.num_ops
        context_bytes = 0.0 if device.startswith("cpu") else CUDA_CONTEXT_BYTES + (0 if alone else NCCL_BYTES)
    return states + MemoryBreakdown(
        activations_bytes=activations,
        workspace_bytes=workspace,
        buffers_bytes=buffers,
        slack_bytes=slack * used,
        context_bytes=context_bytes,
    )


def _message_bytes(model: Model, start: int, stop: int, shape: Shape, tp: int) -> float:
    """Two messages (an activation and a gradient) at each side that has a neighbour."""
    cuts = [cut for cut in (start, stop) if 0 < cut < model.num_ops]
    return sum(2 * model.boundary_bytes(cut).at(shape, tp) for cut in cuts)


class GradientRoom(NamedTuple):
    """What a rank needs to make gradients and to use them, beside the sums it keeps and the activations of micro-batches."""

    cast_bytes: float
    """The largest gradient that autograd makes in the weights' dtype and turns into a wider one before it is added, at any moment of a
    backward pass. Products add to the wider sums by themselves."""
    late_cast_bytes: float
    """The embedding's, which is made when its micro-batch holds nothing any more."""
    step_bytes: float
    """What the optimizer has in fp32 at a time, when no micro-batch is in flight."""


def gradient_room(
    counts: Sequence[tuple[Op, float]], precision: str, optimizer: str = "adamw", zero: int = 0, dp: int = 1, gradients: str = ""
) -> GradientRoom:
    """What a rank with these weights (`rank_parameters`) needs; `dp` ranks hold the same ones."""
    weight, gradient, master, _ = bytes_per_parameter(precision, optimizer, gradients)
    trained = [(op, count) for op, count in counts if op.trainable]
    cast = [(op, gradient * count) for op, count in trained if gradient != weight]
    by_autograd = [size for op, size in cast if op.kind != "linear" and (op.kind != "logits" or op.tied_to) and op.kind != "embedding"]
    late = [size for op, size in cast if op.kind == "embedding"]
    step = 4 * min(OPTIMIZER_CHUNK, sum(count for _, count in trained) / (dp if zero else 1)) if master else 0.0
    return GradientRoom(max(by_autograd, default=0.0), max(late, default=0.0), step)


def _sync_bytes(
    placed: Sequence[PlacedOp], counts: Sequence[tuple[Op, float]], per_weight: tuple[int, int, int, int], zero: int, dp: int,
    bucket_bytes: float,
) -> float:  # fmt: skip
    """Under ZeRO 0 and 1 one gradient bucket among several ranks; under 2 the gradients of a block twice, as they were made (in the
    weights' dtype) and on their way, and under 3 its weights twice too: one block in use, the next on its way."""
    weight, gradient, _, _ = per_weight
    if dp == 1:
        return 0.0
    if zero < 2:
        return min(bucket_bytes, gradient * sum(count for op, count in counts if op.trainable))
    blocks: dict[tuple[str, int], float] = {}
    for place, (_, count) in zip(placed, counts, strict=True):
        key = place.block, place.copy
        blocks[key] = blocks.get(key, 0.0) + count
    return (weight + gradient + (2 * weight if zero == 3 else 0)) * max(blocks.values(), default=0.0)
