"""Telling data sets apart without reading them whole: sizes of their files, and checksums of where these begin and end."""

from __future__ import annotations

import zlib
from pathlib import Path

from penstock.data.dataset import DataSet
from penstock.errors import InputError

__all__ = ["fingerprint", "tokenizer_fingerprint"]

_ENDS_BYTES = 1 << 20


def fingerprint(data: DataSet) -> str:
    """A text that is equal for equal samples, wherever their folder lies."""
    if data.folder.is_dir():
        files = sorted(path for path in data.folder.glob(f"{data.split}_*") if path.is_file())
    else:  # a pair of files of Megatron-LM
        files = [Path(f"{data.folder}.bin"), Path(f"{data.folder}.idx")]
    return f"{_sum([path for path in files if path.suffix in ('.bin', '.idx', '.npy')]):08x}"


def tokenizer_fingerprint(data: DataSet) -> str:
    """The fingerprint of the tokenizer beside the data, and the size of its vocabulary; empty if there is none."""
    name = data.manifest.tokenizer
    return "" if name is None else f"{_sum([data.folder / name]):08x} of {data.manifest.vocab_size} tokens"


def _sum(files: list[Path]) -> int:
    total = 0
    for path in files:
        try:
            with path.open("rb") as stream:
                size = path.stat().st_size
                total = zlib.crc32(stream.read(_ENDS_BYTES), zlib.crc32(str(size).encode(), total))
                stream.seek(max(0, size - _ENDS_BYTES))
                total = zlib.crc32(stream.read(), total)
        except OSError as error:
            raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
    return total
