"""Sequences of tokens in Megatron-LM's `.bin`/`.idx` pair: tokens end to end in one file, lengths and places in the other.

    .idx   9 bytes "MMIDIDX\\0\\0" · version 1 (u64) · dtype code (u8) · sequences n (u64) · document marks d (u64)
           lengths (i32 × n) · places in .bin in bytes (i64 × n) · first sequence of each document, and n (i64 × d)

All numbers are little-endian. Both files are mapped, not read: opening costs the same for ten sequences and ten million.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, plural
from penstock.files import readable_file

__all__ = ["IndexedTokens", "IndexedWriter", "token_dtype"]

Ints = npt.NDArray[Any]

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODES = {np.dtype(name): code for code, name in _DTYPES.items()}
_SMALL_VOCAB = 65500
"""Below this, Megatron-LM stores tokens in two bytes."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that Megatron-LM would choose for a vocabulary."""
    return np.dtype("<u2" if vocab_size < _SMALL_VOCAB else "<i4")


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """A `.bin`/`.idx` pair, opened with `IndexedTokens.open("folder/name")`; `tokens[i]` is a sequence, without a copy."""

    prefix: Path
    lengths: Ints
    """int32, straight from the index."""
    places: Ints
    documents: Ints
    _tokens: Ints
    """The whole `.bin`, as items of its dtype."""

    @classmethod
    def open(cls, prefix: str | Path) -> IndexedTokens:
        """Maps a pair and checks that its two files belong together."""
        prefix = Path(prefix)
        index, count, marks, dtype = _read_index(Path(f"{prefix}.idx"))
        lengths_end = _HEAD.size + 4 * count
        places_end = lengths_end + 8 * count
        lengths = index[_HEAD.size : lengths_end].view("<i4")
        places = index[lengths_end:places_end].view("<i8")
        documents = index[places_end : places_end + 8 * marks].view("<i8")
        tokens = _map(Path(f"{prefix}.bin"), "token file")
        expected = int(places[-1]) + int(lengths[-1]) * dtype.itemsize if count else 0
        if len(tokens) < expected:
            raise InputError(
                f"token file '{prefix}.bin' has {plural(len(tokens), 'byte')}, but its index ends at {expected}: it was cut short."
            )
        return cls(prefix, lengths, places, documents, tokens[: len(tokens) // dtype.itemsize * dtype.itemsize].view(dtype))

    @classmethod
    def of_lengths(cls, prefix: Path, lengths: Ints) -> IndexedTokens:
        """Sequences of which only the lengths are known."""
        return cls(prefix, lengths, np.zeros(len(lengths), np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint16))

    def check(self) -> None:
        """Refuses an index with a sequence outside of its token file; touches every length and place, as opening does not."""
        size = self.dtype.itemsize
        ends = self.places + self.lengths.astype(np.int64) * size
        wrong = (self.lengths < 0) | (self.places < 0) | (self.places % size != 0) | (ends > len(self._tokens) * size)
        if wrong.any():
            raise self._damaged(int(wrong.argmax()))

    def _damaged(self, index: int) -> InputError:
        return InputError(f"'{self.prefix}.idx' is damaged: sequence {index} would lie outside of '{self.prefix}.bin'.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Ints:
        place, rest = divmod(int(self.places[index]), self.dtype.itemsize)
        length = int(self.lengths[index])
        if rest or place < 0 or length < 0 or place + length > len(self._tokens):
            raise self._damaged(index)
        return self._tokens[place : place + length]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token on disk."""
        return self._tokens.dtype

    @property
    def num_tokens(self) -> int:
        """All tokens; touches every length."""
        return int(self.lengths.sum(dtype=np.int64))


def _read_index(path: Path) -> tuple[Ints, int, int, np.dtype[Any]]:
    data = _map(path, "index")
    if len(data) < _HEAD.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise InputError(f"index '{path}' is not a Megatron-LM index: it does not begin with MMIDIDX.")
    _, version, code, count, marks = _HEAD.unpack(bytes(data[: _HEAD.size]))
    if version != 1 or code not in _DTYPES:
        raise InputError(f"index '{path}' has version {version} and dtype code {code}; version 1 and codes 1 to 8 can be read.")
    needed = _HEAD.size + 12 * count + 8 * marks
    if len(data) not in (needed, needed + count):  # the latter has a mode for each sequence, of multimodal data
        raise InputError(
            f"index '{path}' has {plural(len(data), 'byte')}, but {plural(count, 'sequence')} and {plural(marks, 'mark')} take {needed}: "
            "it is damaged."
        )
    return data, count, marks, np.dtype(_DTYPES[code])


def _map(path: Path, what: str) -> Ints:
    readable_file(path, what)
    try:
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, np.uint8, "r").view(np.ndarray)
    except (OSError, ValueError) as error:
        raise InputError(f"{what} '{path}' cannot be mapped: {error}.") from None


class IndexedWriter:
    """Writes a pair; both files appear under their names only when all is written.

    >>> with IndexedWriter("folder/name", np.uint16) as writer:
    ...     writer.add([5, 6, 7])
    """

    def __init__(self, prefix: str | Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        if self.dtype not in _CODES:
            raise InputError(f"tokens of type {self.dtype} cannot be stored; use one of {', '.join(str(known) for known in _CODES)}.")
        self._prefix = Path(prefix)
        self._lengths: list[Ints] = []
        self._stream: IO[bytes] = open(self._temporary(".bin"), "wb")  # noqa: SIM115 - closed with the writer

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def add(self, tokens: npt.ArrayLike) -> None:
        """Adds one sequence, a document of its own."""
        values = np.asarray(tokens)
        self.add_many(values, np.array([len(values)]))

    def add_many(self, tokens: Ints, lengths: Ints) -> None:
        """Adds sequences that lie end to end."""
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, {len(tokens)} tokens given")
        self._stream.write(np.ascontiguousarray(tokens, self.dtype).tobytes())
        self._lengths.append(lengths.astype("<i4"))

    def close(self) -> None:
        """Writes the index and gives both files their names."""
        lengths = np.concatenate([np.zeros(0, "<i4"), *self._lengths])
        ends = np.cumsum(lengths, dtype="<i8") * self.dtype.itemsize
        places = np.concatenate([np.zeros(1, "<i8"), ends])[: len(lengths)]
        _finish(self._stream)
        with open(self._temporary(".idx"), "wb") as stream:
            stream.write(_HEAD.pack(_MAGIC, 1, _CODES[self.dtype], len(lengths), len(lengths) + 1))
            for part in (lengths, places, np.arange(len(lengths) + 1, dtype="<i8")):
                stream.write(part.tobytes())
            _finish(stream)
        for suffix in (".bin", ".idx"):
            os.replace(self._temporary(suffix), f"{self._prefix}{suffix}")

    def discard(self) -> None:
        """Leaves nothing behind."""
        self._stream.close()
        for suffix in (".bin", ".idx"):
            self._temporary(suffix).unlink(missing_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return self._prefix.with_name(f".{self._prefix.name}{suffix}.part")


def _finish(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
    stream.close()
