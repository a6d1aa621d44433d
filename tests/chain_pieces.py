"""The pieces of a whole chain, as a rank that trains it would save and load them: what tests of checkpoints are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from penstock.models.modules import Chain
from penstock.runtime.checkpoints.layout import BUFFERS, CheckpointLayout, TensorPiece, parameter_layout, whole_layout

__all__ = ["chain_layouts", "chain_pieces"]


def chain_layouts(chain: Chain, *, owned: bool = False) -> Iterator[tuple[CheckpointLayout, torch.Tensor]]:
    """Layout and tensor of every parameter and every buffer of the chain; one that two ops share comes once, and with `owned` not at all
    where its owner is an op elsewhere, which saves it."""
    seen: set[int] = set()
    here = {module.name for module in chain.ops}
    known: dict[Any, Any] = {}
    for module in chain.ops:
        for name, parameter in module.named_parameters(recurse=False):
            borrowed = name == "weight" and module.op.tied_to and module.op.tied_to not in here
            if id(parameter) not in seen and not (owned and borrowed):
                yield parameter_layout(module, name, known=known), parameter
            seen.add(id(parameter))
        for name, buffer in module.named_buffers(recurse=False):
            yield whole_layout(f"{module.name}.{name}", buffer.shape, BUFFERS), buffer


def chain_pieces(chain: Chain, *, owned: bool = False) -> Iterator[TensorPiece]:
    """The pieces of all weights and buffers of a chain: with `owned` those it has to save, otherwise all, to be loaded."""
    for layout, tensor in chain_layouts(chain, owned=owned):
        yield from layout.pieces(tensor.detach())
