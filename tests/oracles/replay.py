"""The replay of one micro-batch op by op, with a set of the tensors held: what the replay block by block must equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from penstock.costs.replay import MemoryTimeline, OpBytes, OpBytesSource, OpPeaks, formula_bytes
from penstock.models.kept import walk
from penstock.models.ops import Model
from penstock.models.segments import segments
from penstock.models.shapes import Shape

Tensor = tuple[int, str]


class Step(NamedTuple):
    """One op: what it takes, and the tensors around it."""

    own: OpBytes
    enters: tuple[Tensor, ...]
    touched: frozenset[Tensor]
    saves: tuple[Tensor, ...]
    gradients: float
    output_gradients: float


class Ledger:
    """Tensors held, each counted once; additions are taken back in reverse order."""

    def __init__(self, sizes: dict[Tensor, float]) -> None:
        self.sizes, self.level = sizes, 0.0
        self.held: set[Tensor] = set()
        self.log: list[tuple[list[Tensor], float]] = []

    def add(self, tensors: Iterable[Tensor], own: float = 0.0) -> None:
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in self.held]
        self.held.update(new)
        self.log.append((new, self.level))
        self.level += own + sum(self.sizes[tensor] for tensor in new)

    def undo(self) -> None:
        new, self.level = self.log.pop()
        self.held.difference_update(new)

    def level_with(self, tensors: Iterable[Tensor]) -> float:
        return self.level + sum(self.sizes[tensor] for tensor in tensors if tensor not in self.held)


def timeline_by_op(
    model: Model, start: int, stop: int, shape: Shape, tp: int = 1, algos: Sequence[int] | None = None,
    recompute: Collection[int] = frozenset(), bytes_of: OpBytesSource = formula_bytes,
) -> MemoryTimeline:  # fmt: skip
    """The same answer as `costs.replay.activation_timeline`."""
    steps, sizes = steps_of(model, start, stop, shape, tp, algos, bytes_of)
    inputs = steps[0].enters if steps else ()
    ledger = Ledger(sizes)
    ledger.add(inputs)
    parts = [(steps[part.start : part.stop], part.recomputed) for part in segments(model.ops[start:stop], recompute)]
    forward_peak = ledger.level
    for part, again in parts:
        if again:
            ledger.add(part[0].enters)
        forward_peak = max(forward_peak, forward(part, ledger, keeps=not again))
    held = ledger.level
    saved = {tensor for part, again in parts for held_by in ([part[0].enters] if again else [s.saves for s in part]) for tensor in held_by}
    unsaved = sum(sizes[tensor] for tensor in inputs if tensor not in saved)
    return MemoryTimeline(held - unsaved, held, forward_peak, max(held, backward(parts, ledger)))


def forward(steps: Sequence[Step], ledger: Ledger, keeps: bool = True) -> float:
    """Runs ops forward and returns the highest level."""
    peak = ledger.level
    for step in steps:
        peak = max(peak, ledger.level_with(step.touched) + step.own.kept + step.own.workspace)
        if keeps:
            ledger.add(step.saves, step.own.kept)
    return peak


def backward(parts: Sequence[tuple[list[Step], bool]], ledger: Ledger) -> float:
    """Runs all segments backward, filling in again what was not kept, and returns the highest level."""
    peak = ledger.level
    for part, again in reversed(parts):
        if again:
            peak = max(peak, forward(part, ledger) + part[-1].output_gradients)
        for step in reversed(part):
            peak = max(peak, ledger.level + step.gradients + step.own.backward_workspace)
            ledger.undo()
        if again:
            ledger.undo()
    return peak


def steps_of(
    model: Model, start: int, stop: int, shape: Shape, tp: int, algos: Sequence[int] | None, bytes_of: OpBytesSource
) -> tuple[list[Step], dict[Tensor, float]]:
    """The ops of the slice, and the sizes of all carry tensors."""
    kinds = algos or [0] * (stop - start)
    sizes: dict[Tensor, float] = {}
    steps: list[Step] = []
    specs = model.carry_before(start)
    for (op, split, before, after), algo in zip(walk(model, start, stop, algos), kinds, strict=True):
        for spec, names in (*((s, before) for s in specs), *((s, after) for s in op.carry)):
            sizes[names[spec.name]] = spec.size_bytes(model.dtype).at(shape, tp)
        leaving = sum(spec.size_bytes(model.dtype).at(shape, tp) for spec in op.carry if spec.differentiable)
        new = [spec for spec in specs if spec.differentiable and after.get(spec.name) != before[spec.name]]
        entering = sum(spec.size_bytes(model.dtype).at(shape, tp) for spec in new)
        saves = (*(before[name] for name in split.saves_in), *(after[name] for name in split.saves_out))
        touched = frozenset((*before.values(), *after.values(), *saves))
        own = bytes_of(op, shape, tp, algo)
        if isinstance(own, OpPeaks):
            own = own.bytes_of(sum(sizes[tensor] for tensor in touched - set(before.values())), entering)
        steps.append(Step(own, tuple(before.values()), touched, saves, leaving + entering, leaving))
        specs = op.carry
    return steps, sizes
