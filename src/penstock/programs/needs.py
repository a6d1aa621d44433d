"""What a stage reads of a micro-batch besides the carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.programs.instructions import Need

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["needs_of"]


def needs_of(model: Model, first: int, last: int) -> tuple[Need, ...]:
    """For ops [first, last): embeddings read token ids, the first op of the model its inputs, the last one labels."""
    needs: dict[Need, None] = {"inputs": None} if first == 0 else {}
    for place in model.ops[first:last]:
        if place.op.kind == "embedding":
            needs["dec_inputs" if place.op.config.get("side") == "decoder" else "inputs"] = None
    if last == model.num_ops:
        needs["labels"] = None
    return tuple(needs)
