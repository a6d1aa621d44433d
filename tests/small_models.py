"""Models and micro-batches small enough for a test, one of each transformer family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.models.catalog import model_from_mapping
from penstock.models.modules import Batch, Chain, build_chain, random_batch
from penstock.models.ops import Model
from penstock.models.shapes import Layout

torch.set_num_threads(1)  # Tensors this small only wait for a second thread.

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 24, "vocab": 61},
    "llama": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "seq_length": 24, "vocab": 61},
    "bert": {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "seq_length": 24, "vocab": 61},
    "t5": {"layers": 2, "hidden": 32, "heads": 4, "head_width": 8, "ffn": 64, "seq_length": 24, "dec_length": 12, "vocab": 61},
}
"""The vocabulary is odd, so that tensor parallelism must divide it unevenly."""


def small_model(family: str, **changes: Any) -> Model:
    """The small model of a family, in fp32 unless told otherwise."""
    return model_from_mapping({"family": family, "dtype": "fp32", **SIZES[family], **changes}, "test", family)


def loud_chain(model: Model, **more: Any) -> Chain:
    """The model's modules with weights ten times their initial size: what each op does then shows in the logits."""
    chain = build_chain(model, **more)
    with torch.no_grad():
        for parameter in chain.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10)
    return chain


def small_batch(
    model: Model, lengths: Sequence[int], layout: Layout = "padded", dec_lengths: Sequence[int] = (), seed: int = 0, **more: Any
) -> Batch:
    """Random tokens for `model`; a decoder gets half the lengths unless told otherwise."""
    if model.family == "t5" and not dec_lengths:
        dec_lengths = [max(1, length // 2) for length in lengths]
    types = 2 if model.family == "bert" else 0
    return random_batch(lengths, model.config["vocab"], dec_lengths=dec_lengths, layout=layout, types=types,
                        next_sentence=bool(types), seed=seed, **more)  # fmt: skip
