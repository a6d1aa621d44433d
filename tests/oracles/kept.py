"""Bytes that ops keep from forward to backward passes, tensor by tensor: what replays, and the spread over a chain, must add up to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.models.kept import Held, Tensor, walk
from penstock.models.ops import Model, TensorSpec
from penstock.models.segments import segments
from penstock.models.shapes import Quantity, Shape


def kept_bytes(
    model: Model, start: int, stop: int, shape: Shape, tp: int = 1, algos: Sequence[int] | None = None, recompute: Collection[int] = ()
) -> float:
    """Bytes that ops `start` to `stop` keep for one micro-batch on one of `tp` ranks.

    As in `models.modules`, `algos` has one entry for each op of the slice and `recompute` holds positions within the slice:
    a segment of them keeps only the carry that enters it.
    """
    again = set(recompute)
    starts = {part.start for part in segments(model.ops[start:stop], recompute) if part.recomputed}
    sizes: dict[Tensor, Quantity] = {}
    own, masks = Quantity(), 0.0
    for position, (op, split, before, after) in enumerate(walk(model, start, stop, algos)):
        entering = _sizes(model, before, model.carry_before(start + position))
        if position in again:
            if position in starts:
                sizes.update(entering)
            continue
        own, masks = own + split.kept, masks + op.mask_item_bytes * op.mask_pairs(shape)
        leaving = _sizes(model, after, op.carry)
        sizes.update({before[name]: entering[before[name]] for name in split.saves_in})
        sizes.update({after[name]: leaving[after[name]] for name in split.saves_out})
    return sum((size.at(shape, tp) for size in sizes.values()), own.at(shape, tp) + masks)


def _sizes(model: Model, held: Held, specs: Sequence[TensorSpec]) -> dict[Tensor, Quantity]:
    return {held[spec.name]: spec.size_bytes(model.dtype) for spec in specs}
