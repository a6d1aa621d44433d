"""Memory of one device: weights and what the optimizer keeps for them, activations over a micro-batch's life, and the rest.

A micro-batch's life is replayed op by op. Forward, the level rises by what each op keeps; backward, it falls again while gradients
come and go; a recomputed segment keeps only the carry that enters it and is filled in again as a whole:

    level │          ┌──┐ workspace                 ┌─┐ gradients, workspace of the backward pass
          │      ┌───┘  └────────── kept ───────────┘ └──┐
          │  ┌───┘                                       └───┐  ┌┐ recomputed segment
          │──┘ inputs                                        └──┘└──
            op 0    op 1    op 2   …   other micro-batches   op 2  op 1  op 0
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from penstock.costs.collectives import BUCKET_BYTES
from penstock.errors import InputError, near_misses
from penstock.models.kept import walk
from penstock.models.ops import Model, Op, PlacedOp, TensorSpec
from penstock.models.segments import segments
from penstock.models.shapes import Shape

__all__ = [
    "CUDA_CONTEXT_BYTES", "OPTIMIZER_CHUNK", "MemoryBreakdown", "OpBytes", "OpBytesSource", "OpPeaks", "Timeline", "activation_timeline",
    "bytes_per_parameter", "formula_bytes", "rank_parameters", "stage_memory", "state_bytes",
]  # fmt: skip

CUDA_CONTEXT_BYTES = 2**29
"""What CUDA and its libraries take on a device before the first tensor."""
OPTIMIZER_CHUNK = 2**24
"""Weights whose gradients the optimizer holds in fp32 at a time."""
SLACK = 0.02
"""Share of the other bytes that the allocator loses to rounding and fragments."""

_PRECISIONS = {"bf16": (2, 2, 4), "fp16": (2, 2, 4), "fp32": (4, 4, 0)}
"""Bytes of a weight, its gradient and its fp32 master copy."""
_MOMENTS = {"adamw": 8, "sgd": 4}
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
        """All of it."""
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


def bytes_per_parameter(precision: str = "bf16", optimizer: str = "adamw") -> tuple[int, int, int, int]:
    """Bytes of a trained weight: itself, its gradient, its fp32 master copy, its moments."""
    if precision not in _PRECISIONS:
        raise InputError(f"precision '{precision}' is not known. {near_misses(precision, _PRECISIONS)}")
    if optimizer not in _MOMENTS:
        raise InputError(f"optimizer '{optimizer}' is not known. {near_misses(optimizer, _MOMENTS)}")
    return (*_PRECISIONS[precision], _MOMENTS[optimizer])


def state_bytes(
    num_parameters: float, precision: str = "bf16", optimizer: str = "adamw", zero: int = 0, dp: int = 1, trainable: bool = True
) -> MemoryBreakdown:
    """What weights cost before any micro-batch comes; ZeRO divides optimizer state (1), gradients (2) and weights (3) by `dp`."""
    if not 0 <= zero <= 3 or dp < 1:
        raise InputError(f"zero={zero}, dp={dp}: ZeRO stages are 0 to 3, and dp is at least 1.")
    weight, gradient, master, moments = bytes_per_parameter(precision, optimizer)
    shares = [num_parameters / (dp if zero >= level else 1) for level in (3, 2, 1)]
    if not trainable:
        return MemoryBreakdown(weight * shares[0])
    return MemoryBreakdown(weight * shares[0], gradient * shares[1], master * shares[2], moments * shares[2])


class OpBytes(NamedTuple):
    """What one op takes for one micro-batch on one rank."""

    kept: float
    """Bytes that only this op saves for its backward pass: carry tensors it saves are not in it, they are shared."""
    workspace: float
    backward_workspace: float


class OpPeaks(NamedTuple):
    """The same as measured: the fullest moments of both passes above the level when each began."""

    kept: float
    forward_peak: float
    backward_peak: float

    def bytes_of(self, made: float, input_gradients: float) -> OpBytes:
        """What is left of the peaks once the carry tensors the op makes, and the gradients of its input, are taken out."""
        return OpBytes(self.kept, self.forward_peak - made - self.kept, self.backward_peak - input_gradients)


OpBytesSource = Callable[[Op, Shape, int, int], OpBytes | OpPeaks]
"""(op, shape, tp, algo) → bytes: the formulas of the description, or a profile's measurements in their place."""


def formula_bytes(op: Op, shape: Shape, tp: int = 1, algo: int = 0) -> OpBytes:
    """What the op's own description says."""
    return OpBytes(op.splits[algo].kept.at(shape, tp), op.workspace.at(shape, tp), op.backward_workspace.at(shape, tp))


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bytes of one micro-batch above the level before it came."""

    kept_bytes: float
    """What the ops save from the forward to the backward pass."""
    held_bytes: float
    """The same and the carry that entered, which autograd holds even where no op saves it."""
    forward_peak_bytes: float
    backward_peak_bytes: float

    @property
    def peak_bytes(self) -> float:
        """The fullest moment of both passes."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)


