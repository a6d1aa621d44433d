"""The description of somebody's module for planning: traced up to its loss, with where it comes from, so that its plans can be trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.models.modules.cutting.origins import Made, make_origin
from penstock.models.modules.cutting.packing import packs
from penstock.models.modules.cutting.seen import SeenMicroBatch, logits_loss
from penstock.models.modules.trace import trace_module
from penstock.models.ops import Model

__all__ = ["describe", "describe_origin", "quiet_fakes", "with_origin"]

_LENGTH = 128
"""The longest samples that are traced; longer ones follow from linear forms."""


def describe_origin(origin: str, dtype: str = "fp32") -> Model:
    """The model of `module:FILE.py:FUNCTION`, or of `hf:FOLDER` as transformers has it; plans may choose another precision."""
    return replace(describe(make_origin(origin), dtype, origin), open_dtype=True)


def describe(made: Made, dtype: str = "fp32", origin: str = "") -> Model:
    """The description of a module, trained in `dtype`. Without an `origin` only who has the module can train a plan of it."""
    if made.form == "encoder-decoder":
        raise InputError(f"{made.name} has an encoder and a decoder; such models are trained as one of Penstock's own families (T5) only.")
    classes = [0]

    def loss(module: nn.Module, micro_batch: SeenMicroBatch) -> torch.Tensor:
        found = made.loss(module, micro_batch)
        classes[0] = micro_batch.num_classes
        return found

    with quiet_fakes():
        model = trace_module(made.module, made.example, made.name, dtype, length=min(made.positions or _LENGTH, _LENGTH), call=loss)
    return _laid_out(with_origin(model, made, origin, classes[0]), made)


def _laid_out(model: Model, made: Made) -> Model:
    """With the layouts in which two samples together train like each alone, as far as that can be tried: with weights, on token ids."""
    model = replace(model, notes=(*model.notes, *made.notes))
    if made.form == "images" or made.vocab < 2:
        return model
    if any(p.is_meta for p in made.module.parameters()):
        return replace(model, notes=(*model.notes, "samples are padded: a model so large is not made just to try them end to end."))
    padded, packed = packs(made.module, made.loss, made.vocab)
    if not padded and made.loss is not logits_loss:
        raise InputError("the loss of two samples together is not the sum of each alone: weigh by micro_batch.weights.")
    notes = () if packed else ("samples are padded: laid end to end, those of this module would see each other.",)
    if not padded:
        notes = (*notes, "padding behind a sample changes what this module makes of it: it takes no attention_mask.")
    return replace(model, layouts=("padded", "packed") if packed else ("padded",), notes=(*model.notes, *notes))


def with_origin(model: Model, made: Made, origin: str, num_classes: int = 0) -> Model:
    """A traced model that knows where its module comes from, and in which form it takes samples."""
    config: dict[str, Any] = {**model.config, "form": made.form, "origin": origin}
    if made.form == "images":
        config |= {"image_size": made.tiny().ids.shape[-1], "num_classes": num_classes}
        return replace(model, config=config, seq_length=0)
    return replace(model, config={**config, "vocab": made.vocab}, seq_length=made.positions or model.seq_length)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Torch prints a traceback of what is told in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
