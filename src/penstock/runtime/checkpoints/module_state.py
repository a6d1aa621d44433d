"""Weights of somebody's module under the names that it has for them: read from a folder of safetensors, and written as one.

A folder for a model of transformers has its config beside the weights, so that `from_pretrained` loads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from penstock.errors import InputError
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.hf_weights import read_safetensors
from penstock.models.ops import Model
from penstock.runtime.checkpoints.files import write_safetensors
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, TensorPiece, stored_shapes
from penstock.runtime.checkpoints.reader import Checkpoint

__all__ = ["ModuleFolder", "export_module"]


class ModuleFolder:
    """Weights by their names in the module, each read when a rank asks for pieces of it."""

    def __init__(self, folder: str | Path, model: Model) -> None:
        self.folder, self.model = Path(folder), model
        self._names = [name.partition("/")[2] for name in stored_shapes(model) if name.startswith(f"{WEIGHTS}/")]
        self._state: Mapping[str, torch.Tensor] = read_safetensors(folder)
        if set(self._names) - set(self._state) and str(model.config.get("origin", "")).startswith("hf:"):
            from penstock.models.modules.cutting.transformers_models import pretrained_state

            self._state = pretrained_state(str(folder))  # files of other versions have other names, which transformers knows

    def check(self) -> None:
        """Refuses weights that are not the module's."""
        for name, shape in stored_shapes(self.model).items():
            kind, _, key = name.partition("/")
            if kind != WEIGHTS:
                continue
            if key not in self._state:
                raise InputError(f"'{self.folder}' has no weight '{key}' of model '{self.model.name}'. Use the folder of this model.")
            if tuple(self._state[key].shape) != shape:
                raise InputError(f"weight '{key}' in '{self.folder}' has shape {tuple(self._state[key].shape)}; {shape} is expected.")

    def load(self, pieces: Iterable[TensorPiece]) -> None:
        """Fills the pieces' tensors, whatever their dtype and device; running statistics that the folder lacks stay as they are."""
        for piece in pieces:
            kind, _, key = piece.name.partition("/")
            if kind == BUFFERS and key not in self._state:
                continue
            piece.tensor.copy_(self._state[key][tuple(slice(start, stop) for start, stop in piece.box)])


def export_module(checkpoint: Checkpoint, model: Model, folder: str | Path, *, dtype: str = "") -> None:
    """Writes the module's weights into a new `folder`: `model.safetensors`, and, for a model of transformers, its config."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"'{folder}' exists and is not an empty folder; give a new one.")
    shapes = {name: shape for name, shape in stored_shapes(model).items() if name.partition("/")[0] in (WEIGHTS, BUFFERS)}
    checkpoint.check(shapes, kinds=(WEIGHTS, BUFFERS))
    state = {name.partition("/")[2]: checkpoint.read(name) for name in shapes}
    kind = TORCH_DTYPES[dtype or model.dtype]
    state = {name: x.to(kind) if x.is_floating_point() else x for name, x in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    origin = str(model.config.get("origin", ""))
    if origin.startswith("hf:"):
        from penstock.models.modules.cutting.transformers_models import save_config

        save_config(origin.removeprefix("hf:"), folder, kind)
    write_safetensors(folder / "model.safetensors", {name: x.contiguous() for name, x in state.items()}, {"format": "pt"})
