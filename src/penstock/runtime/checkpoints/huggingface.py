"""Weights of a Hugging Face folder for the ranks of any plan, and those of a checkpoint as such a folder, ready for `from_pretrained`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from penstock.errors import InputError, near_misses
from penstock.files import write_json
from penstock.models.hf_config import hf_config
from penstock.models.huggingface import model_from_hf
from penstock.models.modules import TORCH_DTYPES
from penstock.models.modules.hf_weights import HfState, HfWeight, hf_names, read_safetensors
from penstock.models.ops import Model
from penstock.runtime.checkpoints.files import sync_folder, write_safetensors
from penstock.runtime.checkpoints.going_on import RUN
from penstock.runtime.checkpoints.layout import WEIGHTS, TensorPiece, stored_shapes
from penstock.runtime.checkpoints.reader import Checkpoint

__all__ = ["HfFolder", "export_hf_checkpoint"]

_FILE_BYTES = 5 * 10**9
_SILENT = ("heads", "kv_heads", "rope_theta", "rope_scaling", "window", "eps", "activation", "max_distance")
"""Fields of a model's config that can differ although all weights have the same shapes."""


class HfFolder:
    """The weights of a Hugging Face folder, each read when a rank asks for pieces of it."""

    def __init__(self, folder: str | Path, model: Model) -> None:
        self._tensors = read_safetensors(folder)
        _check_config(Path(folder), model)
        self._state = HfState(model, self._tensors)
        self._read: tuple[str, torch.Tensor] | None = None
        """The weight that was asked for last: pieces of one come one after the other."""

    def check(self) -> None:
        """Refuses weights that are not the model's: names that are missing, shapes or copies that differ.

        Tensors are not read, but for those that the files hold more than once.
        """
        state = self._state
        state.require_all(state.weights)
        for key in state.weights:
            for name, expected in state.sources(key):
                if self._tensors.shape(name) != expected:
                    raise InputError(f"weight '{name}' has shape {self._tensors.shape(name)}; {expected} is expected for '{key}'.")
            state.compare_copies(key)

    def load(self, pieces: Iterable[TensorPiece]) -> None:
        """Fills the pieces' tensors, whatever their dtype and device."""
        for piece in pieces:
            key = piece.name.removeprefix(f"{WEIGHTS}/")
            if self._read is None or self._read[0] != key:
                self._read = key, self._state.tensor(key)
            piece.tensor.copy_(self._read[1][tuple(slice(start, stop) for start, stop in piece.box)])


def _check_config(folder: Path, ours: Model) -> None:
    """Compares with the config.json beside the weights, if there is one, what no shape tells."""
    if not (folder / "config.json").is_file():
        return
    theirs = model_from_hf(str(folder))
    both = [name for name in _SILENT if name in ours.config and name in theirs.config]
    differ = [
        f"{name} is {theirs.config[name]} there, {ours.config[name]} in the plan"
        for name in both
        if theirs.config[name] != ours.config[name]
    ]
    if theirs.family != ours.family:
        differ = [f"it is of family {theirs.family}, the plan's of {ours.family}"]
    if differ:
        raise InputError(
            f"'{folder / 'config.json'}' describes another model than '{ours.name}': {'; '.join(differ)}. "
            f"Make the plan with --model hf:{folder}."
        )


def export_hf_checkpoint(
    checkpoint: Checkpoint, model: Model, folder: str | Path, *, dtype: str = "", file_bytes: int = _FILE_BYTES
) -> None:
    """Writes a new `folder` that `from_pretrained` loads: the weights, in the dtype they were saved in unless told otherwise, shared ones
    once; the model's config; the tokenizer of the data it was trained on, where that is still there.

    One file's worth of weights is in memory at a time.
    """
    folder = Path(folder)
    if dtype and dtype not in TORCH_DTYPES:
        raise InputError(f"dtype is '{dtype}'. {near_misses(dtype, TORCH_DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"'{folder}' exists and is not an empty folder; give a new one.")
    names, config = hf_names(model), hf_config(model, dtype)
    checkpoint.check({name: shape for name, shape in stored_shapes(model).items() if name.startswith(f"{WEIGHTS}/")}, kinds=(WEIGHTS,))
    keys = [name.partition("/")[2] for name in stored_shapes(model) if name.startswith(f"{WEIGHTS}/")]
    groups = list(_grouped(checkpoint, keys, TORCH_DTYPES.get(dtype), file_bytes))
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_files(checkpoint, names, groups, TORCH_DTYPES.get(dtype), partial)
        write_json(partial / "config.json", config)
        _copy_tokenizer(checkpoint, partial)
        os.chmod(partial, 0o777 & ~_umask())
        sync_folder(partial)
        os.replace(partial, folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer of the run's data, if its folder is where it was."""
    facts = checkpoint.state.get(RUN)
    data = facts.get("--data") if isinstance(facts, dict) else None
    source = Path(data["folder"]) / "tokenizer.json" if isinstance(data, dict) else None
    if source is not None and source.is_file():
        shutil.copyfile(source, folder / "tokenizer.json")
        write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})


def _grouped(checkpoint: Checkpoint, keys: list[str], dtype: torch.dtype | None, file_bytes: int) -> Iterator[list[str]]:
    """The parameters of each file."""
    group: list[str] = []
    filled = 0
    for key in keys:
        size_bytes = checkpoint.size_bytes(f"{WEIGHTS}/{key}", dtype)
        if group and filled + size_bytes > file_bytes:
            yield group
            group, filled = [], 0
        group.append(key)
        filled += size_bytes
    yield group


def _write_files(
    checkpoint: Checkpoint, names: dict[str, HfWeight], groups: list[list[str]], dtype: torch.dtype | None, folder: Path
) -> None:
    places: dict[str, str] = {}
    total_bytes = 0
    for number, group in enumerate(groups, 1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for key in group:
            whole = checkpoint.read(f"{WEIGHTS}/{key}")
            tensors |= zip(names[key].names, names[key].divide(whole if dtype is None else whole.to(dtype)), strict=True)
        write_safetensors(folder / file, tensors, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total_bytes}, "weight_map": places})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
