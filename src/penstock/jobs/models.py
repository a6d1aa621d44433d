"""The model that a job names, found on this machine."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.models.ops import Model

__all__ = ["first_weights", "found_source", "hf_folder", "job_model"]

_HF = "hf:"


def found_source(source: str) -> str:
    """The source with the place of its files in it: `hf:Qwen/Qwen3-1.7B` becomes `hf:` and the folder that it was downloaded to."""
    if not source.startswith(_HF) or Path(source.removeprefix(_HF)).exists():
        return source
    name = source.removeprefix(_HF)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(f"model '{source}': there is no folder '{name}'. Give one that holds a config.json.") from None
    try:
        return _HF + snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        raise InputError(
            f"model '{source}': there is neither a folder '{name}' nor a downloaded model of that name. Download it with "
            f"`hf download {name}`, or give a folder that holds a config.json."
        ) from None


def hf_folder(source: str) -> Path | None:
    """The folder of a Hugging Face model; None for any other."""
    if not source.startswith(_HF):
        return None
    path = Path(source.removeprefix(_HF))
    return path if path.is_dir() else path.parent


def job_model(source: str) -> Model:
    """The model that a source names."""
    return resolve_model(found_source(source))


def first_weights(source: str, asked: str) -> str:
    """What a run begins with, as `TrainRequest.weights` takes it: empty for random weights."""
    if asked != "auto":
        return "" if asked == "none" else asked
    folder = hf_folder(source)
    return f"{_HF}{folder}" if folder is not None and any(folder.glob("model*.safetensors*")) else ""
