"""BERT's masked samples from the HDF5 shards that NVIDIA's training examples write, padding taken off.

input_ids, input_mask, segment_ids        (samples, length), or ragged without padding
masked_lm_positions, masked_lm_ids        (samples, predictions), zero-padded, or ragged
next_sentence_labels                      (samples,)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.indexed import IndexedWriter, token_dtype
from penstock.data.manifest import DataManifest, DataSplit, TaskRange, write_manifest
from penstock.data.mixture import apportion
from penstock.data.permutation import shuffled
from penstock.data.text.cleaning import SPLITS
from penstock.data.workers import Report, new_folder
from penstock.errors import InputError, near_misses
from penstock.files import readable_file

__all__ = ["is_hdf5", "prepare_bert"]

Array = npt.NDArray[Any]

_FIELDS = ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
_PARTS = ("input", "segments", "masked_positions", "masked_ids")


def is_hdf5(path: Path) -> bool:
    """Whether a path names an HDF5 file."""
    return path.suffix in (".h5", ".hdf5")


def prepare_bert(
    inputs: Sequence[Path], out: Path, split: Sequence[float], vocab_size: int, report: Report = lambda *_: None
) -> DataManifest:
    """Writes each part of the samples as a `.bin`/`.idx` pair, and the next-sentence labels as an array."""
    sizes = [_size(path) for path in inputs]
    total, at = sum(sizes), 0
    if not total:
        raise InputError("the shards hold no samples.")
    order = shuffled(np.arange(total), total, 0)
    codes = np.empty(total, np.uint8)
    codes[order] = np.repeat(np.arange(len(SPLITS), dtype=np.uint8), apportion(total, split))
    with new_folder(out) as folder:
        with ExitStack() as stack:
            outputs = {int(code): _Output(stack, folder, SPLITS[code], vocab_size) for code in np.unique(codes)}
            for path, size in zip(inputs, sizes, strict=True):
                shard = _open(path)
                for row, code in enumerate(codes[at : at + size]):
                    outputs[int(code)].add(_sample(shard, row, path, vocab_size), int(shard["next_sentence_labels"][row]))
                at += size
                report("reading samples", at, total)
        splits = {SPLITS[code]: output.finish() for code, output in outputs.items()}
        manifest = DataManifest("bert", ["input"], splits, vocab_size, counts={"read": total, "kept": total})
        write_manifest(folder, manifest)
    return manifest


class _Output:
    """The files of one split."""

    def __init__(self, stack: ExitStack, folder: Path, split: str, vocab_size: int) -> None:
        dtypes: tuple[np.dtype[Any], ...] = (token_dtype(vocab_size), np.dtype("u1"), np.dtype("<u2"), token_dtype(vocab_size))
        self._writers = [
            stack.enter_context(IndexedWriter(folder / f"{split}_{part}", dtype)) for part, dtype in zip(_PARTS, dtypes, strict=True)
        ]
        self._labels_path = folder / f"{split}_labels.npy"
        self._labels: list[int] = []
        self._num_tokens = 0

    def add(self, parts: Sequence[Array], label: int) -> None:
        for writer, values in zip(self._writers, parts, strict=True):
            writer.add(values)
        self._labels.append(label)
        self._num_tokens += len(parts[0])

    def finish(self) -> DataSplit:
        np.save(self._labels_path, np.array(self._labels, np.int64), allow_pickle=False)
        return DataSplit(len(self._labels), {"input": self._num_tokens}, [TaskRange("bert", 0, len(self._labels))])


def _size(path: Path) -> int:
    """The number of samples in a shard, which must have all parts and those of one size."""
    with _file(path) as file:
        missing = [name for name in _FIELDS if name not in file]
        if missing:
            raise InputError(f"shard '{path}' has no '{missing[0]}'. {near_misses(missing[0], list(file))}")
        sizes = {name: len(file[name]) for name in _FIELDS}
    if len(set(sizes.values())) > 1:
        raise InputError(f"shard '{path}' has parts of different sizes: {', '.join(f'{name} {size}' for name, size in sizes.items())}.")
    return sizes["input_ids"]


def _open(path: Path) -> dict[str, Any]:
    with _file(path) as file:
        return {name: file[name][:] for name in (*_FIELDS, *(("input_mask",) if "input_mask" in file else ()))}


def _file(path: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise InputError("HDF5 shards need the Python package 'h5py'. Install it with: pip install 'penstock[data]'") from None
    readable_file(path, "shard")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InputError(f"shard '{path}' cannot be read: {error}.") from None


def _sample(shard: dict[str, Any], row: int, path: Path, vocab_size: int) -> tuple[Array, Array, Array, Array]:
    """Tokens, segments, masked positions and the tokens that stood there, without padding."""
    ids, positions = np.asarray(shard["input_ids"][row]), np.asarray(shard["masked_lm_positions"][row])
    length = int(np.asarray(shard["input_mask"][row]).sum()) if "input_mask" in shard else len(ids)
    segments, masked = np.asarray(shard["segment_ids"][row])[:length], np.asarray(shard["masked_lm_ids"][row])
    ids, real = ids[:length], positions != 0  # [CLS] stands at 0 and is never masked: a zero is padding
    if not length or len(segments) != length or len(positions) != len(masked) or positions.max(initial=0) >= length:
        raise InputError(f"shard '{path}', sample {row}: the lengths of its parts do not agree.")
    tokens = np.concatenate([ids, masked[real]])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InputError(f"shard '{path}', sample {row}: token {tokens.max()} is outside of the vocabulary. Give its size (--vocab-size).")
    return ids, segments, positions[real], masked[real]
