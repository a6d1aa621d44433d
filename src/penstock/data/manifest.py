"""What a folder of prepared data says of itself: `data.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from penstock.errors import InputError, plural
from penstock.files import read_text, write_bytes

__all__ = ["MANIFEST", "SPANS", "DataManifest", "DataSplit", "TaskRange", "read_manifest", "write_manifest"]

MANIFEST = "data.json"
SPANS = "spans"
"""The part of chats that says which of their tokens count: [first, last) of each answer, end to end."""
_VERSION = 1


class TaskRange(msgspec.Struct, frozen=True):
    """The range of one task's samples in a split."""

    name: str
    start: int
    stop: int
    weight: float | None = None


class DataSplit(msgspec.Struct, frozen=True):
    """One of train, validation and test."""

    samples: int
    tokens: dict[str, int]
    """Tokens of each side."""
    tasks: list[TaskRange]


class DataManifest(msgspec.Struct, frozen=True):
    """Kind, sides and splits of a folder, and how they were made."""

    kind: Literal["text", "bert", "images"]
    sides: list[str]
    """Names of the ragged parts that count as tokens: `input`, and `target` if there are pairs."""
    splits: dict[str, DataSplit]
    vocab_size: int = 0
    end_token: int | None = None
    tokenizer: str | None = None
    """File in the folder."""
    image_shape: tuple[int, int, int] | None = None
    """Channels, height, width."""
    classes: list[str] = []
    counts: dict[str, int] = {}
    """Samples read, and dropped for each reason."""
    spans: bool = False
    """Whether samples are chats, of which the tokens of some spans count in the loss."""
    lengths_only: bool = False
    """Whether the folder keeps what planning needs, and no contents (`kept_lengths.py`)."""
    version: int = _VERSION


def read_manifest(folder: str | Path) -> DataManifest:
    """The manifest of a prepared folder."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise InputError(f"folder '{folder}' holds no prepared data ({MANIFEST} is missing). Make it with: penstock prepare-data")
    try:
        found = msgspec.json.decode(read_text(path, "data manifest"), type=DataManifest)
    except msgspec.DecodeError as error:
        raise InputError(f"data manifest '{path}' is not valid: {error}.") from None
    if found.version != _VERSION:
        raise InputError(f"data manifest '{path}' has version {found.version}; this Penstock reads {_VERSION}. Prepare the data again.")
    for name, split in found.splits.items():
        if problem := _problem(split):
            raise InputError(f"data manifest '{path}', split '{name}': {problem}. Prepare the data again.")
    return found


def _problem(split: DataSplit) -> str:
    """Why tasks and samples of a split do not belong together: tasks follow each other and have every sample; empty if all is well."""
    at = 0
    for task in split.tasks:
        if not at == task.start <= task.stop <= split.samples:
            return f"task '{task.name}' has samples {task.start} to {task.stop}, but {at} to at most {split.samples} was expected"
        at = task.stop
    return "" if at == split.samples else f"its tasks have {plural(at, 'sample')}, the split {split.samples}"


def write_manifest(folder: str | Path, manifest: DataManifest) -> None:
    """Writes the manifest, for people to read too."""
    write_bytes(Path(folder) / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
