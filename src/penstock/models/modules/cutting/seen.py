"""What somebody's module and its loss see of a micro-batch, and how a module is called that brings no loss of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import InputError
from penstock.models.modules.batch import Batch, Sequences

__all__ = ["Loss", "MicroBatch", "SeenMicroBatch", "first_position", "logits_loss", "seen"]

Loss = Callable[[nn.Module, "SeenMicroBatch"], torch.Tensor]
"""The loss of a module on a micro-batch: its part of the global batch's, a sum weighed by `SeenMicroBatch.weights`."""


@dataclass
class SeenMicroBatch:
    """Rows of samples: one sample in each, padded behind, or all end to end in a single row."""

    ids: torch.Tensor
    """(rows, length) token ids, or (samples, …) images."""
    labels: torch.Tensor
    """(rows, length) what each position should predict, or (samples,) classes."""
    weights: torch.Tensor
    """Of the labels: each one's part in the loss. Over the global batch they sum to one; those of padding are zero."""
    positions: torch.Tensor | None = None
    """(rows, length) positions inside the own sample."""
    mask: torch.Tensor | None = None
    """(rows, length) one where a padded row has a token; None where there is no padding."""
    bounds: tuple[tuple[int, int], ...] = ()
    """[first, last) of the samples that lie end to end; none where each has a row of its own."""
    edges: torch.Tensor | None = None
    """(samples + 1,) int32 the same on the device; None where each has a row of its own."""
    decoder_ids: torch.Tensor | None = None
    """(rows, decoder's length)"""
    decoder_mask: torch.Tensor | None = None
    types: torch.Tensor | None = None
    """(rows, length) token types."""
    keys: torch.Tensor | None = None
    """(rows × length,) a number for each position that only its sample and place in it decide."""
    dec_keys: torch.Tensor | None = None
    """The same of the decoder's side."""
    key: int = 0
    """A number that only the seed and the step decide."""
    hits: torch.Tensor | None = field(default=None, repr=False)
    """After `loss`, where nothing is trained: how many labels the most likely outputs hit, and how many count."""
    num_classes: int = 0
    """After `loss`: among how many its labels choose."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sample of those that lie end to end; every attention asks."""
        return max((last - first for first, last in self.bounds), default=0)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy of `logits` (rows, length, vocabulary) or (samples, classes), weighed."""
        self.num_classes = logits.shape[-1]
        flat, labels, weights = logits.flatten(0, -2), self.labels.flatten(), self.weights.flatten()
        if len(flat) != len(labels):
            raise InputError(
                f"the module returns logits of shape {tuple(logits.shape)} for {len(labels)} labels; (…, classes) with one row for each "
                "was expected. Give a loss of your own, a function of the module and a micro-batch."
            )
        if not torch.is_grad_enabled() and not flat.is_meta and type(flat) is torch.Tensor:
            live = weights > 0
            self.hits = torch.stack([((flat.argmax(-1) == labels) & live).sum(), live.sum()])
        return (F.cross_entropy(flat.float(), labels, reduction="none") * weights).sum()


MicroBatch = SeenMicroBatch
"""As `penstock.MicroBatch`: what a loss of one's own sees."""


def seen(batch: Batch, dtype: torch.dtype = torch.float32) -> SeenMicroBatch:
    """A rank's share of a micro-batch as a module sees it; it trains in `dtype`."""
    assert batch.weights is not None
    if batch.images is not None:
        assert batch.targets is not None
        return SeenMicroBatch(batch.images.to(dtype), batch.targets, batch.weights)
    assert batch.labels is not None
    own, loss_side = batch.side("own"), batch.decoder or batch.side("own")

    def rows(x: torch.Tensor, side: Sequences) -> torch.Tensor:
        return x.view(1 if side.layout == "packed" else side.num_rows, -1)

    found = SeenMicroBatch(
        rows(own.ids, own), rows(batch.labels, loss_side), rows(batch.weights, loss_side), rows(own.positions, own), _mask(own),
        keys=own.row_keys(), key=batch.seed * 1_000_003 + batch.step,
    )  # fmt: skip
    if own.layout == "packed":
        found.bounds, found.edges = tuple(pairwise(accumulate(own.lengths, initial=0))), own.bounds
    if batch.decoder is not None:
        # Always with masks: what a module makes of none may have another shape, and each stage must get that of every micro-batch.
        found.mask, found.decoder_mask = own.key_padding().long(), batch.decoder.key_padding().long()
        found.decoder_ids, found.dec_keys = rows(batch.decoder.ids, batch.decoder), batch.decoder.row_keys()
    if own.types is not None:
        found.types = rows(own.types, own)
    return found


def _mask(side: Sequences) -> torch.Tensor | None:
    return None if side.full or side.layout == "packed" else side.key_padding().long()


_NAMES = {
    "ids": ("input_ids", "ids", "tokens", "pixel_values", "images"),
    "positions": ("position_ids", "positions", "pos"),
    "mask": ("attention_mask",),
    "decoder_ids": ("decoder_input_ids",),
    "decoder_mask": ("decoder_attention_mask",),
    "types": ("token_type_ids",),
}
"""What arguments of a forward pass are commonly called."""


def logits_loss(module: nn.Module, micro_batch: SeenMicroBatch) -> torch.Tensor:
    """The loss of a module that returns logits, or something with a field of that name, as models of transformers do.

    It is called with what it names of ids, positions, masks and token types; ids are the first argument whatever its name.
    """
    out = module(**dict(_arguments(module, micro_batch)))
    logits = out if isinstance(out, torch.Tensor) else out["logits"] if isinstance(out, dict) else getattr(out, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise InputError(
            f"{type(module).__name__} returns {type(out).__name__}; logits, or something with a field 'logits', were expected. Give a loss "
            "of your own, a function of the module and a micro-batch."
        )
    return micro_batch.loss(logits)


def _arguments(module: nn.Module, micro_batch: SeenMicroBatch) -> Iterator[tuple[str, Any]]:
    accepted = list(inspect.signature(module.forward).parameters)
    for field_name, names in _NAMES.items():
        name = next((name for name in names if name in accepted), accepted[0] if field_name == "ids" else None)
        value = getattr(micro_batch, field_name)
        if name is not None and value is not None:
            yield name, value + first_position(module) if field_name == "positions" else value
    if "use_cache" in accepted:
        yield "use_cache", False


def first_position(module: nn.Module) -> int:
    """Where a module's positions begin: those of RoBERTa and its like behind the row of their table that stands for padding."""
    if module not in _FIRST_POSITIONS:
        found = (part for path, part in module.named_modules() if path.endswith("position_embeddings") and isinstance(part, nn.Embedding))
        is_theirs = hasattr(getattr(module, "config", None), "model_type")
        _FIRST_POSITIONS[module] = next((part.padding_idx + 1 for part in found if is_theirs and part.padding_idx is not None), 0)
    return _FIRST_POSITIONS[module]


_FIRST_POSITIONS = WeakKeyDictionary[nn.Module, int]()
"""Every pass of every stage asks."""
