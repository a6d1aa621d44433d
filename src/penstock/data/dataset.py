"""A split of a prepared folder: lengths of all samples at once, contents of one sample at a time."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.batches import GlobalBatches, Lengths
from penstock.data.indexed import IndexedTokens
from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.manifest import SPANS, DataManifest, read_manifest
from penstock.data.mixture import Mixture, Task
from penstock.errors import InputError, near_misses, plural
from penstock.files import readable_bytes

__all__ = ["BERT_PARTS", "DataSet", "lengths_file", "open_data"]

BERT_PARTS = ("segments", "masked_positions", "masked_ids")
"""Ragged parts of BERT samples beside `input`."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class DataSet:
    """Samples of one split; everything is mapped from files, so that a process holds only what it touches."""

    folder: Path
    split: str
    manifest: DataManifest
    ragged: dict[str, IndexedTokens]
    """Parts of samples with lengths of their own: `input`, `target`, spans of chats, BERT's others."""
    fixed: dict[str, Array]
    """Parts of samples of one size: `images`, `labels`."""

    def __len__(self) -> int:
        return self.manifest.splits[self.split].samples

    def __getitem__(self, sample: int) -> dict[str, Array]:
        """All parts of one sample, not truncated; views of the files, to be copied by whoever changes them."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        parts: dict[str, Any] = {**self.ragged, **self.fixed}
        return {name: part[sample] for name, part in parts.items()}

    def check(self) -> None:
        """Refuses files of which some sample cannot be read."""
        if self.manifest.lengths_only:
            raise InputError(f"'{self.folder}' keeps the lengths of samples alone, for reports of its run. Give the data themselves.")
        for part in self.ragged.values():
            part.check()

    @property
    def lengths(self) -> Lengths:
        """For each side the lengths of all samples, from the index alone; images count as one."""
        if not self.ragged:
            return (np.ones(len(self), np.int32),)
        return [self.ragged[side].lengths for side in self.manifest.sides]

    def mixture(self, seed: int = 0, *, shuffle: bool = True) -> Mixture:
        """The stream of samples that training draws from."""
        tasks = tuple(Task(task.name, task.start, task.stop, task.weight) for task in self.manifest.splits[self.split].tasks)
        return Mixture(tasks, seed, shuffle)

    def batches(
        self,
        samples_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        *,
        limits: Limits = NO_LIMITS,
        seed: int = 0,
        shuffle: bool = True,
    ) -> GlobalBatches:
        """The global batches of all steps; `limits` truncate samples."""
        return GlobalBatches(self.lengths, self.mixture(seed, shuffle=shuffle), samples_per_batch, tokens_per_batch, limits)


def open_data(folder: str | Path, split: str = "train") -> DataSet:
    """Opens a split of a folder that `penstock prepare-data` wrote, or a pair of files of Megatron-LM (`folder/name`, no suffix)."""
    folder = Path(folder)
    if not folder.is_dir() and Path(f"{folder}.idx").is_file():
        return _megatron(folder, split)
    manifest = read_manifest(folder)
    if split not in manifest.splits:
        raise InputError(f"data '{folder}' has no split '{split}'. {near_misses(split, manifest.splits)}")
    if manifest.lengths_only:
        sides = manifest.sides if manifest.kind != "images" else []
        kept = {side: IndexedTokens.of_lengths(folder, _kept(lengths_file(folder, split, side))) for side in sides}
        return DataSet(folder, split, manifest, kept, {})
    more = BERT_PARTS if manifest.kind == "bert" else (SPANS,) if manifest.spans else ()
    names = (*manifest.sides, *more) if manifest.kind != "images" else ()
    ragged = {name: IndexedTokens.open(folder / f"{split}_{name}") for name in names}
    fixed = {name: _open_array(folder / f"{split}_{name}.npy") for name in _fixed_names(manifest)}
    sizes = {name: len(part) for name, part in ragged.items()} | {name: len(part) for name, part in fixed.items()}
    for name, size in sizes.items():
        if size != manifest.splits[split].samples:
            raise InputError(f"'{folder}/{split}_{name}' has {plural(size, 'sample')}, data.json says {manifest.splits[split].samples}.")
    return DataSet(folder, split, manifest, ragged, fixed)


def lengths_file(folder: Path, split: str, side: str) -> Path:
    """The file of a side's lengths in a folder without contents."""
    return folder / f"{split}_{side}.lengths.npy.gz"


def _kept(path: Path) -> Array:
    try:
        found: Array = np.load(io.BytesIO(gzip.decompress(readable_bytes(path, "lengths"))), allow_pickle=False)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"lengths '{path}' cannot be read: {error}.") from None
    return found


def _fixed_names(manifest: DataManifest) -> tuple[str, ...]:
    return {"text": (), "bert": ("labels",), "images": ("images", "labels")}[manifest.kind]


def _megatron(prefix: Path, split: str) -> DataSet:
    """A pair of files that Megatron-LM's own tools wrote, as one task of plain text."""
    from penstock.data.manifest import DataSplit, TaskRange

    tokens = IndexedTokens.open(prefix)
    whole = DataSplit(len(tokens), {}, [TaskRange(prefix.name, 0, len(tokens))])
    return DataSet(prefix, split, DataManifest("text", ["input"], {split: whole}), {"input": tokens}, {})


def _open_array(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except (OSError, ValueError) as error:
        raise InputError(f"'{path}' cannot be read: {error}. Prepare the data again.") from None
