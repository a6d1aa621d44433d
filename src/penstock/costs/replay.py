"""A micro-batch's life on one device, replayed op by op.

Forward, the level rises by what each op keeps; backward, it falls again while gradients come and go; a recomputed segment keeps only
the carry that enters it and is filled in again as a whole:

    level │          ┌──┐ workspace                 ┌─┐ gradients, workspace of the backward pass
          │      ┌───┘  └────────── kept ───────────┘ └──┐
          │  ┌───┘                                       └───┐  ┌┐ recomputed segment
          │──┘ inputs                                        └──┘└──
            op 0    op 1    op 2   …   other micro-batches   op 2  op 1  op 0

What a block adds depends on nothing but its ops and on which of the tensors that enter it are one, and are held already. A chain
repeats few such cases, so that each is replayed once; the levels inside a block are above the level at its entry in both passes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.models.kept import Held, Tensor, walk
from penstock.models.ops import Model, Op, TensorSpec
from penstock.models.segments import Piece, pieces, segments
from penstock.models.shapes import Shape

__all__ = ["MemoryTimeline", "OpBytes", "OpBytesSource", "OpPeaks", "Replay", "activation_timeline", "formula_bytes"]


_MASK_MADE_BYTES = 11
"""Of each pair of positions while a mask is made: their distance in int64, and three comparisons."""


class OpBytes(NamedTuple):
    """What one op takes for one micro-batch on one rank."""

    kept: float
    """Bytes that only this op saves for its backward pass: carry tensors it saves are not in it, they are shared."""
    workspace: float
    backward_workspace: float


class OpPeaks(NamedTuple):
    """What an op was measured to keep, and the fullest moments of its passes above the level when each began."""

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
    pairs = op.mask_pairs(shape)
    kept, workspace = op.splits[algo].kept.at(shape, tp) + op.mask_item_bytes * pairs, op.workspace.at(shape, tp)
    return OpBytes(kept, workspace + (_MASK_MADE_BYTES - op.mask_item_bytes) * pairs, op.backward_workspace.at(shape, tp))


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
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


class _Step(NamedTuple):
    """One op of the replay."""

    own: OpBytes
    enters: tuple[Tensor, ...]
    touched: frozenset[Tensor]
    """All it reads, returns and saves."""
    saves: tuple[Tensor, ...]
    gradients: float
    """Bytes of the gradients of its output and of its input; one that is only handed on is the same tensor."""
    output_gradients: float


class _Ledger:
    """Tensors held at a moment, each counted once, and a log by which additions are taken back in reverse order."""

    def __init__(self, sizes: dict[Tensor, float], held: Iterable[Tensor]) -> None:
        self.sizes, self.level = sizes, 0.0
        self.held = set(held)
        self._log: list[tuple[list[Tensor], float]] = []

    def add(self, tensors: Iterable[Tensor], own: float = 0.0) -> None:
        """Holds what is not held yet, and `own` bytes beside."""
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in self.held]
        self.held.update(new)
        self._log.append((new, self.level))
        self.level += own + sum(self.sizes[tensor] for tensor in new)

    def undo(self) -> None:
        """Takes back the last addition."""
        new, self.level = self._log.pop()
        self.held.difference_update(new)

    def level_with(self, tensors: Iterable[Tensor]) -> float:
        """The level while these are alive too."""
        return self.level + sum(self.sizes[tensor] for tensor in tensors if tensor not in self.held)


_Entry = tuple[tuple[int, bool], ...]
"""For each tensor of a carry, a number that is equal for two names of one tensor, and whether it is held."""


@dataclass(frozen=True, slots=True)
class _Played:
    """What a piece of a block does, in bytes above the level at its entry."""

    added: float
    forward_peak: float
    backward_peak: float
    saved: tuple[int, ...]
    """Numbers of entering tensors that it saves."""
    leaving: _Entry
    origins: tuple[int, ...]
    """For each number in `leaving`, the number it had on entry; -1 where the piece made the tensor."""


class Replay:
    """Replays slices of a model at one shape and degree; pieces that are alike are worked out once."""

    def __init__(self, model: Model, shape: Shape, tp: int, bytes_of: OpBytesSource = formula_bytes) -> None:
        self._model, self._shape, self._tp, self._bytes_of = model, shape, tp, bytes_of
        self._played: dict[tuple[object, ...], _Played] = {}
        self._op_bytes: dict[tuple[str, int], OpBytes | OpPeaks] = {}
        self._spec_bytes: dict[TensorSpec, float] = {}

    def timeline(
        self, start: int, stop: int, algos: Sequence[int] | None = None, recompute: Collection[int] = frozenset()
    ) -> MemoryTimeline:
        """One micro-batch through ops `start` to `stop`.

        As in `models.kept`, `algos` has one entry for each op of the slice and `recompute` holds positions within the slice,
        which `models.segments` groups.
        """
        flags = bytearray(stop - start)
        for position in recompute:
            flags[position] = 1
        inputs = [self._size(spec) for spec in self._model.carry_before(start)]
        kinds, marks, state = tuple(algos or ()), bytes(flags), tuple((number, True) for number in range(len(inputs)))
        place, unsaved = list(range(len(inputs))), set(range(len(inputs)))
        level = forward_peak = backward_peak = sum(inputs)
        for piece in pieces(self._model, start, stop):
            a, b = piece.start - start, piece.stop - start
            played = self._play(piece, state, kinds[a:b], marks[a:b])
            forward_peak, backward_peak = max(forward_peak, level + played.forward_peak), max(backward_peak, level + played.backward_peak)
            level, state = level + played.added, played.leaving
            if unsaved:
                unsaved.difference_update(place[number] for number in played.saved)
                place = [place[number] if number >= 0 else -1 for number in played.origins]
        return MemoryTimeline(level - sum(inputs[number] for number in unsaved), level, forward_peak, max(level, backward_peak))

    def _play(self, piece: Piece, state: _Entry, algos: tuple[int, ...], marks: bytes) -> _Played:
        key = (piece.likeness, state, algos, marks)
        if key not in self._played:
            self._played[key] = self._replayed(piece, state, algos, marks)
        return self._played[key]

    def _replayed(self, piece: Piece, state: _Entry, algos: tuple[int, ...], marks: bytes) -> _Played:
        """Runs the piece forward and at once backward: what is held before it is the same both times."""
        names = [spec.name for spec in self._model.carry_before(piece.start)]
        entering: Held = {name: (-1, str(number)) for name, (number, _) in zip(names, state, strict=True)}
        steps, sizes, leaving = self._steps(piece, algos, entering)
        ledger = _Ledger(sizes, {(-1, str(number)) for number, held in state if held})
        found = segments(self._model.ops[piece.start : piece.stop], {position for position, mark in enumerate(marks) if mark})
        parts = [(steps[part.start : part.stop], part.recomputed) for part in found]
        peak = 0.0
        for part, again in parts:
            if again:
                ledger.add(part[0].enters)
            peak = max(peak, _forward(part, ledger, keeps=not again))
        saved = {tensor for part, again in parts for by in ([part[0].enters] if again else [step.saves for step in part]) for tensor in by}
        tensors = list(dict.fromkeys(leaving))
        numbers = {tensor: number for number, tensor in enumerate(tensors)}
        added, exit_state = ledger.level, tuple((numbers[tensor], tensor in ledger.held) for tensor in leaving)
        return _Played(
            added, peak, _backward(parts, ledger), tuple(int(name) for index, name in saved if index < 0), exit_state,
            tuple(int(name) if index < 0 else -1 for index, name in tensors),
        )  # fmt: skip

    def _steps(self, piece: Piece, algos: tuple[int, ...], entering: Held) -> tuple[list[_Step], dict[Tensor, float], list[Tensor]]:
        """The ops as the replay needs them, the sizes of all carry tensors, and the tensors that leave."""
        kinds = algos or (0,) * (piece.stop - piece.start)
        sizes: dict[Tensor, float] = {}
        steps: list[_Step] = []
        specs, held = self._model.carry_before(piece.start), entering
        for (op, split, before, after), algo in zip(walk(self._model, piece.start, piece.stop, kinds, entering), kinds, strict=True):
            if (op.signature, algo) not in self._op_bytes:
                self._op_bytes[op.signature, algo] = self._bytes_of(op, self._shape, self._tp, algo)
            for spec, names in (*((s, before) for s in specs), *((s, after) for s in op.carry)):
                sizes[names[spec.name]] = self._size(spec)
            leaving = sum(self._size(spec) for spec in op.carry if spec.differentiable)
            changed = [spec for spec in specs if spec.differentiable and after.get(spec.name) != before[spec.name]]
            gradients = sum(map(self._size, changed))
            saves = (*(before[name] for name in split.saves_in), *(after[name] for name in split.saves_out))
            touched = frozenset((*before.values(), *after.values(), *saves))
            own = self._op_bytes[op.signature, algo]
            if isinstance(own, OpPeaks):
                own = own.bytes_of(sum(sizes[tensor] for tensor in touched - set(before.values())), gradients)
            steps.append(_Step(own, tuple(before.values()), touched, saves, leaving + gradients, leaving))
            specs, held = op.carry, after
        return steps, sizes, [held[spec.name] for spec in specs]

    def _size(self, spec: TensorSpec) -> float:
        if spec not in self._spec_bytes:
            self._spec_bytes[spec] = spec.size_bytes(self._model.dtype).at(self._shape, self._tp)
        return self._spec_bytes[spec]


def activation_timeline(
    model: Model, start: int, stop: int, shape: Shape, tp: int = 1, algos: Sequence[int] | None = None,
    recompute: Collection[int] = frozenset(), bytes_of: OpBytesSource = formula_bytes,
) -> MemoryTimeline:  # fmt: skip
    """Replays one micro-batch through ops `start` to `stop`, see `Replay.timeline`."""
    return Replay(model, shape, tp, bytes_of).timeline(start, stop, algos, recompute)


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
