"""Loading checkpoints under any plan: each rank asks for the boxes it needs, and gets them from whichever files overlap."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from penstock.errors import InputError, first_of, near_misses, plural
from penstock.runtime.checkpoints.files import DTYPE_NAMES, checksum, tensor_bytes
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.manifest import (
    MANIFEST,
    Box,
    StoredPiece,
    StoredTensor,
    decode_manifest,
    intersection,
    outside,
    volume,
    whole_box,
)

__all__ = ["Checkpoint", "PiecesInMemory"]

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SMALL_BYTES = 2**32
"""A checkpoint of so many is read whole by one process in seconds."""


class Checkpoint:
    """A whole checkpoint, open for reading. Nothing of it is read before it is asked for, but the manifest and the files' sizes."""

    def __init__(self, path: str | Path) -> None:
        """Opens the checkpoint at `path`, or the latest one of a folder of them."""
        self.path = find_checkpoint(path)
        self._where = f"checkpoint '{self.path}'"
        try:
            data = (self.path / MANIFEST).read_bytes()
        except OSError as error:
            raise InputError(f"{self._where} cannot be read: {error.strerror}.") from None
        self.manifest = decode_manifest(data, self._where)
        self._open: dict[str, Any] = {}
        for file, size_bytes in self.manifest.files.items():
            self._check_size(file, size_bytes)

    def _check_size(self, file: str, size_bytes: int) -> None:
        try:
            found = (self.path / file).stat().st_size
        except OSError:
            raise InputError(f"{self._where}: file '{file}' is missing. Use an earlier checkpoint.") from None
        if found != size_bytes:
            raise InputError(
                f"{self._where}: file '{file}' has {plural(found, 'byte')}, {size_bytes} were written. Use an earlier checkpoint."
            )

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        """The state that was saved besides tensors: data position, seeds, optimizer steps."""
        return self.manifest.state

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors in it: `weights`, `buffers`, and what the optimizer kept."""
        return tuple(dict.fromkeys(name.partition("/")[0] for name in self.manifest.tensors))

    def check(self, expected: Mapping[str, tuple[int, ...]], kinds: Iterable[str] | None = None) -> None:
        """Refuses a checkpoint of another model: names that are missing, that have no place, or shapes that differ.

        Only tensors of `kinds` are looked at (all, if None): weights alone can be taken from a checkpoint that holds more.
        """
        chosen = None if kinds is None else set(kinds)
        given = {name: t.shape for name, t in self.manifest.tensors.items() if chosen is None or name.partition("/")[0] in chosen}
        missing, extra = [repr(n) for n in expected if n not in given], [repr(n) for n in given if n not in expected]
        if missing:
            raise InputError(
                f"{self._where} lacks {first_of(missing, 4)}. It holds {', '.join(self.kinds)}. Is it of another model or optimizer?"
            )
        if extra:
            raise InputError(f"{self._where} holds {first_of(extra, 4)}, for which the model has no place. Is it of another model?")
        for name, shape in expected.items():
            if given[name] != tuple(shape):
                raise InputError(f"{self._where}: '{name}' has shape {list(given[name])}, the model needs {list(shape)}.")

    def load(self, pieces: Iterable[TensorPiece]) -> None:
        """Fills the pieces' tensors, whatever their dtype and device."""
        for piece in pieces:
            stored = self._tensor(piece.name)
            if stored.shape != tuple(piece.shape):
                raise InputError(f"{self._where}: '{piece.name}' has shape {list(stored.shape)}, the model needs {list(piece.shape)}.")
            if piece.tensor.numel():
                self._fill(piece.name, stored, piece.box, piece.tensor)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """A tensor, or a box of it, in the dtype it was saved in."""
        stored = self._tensor(name)
        wanted = whole_box(stored.shape) if box is None else box
        if len(wanted) != len(stored.shape) or any(not 0 <= a <= b <= size for (a, b), size in zip(wanted, stored.shape, strict=True)):
            raise ValueError(f"box {wanted} is not inside of '{name}', whose shape is {list(stored.shape)}")
        result = torch.empty([stop - start for start, stop in wanted], dtype=self._dtype(name, stored))
        if result.numel():
            self._fill(name, stored, wanted, result)
        return result

    def size_bytes(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Bytes of a tensor, as saved or in another dtype."""
        stored = self._tensor(name)
        return (dtype or self._dtype(name, stored)).itemsize * math.prod(stored.shape)

    def verify_small(self) -> None:
        """Reads and compares all of a checkpoint that is not too large for one process; the ranks compare what they load of any."""
        if sum(self.manifest.files.values()) <= _SMALL_BYTES:
            self.verify()

    def verify(self) -> None:
        """Reads every byte and compares the checksums."""
        for name, stored in self.manifest.tensors.items():
            for piece in stored.pieces:
                self._read(name, piece, piece.box)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise InputError(f"{self._where} has no tensor '{name}'. {shorten(near_misses(name, self.manifest.tensors), 300)}")
        return self.manifest.tensors[name]

    def _dtype(self, name: str, stored: StoredTensor) -> torch.dtype:
        if stored.dtype not in _DTYPES:
            raise InputError(f"{self._where}: '{name}' is of dtype '{stored.dtype}'. {near_misses(stored.dtype, _DTYPES)}")
        return _DTYPES[stored.dtype]

    @torch.no_grad()
    def _fill(self, name: str, stored: StoredTensor, box: Box, target: torch.Tensor) -> None:
        for piece in stored.pieces:
            shared = intersection(piece.box, box)
            if shared is not None:
                target[_inside(shared, box)].copy_(self._read(name, piece, shared))

    def _read(self, name: str, piece: StoredPiece, box: Box) -> torch.Tensor:
        """A box of a piece; of a piece read as a whole the checksum is compared."""
        from safetensors import SafetensorError, safe_open

        try:
            if piece.file not in self._open:
                self._open[piece.file] = safe_open(self.path / piece.file, framework="pt")
            file = self._open[piece.file]
            found = file.get_slice(piece.key)
            if list(found.get_shape()) != [b - a for a, b in piece.box]:
                raise InputError(
                    f"{self._where}: '{piece.key}' in '{piece.file}' has shape {found.get_shape()}, not that of box {piece.box}."
                )
            part = file.get_tensor(piece.key) if box == piece.box else found[_inside(box, piece.box)]
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self._where}: '{piece.key}' cannot be read from '{piece.file}': {error}. Use an earlier checkpoint."
            ) from None
        if box == piece.box and checksum(tensor_bytes(part)) != piece.crc32:
            raise InputError(f"{self._where}: '{name}' in '{piece.file}' is damaged (its checksum differs). Use an earlier checkpoint.")
        return part


class PiecesInMemory:
    """Pieces of tensors from anywhere, a rank's own or received from others, read like a checkpoint: by boxes of the same tensors. Where
    several have the same values, the first given counts."""

    def __init__(self, pieces: Iterable[TensorPiece]) -> None:
        self._pieces: dict[str, dict[Box, torch.Tensor]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, {}).setdefault(piece.box, piece.tensor)

    @torch.no_grad()
    def load(self, pieces: Iterable[TensorPiece]) -> None:
        """Fills the pieces' tensors, whatever their dtype and device."""
        for piece in pieces:
            left = [piece.box] if piece.tensor.numel() else []
            for box, source in self._pieces.get(piece.name, {}).items():
                for part in left:
                    if (shared := intersection(box, part)) is not None:
                        piece.tensor[_inside(shared, piece.box)].copy_(source[_inside(shared, box)])
                if not (left := outside(left, [box])):
                    break
            if left:
                missing = sum(map(volume, left))
                raise ValueError(f"{missing} of {piece.tensor.numel()} values of '{piece.name}' {piece.box} are in no piece")


def _inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """The slices at which a box lies in the tensor of a box that covers it."""
    return tuple(slice(a - origin, b - origin) for (a, b), (origin, _) in zip(part, whole, strict=True))
