"""The description of somebody's module for planning: traced up to its loss, with where it comes from, so that its plans can be trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.models.modules.cutting.dividing import styles_of, tp_plan_of, whole_degrees
from penstock.models.modules.cutting.origins import Made, make_origin, origin_file
from penstock.models.modules.cutting.own_recomputation import left_out
from penstock.models.modules.cutting.packing import attention_dropout, packs
from penstock.models.modules.cutting.seen import SeenMicroBatch, logits_loss
from penstock.models.modules.cutting.shaken import shaken
from penstock.models.modules.cutting.trying_tp import trains_alike
from penstock.models.modules.trace import Divided, trace_module
from penstock.models.ops import Model

__all__ = ["describe", "describe_origin", "quiet_fakes", "with_origin"]

_LENGTH = 128
"""The longest samples that are traced; longer ones follow from linear forms."""
_TRIED = 2**25
"""Of modules with at most so many weights all divisions are tried."""


def describe_origin(origin: str, dtype: str = "fp32") -> Model:
    """The model of `module:FILE.py:FUNCTION`, or of `hf:FOLDER` as transformers has it; plans may choose another precision.

    What a process has described once is not traced again as long as its file stays as it is.
    """
    file = origin_file(origin)
    return _described_once(origin, dtype, str(file.absolute()), file.read_bytes() if file.is_file() else b"")


@lru_cache(maxsize=16)
def _described_once(origin: str, dtype: str, path: str, content: bytes) -> Model:
    return replace(describe(make_origin(origin), dtype, origin), open_dtype=True)


def describe(made: Made, dtype: str = "fp32", origin: str = "") -> Model:
    """The description of a module, trained in `dtype`. Without an `origin` only who has the module can train a plan of it."""
    classes = [0]

    def loss(module: nn.Module, micro_batch: SeenMicroBatch) -> torch.Tensor:
        found = made.loss(module, micro_batch)
        classes[0] = micro_batch.num_classes
        return found

    with quiet_fakes(), left_out() as recomputed:
        divided, notes = _divided(made)
        model = trace_module(
            made.module, made.example, made.name, dtype, length=min(made.positions or _LENGTH, _LENGTH), call=loss, divided=divided,
            two_sided=made.form == "encoder-decoder",
        )  # fmt: skip
        model = _laid_out(with_origin(replace(model, notes=notes), made, origin, classes[0]), made)
    if not recomputed:
        return model
    note = "what the module recomputes itself (torch.utils.checkpoint) is left out: the plan decides what runs again."
    return replace(model, notes=(*model.notes, note))


def _divided(made: Made) -> tuple[Divided | None, tuple[str, ...]]:
    """What tensor parallelism may divide, by the module's plan and as far as it trains alike; what a user should know of it."""
    plan, strict = (made.tp_plan, True) if made.tp_plan is not None else tp_plan_of(made.module)
    styles, whole = styles_of(made.module, plan, strict=strict)
    if not styles or made.vocab < 2:
        return None, ("tensor parallelism is 1: the module has no tp_plan.",) if not plan else ()
    limit, wrong = whole_degrees(made.module, styles), ""
    size = sum(p.numel() for p in made.module.parameters())
    if size <= _TRIED and not any(p.is_meta for p in made.module.parameters()):
        good = 1
        with shaken(made.module):
            while good < 8 and limit % (2 * good) == 0 and not wrong:
                wrong = trains_alike(made.module, made.loss, styles, 2 * good, made.vocab)
                good *= 1 if wrong else 2
        limit = good if wrong else limit
    if wrong and strict and limit == 1:
        raise InputError(f"tp_plan of {made.name} divides it into something else: {wrong}. Correct it, or leave it out.")
    notes = [f"tensor parallelism leaves '{', '.join(whole)}' whole on every rank."] if whole else []
    notes += [f"tensor parallelism: at most {limit}, since {wrong}."] if wrong else []
    return Divided({made.module.get_submodule(path): style for path, style in styles.items()}, limit) if limit > 1 else None, tuple(notes)


def _laid_out(model: Model, made: Made) -> Model:
    """With the layouts in which two samples together train like each alone, as far as that can be tried: with weights, on token ids."""
    if dropout := attention_dropout(made.module):
        note = f"attention dropout of {dropout:g} is left out: attention that stays inside samples has none."
        model = replace(model, notes=(*model.notes, note))
    if made.form in ("images", "encoder-decoder") or made.vocab < 2:
        return model
    if any(p.is_meta for p in made.module.parameters()):
        return replace(model, notes=(*model.notes, "samples are padded: a model so large is not made just to try them end to end."))
    padded, packed = packs(made.module, made.loss, made.vocab, made.stays_inside)
    if not padded and made.loss is not logits_loss:
        raise InputError("the loss of two samples together is not the sum of each alone: weigh by micro_batch.weights.")
    notes = () if packed else ("samples are padded: laid end to end, those of this module would see each other.",)
    if not padded:
        notes = (*notes, "padding behind a sample changes what this module makes of it: it takes no attention_mask.")
    return replace(model, layouts=("padded", "packed") if packed else ("padded",), notes=(*model.notes, *notes))


def with_origin(model: Model, made: Made, origin: str, num_classes: int = 0) -> Model:
    """A traced model that knows where its module comes from, and in which form it takes samples."""
    config: dict[str, Any] = {**model.config, "form": made.form, "origin": origin}
    model = replace(model, notes=(*made.notes, *model.notes))
    if made.form == "images":
        config |= {"image_size": made.tiny().ids.shape[-1], "num_classes": num_classes}
        return replace(model, config=config, seq_length=0)
    length = made.positions or model.seq_length
    dec_length = length if made.form == "encoder-decoder" else 0
    return replace(model, config={**config, "vocab": made.vocab, "positions": made.positions}, seq_length=length, dec_length=dec_length)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Torch prints a traceback of what is told in one line."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before
