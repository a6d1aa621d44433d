"""A weight as one rank holds it, whole or in part: what gradients, updates and checkpoints are made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from penstock.models.modules.base import OpModule
from penstock.models.ops import PlacedOp
from penstock.models.stored import stored_name

__all__ = ["Held"]


@dataclass(frozen=True, slots=True)
class Held:
    """A weight on this rank. A weight that several ops of the stage share is held once, by the first of them."""

    place: PlacedOp
    name: str
    parameter: nn.Parameter
    module: OpModule
    piece: int
    start: int | None = None
    """Where the part that `parameter` is begins in the weight laid flat; None: it is the whole."""

    @property
    def stored_name(self) -> str:
        """The weight's name in checkpoints, one for all ops that share it."""
        return stored_name(self.place, self.name)

    @property
    def divided(self) -> bool:
        """Whether tensor-parallel ranks hold different parts of it."""
        return self.module.shards[self.name] is not None
