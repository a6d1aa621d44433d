"""The weights that a job's model begins with."""

from __future__ import annotations

from penstock.models.huggingface import hf_folder

__all__ = ["first_weights"]


def first_weights(source: str, asked: str) -> str:
    """The weights that a run begins with, as `TrainRequest.weights` takes it: empty for random weights."""
    if asked != "auto":
        return "" if asked == "none" else asked
    folder = hf_folder(source)
    return f"hf:{folder}" if folder is not None and any(folder.glob("model*.safetensors*")) else ""
