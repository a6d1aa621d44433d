"""The lengths of a data set without its contents: all that planning asks of it, small enough to lie beside a run."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import msgspec
import numpy as np

from penstock.data.dataset import DataSet, lengths_file
from penstock.data.manifest import write_manifest
from penstock.files import write_bytes

__all__ = ["keep_lengths"]

_MOST_SAMPLES = 1 << 22
"""Beyond so many, lengths take tens of megabytes and a run would start noticeably later: they stay where the data are."""


def keep_lengths(data: DataSet, folder: Path) -> None:
    """Writes a folder that `open_data` opens like the data itself, as far as lengths go; nothing where there are too many samples."""
    if len(data) > _MOST_SAMPLES:
        return
    folder.mkdir(parents=True, exist_ok=True)
    splits = {data.split: data.manifest.splits[data.split]}
    write_manifest(folder, msgspec.structs.replace(data.manifest, splits=splits, tokenizer=None, lengths_only=True))
    for side in data.ragged and data.manifest.sides:
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(data.ragged[side].lengths, np.int32), allow_pickle=False)
        write_bytes(lengths_file(folder, data.split, side), gzip.compress(buffer.getvalue(), 1, mtime=0))
