"""A plan for a Llama 8B of which one field is another's: an export must refuse it, or say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan

__all__ = ["OTHER_FIELDS", "other_llama"]

OTHER_FIELDS: dict[str, Any] = {
    "layers": 31, "hidden": 2048, "heads": 16, "kv_heads": 4, "ffn": 14336 + 128, "vocab": 128000, "seq_length": 2048, "head_width": 64,
    "rope_theta": 500000.4, "eps": 1e-6, "tied": True, "qkv_bias": True, "out_bias": True, "qk_norm": True, "window": 512, "dropout": 0.1,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "dtype": "fp32",
}  # fmt: skip
"""Of every field of a `LlamaConfig`, a value that llama-8b does not have."""


def other_llama(folder: Path, **fields: Any) -> Plan:
    """A plan on one device for llama-8b with other fields."""
    path = folder / "model.yaml"
    path.write_text(yaml.safe_dump({"base": "llama-8b", "name": "llama-8b", **fields}), encoding="utf-8")
    return uniform_plan(str(path), "1xh100-80gb", global_batch=8, micro_batch=1)