_Tensor = tuple[int, str]


class _Step(NamedTuple):
    """One op of the replay."""

    own: OpBytes
    enters: tuple[_Tensor, ...]
    touched: frozenset[_Tensor]
    """All it reads, returns and saves."""
    saves: tuple[_Tensor, ...]
    gradients: float
    """Bytes of the gradients of its output and of its input; one that is only handed on is the same tensor."""
    output_gradients: float


class _Ledger:
    """Tensors held at a moment, each counted once, and a log by which additions are taken back in reverse order."""

    def __init__(self, sizes: dict[_Tensor, float]) -> None:
        self.sizes, self.level = sizes, 0.0
        self._held: set[_Tensor] = set()
        self._log: list[tuple[list[_Tensor], float]] = []

    def add(self, tensors: Iterable[_Tensor], own: float = 0.0) -> None:
        """Holds what is not held yet, and `own` bytes beside."""
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in self._held]
        self._held.update(new)
        self._log.append((new, self.level))
        self.level += own + sum(self.sizes[tensor] for tensor in new)

    def undo(self) -> None:
        """Takes back the last addition."""
        new, self.level = self._log.pop()
        self._held.difference_update(new)

    def level_with(self, tensors: Iterable[_Tensor]) -> float:
        """The level while these are alive too."""
        return self.level + sum(self.sizes[tensor] for tensor in tensors if tensor not in self._held)


def activation_timeline(
    model: Model, start: int, stop: int, shape: Shape, tp: int = 1, algos: Sequence[int] | None = None,
    recompute: Collection[int] = frozenset(), bytes_of: OpBytesSource = formula_bytes,
) -> Timeline:  # fmt: skip
    """Replays one micro-batch through ops `start` to `stop`.

    As in `models.kept`, `algos` has one entry for each op of the slice and `recompute` holds positions within the slice,
    which `models.segments` groups.
    """
    steps, sizes = _steps(model, start, stop, shape, tp, algos, bytes_of)
    inputs = steps[0].enters if steps else ()
    ledger = _Ledger(sizes)
    ledger.add(inputs)
    parts = [(steps[part.start : part.stop], part.recomputed) for part in segments(model.ops[start:stop], recompute)]
    forward_peak = ledger.level
    for part, again in parts:
        if again:
            ledger.add(part[0].enters)
        forward_peak = max(forward_peak, _forward(part, ledger, keeps=not again))
    held = ledger.level
    saved = {tensor for part, again in parts for held_by in ([part[0].enters] if again else [s.saves for s in part]) for tensor in held_by}
    unsaved = sum(sizes[tensor] for tensor in inputs if tensor not in saved)
    return Timeline(held - unsaved, held, forward_peak, max(held, _backward(parts, ledger)))


def _forward(steps: Sequence[_Step], ledger: _Ledger, keeps: bool = True) -> float:
    """Runs ops forward and returns the highest level; the ledger then holds what they keep, if they do."""
    peak = ledger.level
    for step in steps:
        peak = max(peak, ledger.level_with(step.touched) + step.own.kept + step.own.workspace)
        if keeps:
            ledger.add(step.saves, step.own.kept)
    return peak


def _backward(parts: Sequence[tuple[list[_Step], bool]], ledger: _Ledger) -> float:
    """Runs all segments backward, filling in again what was not kept, and returns the highest level."""
    peak = ledger.level
    for part, again in reversed(parts):
        if again:
            peak = max(peak, _forward(part, ledger) + part[-1].output_gradients)
        for step in reversed(part):
            peak = max(peak, ledger.level + step.gradients + step.own.backward_workspace)
            ledger.undo()
        if again:
            ledger.undo()
    return peak


