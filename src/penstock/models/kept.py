"""Bytes that a slice of the chain keeps from its forward to its backward pass.

Ops save three things: bytes of their own (`Split.kept`) and tensors of their input and output carry. A carry tensor that several ops
save is held once; a tensor that an op only hands on, or puts aside as `residual`, stays the same tensor:

    op      carry after it               saves                kept so far
    norm1   hidden B, residual A         A (its input)        A + statistics
    qkv     qkv C, residual A            B                    A + B + …
    …       residual A                                        A is not counted again
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.models.ops import Model, Op, Split, TensorSpec
from penstock.models.shapes import NOTHING, Quantity

__all__ = ["Held", "KeptPart", "Tensor", "kept_parts", "kept_per_op", "shortened", "walk"]

Tensor = tuple[int, str]
"""A tensor of the carry: the position of the op that made it, and the name it got there."""
Held = dict[str, Tensor]
"""The tensor behind each name of a carry."""


@dataclass(frozen=True, slots=True)
class KeptPart:
    """A part of what an op keeps, and the op that made it."""

    size_bytes: Quantity
    maker: int
    """Its position; -1 for what enters the chain."""
    inside: bool
    """Whether that lies in the same block, so that recomputation can bring the part back by running it again."""


def kept_parts(model: Model, algos: Sequence[int] | None = None) -> tuple[tuple[KeptPart, ...], ...]:
    """What each op of the chain keeps: bytes of its own, and the tensors of the carry that no op before it saved."""
    counted: set[Tensor] = set()
    found = []
    for index, (op, split, before, after) in enumerate(walk(model, 0, model.num_ops, algos)):
        sizes = {**_sizes(model, before, model.carry_before(index)), **_sizes(model, after, op.carry)}
        saved = {*(before[name] for name in split.saves_in), *(after[name] for name in split.saves_out)} - counted
        counted |= saved
        parts = [KeptPart(split.kept, index, True)] if split.kept != NOTHING else []
        parts += [KeptPart(sizes[tensor], tensor[0], _same_block(model, tensor[0], index)) for tensor in sorted(saved)]
        found.append(tuple(parts))
    return tuple(found)


def _same_block(model: Model, a: int, b: int) -> bool:
    return a >= 0 and (model.ops[a].block, model.ops[a].copy) == (model.ops[b].block, model.ops[b].copy)


def kept_per_op(model: Model, algos: Sequence[int] | None = None) -> tuple[Quantity, ...]:
    """The same bytes spread over the chain so that they add up: a shared tensor counts at the first op that saves it.

    The sum over a slice is what the slice keeps, less the tensors that enter it, are saved in it, and were already counted by an op
    before it.
    """
    return tuple(sum((part.size_bytes for part in parts), Quantity()) for parts in kept_parts(model, algos))


def shortened(model: Model) -> tuple[Model, list[float]]:
    """The model with at most four copies of a block, and for how many each op stands: all copies but the outer ones are alike."""
    weights: list[float] = []
    for block, copies in model.runs:
        for copy in range(min(copies, 4)):
            weights += [copies - 3.0 if copies > 4 and copy == 2 else 1.0] * len(block.ops)
    return model.shortened(4), weights


def walk(
    model: Model, start: int, stop: int, algos: Sequence[int] | None, entering: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[Op, Split, Held, Held]]:
    """Each op of the slice with its split and the tensors of its carry before and after; `entering` are those before the first."""
    kinds = algos or [0] * (stop - start)
    held: Held = dict(entering) if entering is not None else {spec.name: (start - 1, spec.name) for spec in model.carry_before(start)}
    for placed, algo in zip(model.ops[start:stop], kinds, strict=True):
        after = _after(placed.op, placed.index, held)
        yield placed.op, placed.op.splits[algo], held, after
        held = after


def _after(op: Op, index: int, before: Held) -> Held:
    """The tensors of the carry that `op` returns: made by it, put aside from its input, or handed on."""
    config = op.config
    made = {config.get("output"), config.get("bias_output"), *config.get("made", ())}
    after: Held = {}
    for spec in op.carry:
        name = spec.name
        if name == "residual" and config.get("residual") in (True, "take"):
            after[name] = before[config["source"]]
        elif name in before and name not in made:
            after[name] = before[name]
        else:
            after[name] = (index, name)
    return after


def _sizes(model: Model, held: Held, specs: Sequence[TensorSpec]) -> dict[Tensor, Quantity]:
    return {held[spec.name]: spec.size_bytes(model.dtype) for spec in specs}
