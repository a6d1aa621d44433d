"""Samples that are already in Python: a sequence of dicts with `input_ids` (a `datasets.Dataset` is one), or of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from penstock.data.dataset import DataSet
from penstock.data.indexed import IndexedTokens, IndexedWriter
from penstock.data.manifest import DataManifest, DataSplit, TaskRange, write_manifest
from penstock.data.workers import new_folder
from penstock.errors import InputError, plural
from penstock.jobs.cache import cache_folder, digest, made_once

__all__ = ["data_of_rows", "folder_of_rows", "is_path"]

Ints = npt.NDArray[Any]


def is_path(data: Any) -> bool:
    """Whether data is named by one path or several, not given as samples."""
    several = data if isinstance(data, (list, tuple)) else [data]
    return bool(several) and all(isinstance(one, (str, Path)) for one in several)


def data_of_rows(rows: Sequence[Any], lengths: Sequence[int] | None = None) -> DataSet:
    """The rows as a data set of plain text; with `lengths` none of them is read before it is trained on."""
    if isinstance(rows, Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise InputError(
            "data is the path of a file or folder, or a sequence (a list, a `datasets.Dataset`) of dicts with `input_ids` or of token ids, "
            f"and {type(rows).__name__} was given."
        )
    if not len(rows):
        raise InputError("the data has no samples. Give at least one, a dict with `input_ids` or its token ids.")
    if lengths is not None and len(lengths) != len(rows):
        raise InputError(f"{plural(len(lengths), 'length')} given for {plural(len(rows), 'sample')}. Give one for each.")
    if lengths is not None and (least := min(lengths)) < 0:
        raise InputError(f"lengths: one of them is {least}; 0 or more was expected.")
    tokens = _RowTokens(rows, lengths)
    return DataSet(Path("rows"), "train", _manifest(len(rows), tokens.vocab), {"input": cast(IndexedTokens, tokens)}, {})


def folder_of_rows(rows: Sequence[Any]) -> str:
    """A prepared folder with the rows in it, made once for the same tokens; what processes other than this one can open."""
    data = data_of_rows(rows)
    held = data.ragged["input"]
    tokens = [held[place] for place in range(len(held))]
    path = cache_folder("data") / digest("rows", [one.tolist() for one in tokens])

    def make(path: Path) -> None:
        with new_folder(path) as folder:
            with IndexedWriter(folder / "train_input", np.int32) as writer:
                for one in tokens:
                    writer.add(one)
            write_manifest(folder, data.manifest)

    made_once(path, make)
    return str(path)


def _manifest(count: int, vocab: int) -> DataManifest:
    return DataManifest("text", ["input"], {"train": DataSplit(count, {}, [TaskRange("rows", 0, count)])}, vocab)


class _RowTokens:
    """Stands where `IndexedTokens` does: tokens of each row, and their lengths."""

    def __init__(self, rows: Sequence[Any], lengths: Sequence[int] | None) -> None:
        self._rows = rows
        read = [self[place] for place in range(len(rows))] if lengths is None else []
        self.vocab = 1 + max((int(one.max()) for one in read if len(one)), default=-1)
        """The largest id, and one more; 0 where the rows have not been read."""
        self.lengths: Ints = np.asarray([len(one) for one in read] if lengths is None else lengths, np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Ints:
        row = self._rows[place]
        if isinstance(row, Mapping):
            if "labels" in row:
                raise InputError(
                    f"sample {place} has labels of its own, which are not taken: every token after the first is one. Leave them out, or "
                    'write pairs to a JSONL file, {"input": "…", "target": "…"}, of which the target counts.'
                )
            if "input_ids" not in row:
                raise InputError(f"sample {place} has {', '.join(map(str, row)) or 'nothing'}, no `input_ids`. Tokenise it first.")
            row = row["input_ids"]
        found = np.asarray(row)
        if found.ndim != 1 or (len(found) and not np.issubdtype(found.dtype, np.integer)):
            raise InputError(f"sample {place} is not a list of token ids, but {found.dtype} of shape {found.shape}. Tokenise it first.")
        if len(found) and found.min() < 0:
            raise InputError(f"sample {place} has {found.min()} among its token ids; 0 or more was expected.")
        if hasattr(self, "lengths") and len(found) != self.lengths[place]:
            raise InputError(f"sample {place} has {len(found)} tokens, but its length was given as {self.lengths[place]}.")
        return found

    def check(self) -> None:
        """Rows that can be read are whole."""
