"""The weights that a run begins with, where they are not random: those of a Hugging Face folder, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.models.catalog import TRACED
from penstock.models.modules.hf_weights import HF_FILES
from penstock.runtime.checkpoints.huggingface import HfFolder
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, stored_shapes
from penstock.runtime.checkpoints.module_state import ModuleFolder
from penstock.runtime.checkpoints.reader import Checkpoint

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["check_weights", "open_weights"]

_HF = ("hf", "huggingface")
"""As models are named, and as `penstock export` names the folder that it writes."""


def open_weights(text: str, model: Model) -> HfFolder | ModuleFolder | Checkpoint:
    """The weights of `hf:FOLDER`, of a checkpoint, or of the latest in a folder."""
    kind, _, folder = text.partition(":")
    if kind in _HF:
        return ModuleFolder(folder, model) if model.family == TRACED else HfFolder(folder, model)
    if any((Path(text) / name).is_file() for name in HF_FILES):
        raise InputError(f"'{text}' holds weights under Hugging Face's names. Write hf:{text}.")
    return Checkpoint(text)


def check_weights(text: str, model: Model) -> None:
    """Refuses weights that are not the model's, before anything starts."""
    found = open_weights(text, model)
    if not isinstance(found, Checkpoint):
        found.check()
    else:
        found.check(stored_shapes(model), kinds=(WEIGHTS, BUFFERS))