def _steps(
    model: Model, start: int, stop: int, shape: Shape, tp: int, algos: Sequence[int] | None, bytes_of: OpBytesSource
) -> tuple[list[_Step], dict[_Tensor, float]]:
    """The ops of the slice as the replay needs them, and the sizes of all carry tensors."""
    kinds = algos or [0] * (stop - start)
    sizes: dict[_Tensor, float] = {}
    known: dict[tuple[str, int], OpBytes | OpPeaks] = {}
    spec_bytes: dict[TensorSpec, float] = {}
    leaving_bytes: dict[str, float] = {}
    steps: list[_Step] = []
    specs = model.carry_before(start)
    for (op, split, before, after), algo in zip(walk(model, start, stop, algos), kinds, strict=True):
        if (op.signature, algo) not in known:
            known[op.signature, algo] = bytes_of(op, shape, tp, algo)
        for spec, names in (*((s, before) for s in specs), *((s, after) for s in op.carry)):
            if spec not in spec_bytes:
                spec_bytes[spec] = spec.size_bytes(model.dtype).at(shape, tp)
            sizes[names[spec.name]] = spec_bytes[spec]
        if op.signature not in leaving_bytes:
            leaving_bytes[op.signature] = sum(spec_bytes[spec] for spec in op.carry if spec.differentiable)
        leaving = leaving_bytes[op.signature]
        entering = sum(spec_bytes[spec] for spec in specs if spec.differentiable and after.get(spec.name) != before[spec.name])
        saves = (*(before[name] for name in split.saves_in), *(after[name] for name in split.saves_out))
        touched = frozenset((*before.values(), *after.values(), *saves))
        own = known[op.signature, algo]
        if isinstance(own, OpPeaks):
            own = own.bytes_of(sum(sizes[tensor] for tensor in touched - set(before.values())), entering)
        steps.append(_Step(own, tuple(before.values()), touched, saves, leaving + entering, leaving))
        specs = op.carry
    return steps, sizes


def rank_parameters(placed: Sequence[PlacedOp], tp: int = 1) -> list[tuple[Op, float]]:
    """Weights of each op on one of `tp` ranks; a weight shared with an op of the same slice is counted at its owner."""
    names = {place.name for place in placed}
    known: dict[str, float] = {}
    counts = []
    for place in placed:
        if place.op.signature not in known:
            known[place.op.signature] = place.op.parameters.at(_UNIT, tp)
        count = known[place.op.signature]
        if place.op.tied_to in names:
            count -= (place.op.parameters.at(_UNIT) - float(place.op.config.get("untied_parameters", 0))) / tp
        counts.append((place.op, count))
    return counts


def stage_memory(
    model: Model, start: int, stop: int, shape: Shape, *, in_flight: int = 1, tp: int = 1, dp: int = 1, zero: int = 0,
    algos: Sequence[int] | None = None, recompute: Collection[int] = frozenset(), precision: str = "", optimizer: str = "adamw",
    device: str = "cuda", slack: float = SLACK, context_bytes: float | None = None, bucket_bytes: float = BUCKET_BYTES,
    bytes_of: OpBytesSource = formula_bytes, base_bytes: float = 0.0,
) -> MemoryBreakdown:  # fmt: skip
    """Memory of one device that runs ops `start` to `stop` on micro-batches of `shape` (its own share where dp divides them).

    `dp` counts the ranks that hold the same weights. `device` is a catalogue name; only `cpu` matters, it has no CUDA context.
    Of `in_flight` micro-batches one is at its fullest moment, the others hold what they keep. `base_bytes` is what libraries hold.
    """
    if in_flight < 1:
        raise InputError(f"in_flight={in_flight}: at least one micro-batch is in flight.")
    precision = precision or model.dtype
    counts = rank_parameters(model.ops[start:stop], tp)
    trained, frozen = (sum(count for op, count in counts if op.trainable == wanted) for wanted in (True, False))
    states = state_bytes(trained, precision, optimizer, zero, dp) + state_bytes(frozen, precision, optimizer, zero, dp, False)
    timeline = activation_timeline(model, start, stop, shape, tp, algos, recompute, bytes_of)
    activations = timeline.held_bytes * in_flight
    step_bytes = 4 * min(OPTIMIZER_CHUNK, trained / (dp if zero else 1)) if states.master_weights_bytes else 0.0
    workspace = base_bytes + max(timeline.peak_bytes - timeline.held_bytes, step_bytes - activations)
    buffers = _message_bytes(model, start, stop, shape, tp) + _sync_bytes(counts, precision, optimizer, zero, dp, bucket_bytes)
    used = states.state_bytes + activations + workspace + buffers
    if context_bytes is None:
        context_bytes = 0.0 if device.startswith("cpu") else CUDA_CONTEXT_BYTES
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


def _sync_bytes(counts: Sequence[tuple[Op, float]], precision: str, optimizer: str, zero: int, dp: int, bucket_bytes: float) -> float:
    """One gradient bucket among several ranks, and under ZeRO 3 the gathered weights of two ops: one in use, one on its way."""
    if dp == 1:
        return 0.0
    weight, gradient, _, _ = bytes_per_parameter(precision, optimizer)
    bucket = min(bucket_bytes, gradient * sum(count for op, count in counts if op.trainable))
    gathered = 2 * weight * max((count for _, count in counts), default=0.0) if zero == 3 else 0.0
    return bucket + gathered
