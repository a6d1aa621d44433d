"""What a checkpoint's manifest says: which file holds which box of which global tensor, and the run's state beside them.

A *box* is [start, stop) along each dimension of a global tensor, so a checkpoint knows nothing of the plan that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from penstock.errors import InputError

__all__ = [
    "FORMAT", "MANIFEST", "VERSION", "Box", "CheckpointManifest", "RankPart", "StoredPiece", "StoredTensor", "cover_problem",
    "decode_manifest", "intersection", "merge_parts", "outside", "volume", "whole_box",
]  # fmt: skip

FORMAT, VERSION = "penstock checkpoint", 1
MANIFEST = "manifest.json"

Box = tuple[tuple[int, int], ...]
"""[start, stop) along each dimension."""


def whole_box(shape: Sequence[int]) -> Box:
    """The box that is the tensor itself."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box."""
    return math.prod(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None if they share nothing."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def outside(region: Iterable[Box], other: Sequence[Box]) -> list[Box]:
    """The part of a region that `other` does not cover.

    >>> outside([((0, 4), (0, 4))], [((1, 2), (1, 4))])
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (0, 1))]
    """
    left = list(region)
    for hole in other:
        left = [part for box in left for part in _without(box, hole)]
    return left


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """A box less a hole: along each dimension in turn what lies before and after it."""
    shared = intersection(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                yield (*shared[:dim], part, *box[dim + 1 :])


class StoredPiece(msgspec.Struct, frozen=True):
    """One box of a tensor in one file."""

    file: str
    key: str
    """Name inside the safetensors file."""
    box: Box
    crc32: int
    """Of its bytes."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A global tensor; its pieces cover it without overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


class RankPart(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint: its file, that file's size, and its pieces (one each) by tensor name."""

    rank: int
    step: int
    file: str
    size_bytes: int
    tensors: list[tuple[str, StoredTensor]]


class CheckpointManifest(msgspec.Struct, frozen=True):
    """A whole checkpoint."""

    step: int
    """Training steps done."""
    state: dict[str, Any]
    """What the run needs besides tensors: data position, seeds, optimizer steps, loss scale."""
    files: dict[str, int]
    """Size in bytes of each file."""
    tensors: dict[str, StoredTensor]
    format: str = FORMAT
    version: int = VERSION


def merge_parts(step: int, state: dict[str, Any], parts: Iterable[RankPart]) -> CheckpointManifest:
    """The manifest of what all ranks wrote; a box that several ranks wrote is taken from the first. Holes and overlaps are refused."""
    files: dict[str, int] = {}
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, dict[Box, StoredPiece]] = {}
    for part in sorted(parts, key=lambda part: part.rank):
        files[part.file] = part.size_bytes
        for name, tensor in part.tensors:
            head = heads.setdefault(name, (tensor.dtype, tensor.shape))
            if head != (tensor.dtype, tensor.shape):
                raise ValueError(
                    f"tensor '{name}' is {head[0]} {list(head[1])} on one rank and {tensor.dtype} {list(tensor.shape)} on rank {part.rank}"
                )
            for piece in tensor.pieces:
                pieces.setdefault(name, {}).setdefault(piece.box, piece)
    tensors = {name: StoredTensor(dtype, shape, tuple(pieces.get(name, {}).values())) for name, (dtype, shape) in heads.items()}
    for name, tensor in tensors.items():
        problem = cover_problem(tensor.shape, [piece.box for piece in tensor.pieces])
        if problem:
            raise ValueError(f"tensor '{name}' of shape {list(tensor.shape)}: {problem}")
    return CheckpointManifest(step, state, files, tensors)


def cover_problem(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Why the boxes do not cover the shape exactly once; empty if they do."""
    whole = whole_box(shape)
    for box in boxes:
        if len(box) != len(whole) or any(not 0 <= start < stop <= end for (start, stop), (_, end) in zip(box, whole, strict=True)):
            return f"box {_text(box)} is not inside of it"
    missing = volume(whole) - sum(volume(box) for box in boxes)
    if missing > 0:
        return f"{missing} of its {volume(whole)} elements are in no piece"
    if not shape:
        return "" if len(boxes) == 1 else "it is there more than once"
    active: list[Box] = []
    for box in sorted(boxes):  # by first row: only those that reach past it can still meet
        active = [other for other in active if other[0][1] > box[0][0]]
        for other in active:
            if intersection(box, other):
                return f"pieces {_text(other)} and {_text(box)} overlap"
        active.append(box)
    return ""


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """The manifest in `data`, every field checked: what it names is inside its own folder, and its tensors are whole."""
    try:
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
    except (msgspec.DecodeError, RecursionError) as error:  # a ValidationError is a DecodeError
        raise InputError(f"{where} cannot be read: {error}.") from None
    if manifest.format != FORMAT or manifest.version != VERSION:
        raise InputError(f"{where} is '{manifest.format}' version {manifest.version}; this is a reader of '{FORMAT}' version {VERSION}.")
    if manifest.step < 0:
        raise InputError(f"{where} says that it has {manifest.step} steps behind it. Use an earlier checkpoint.")
    for file in manifest.files:
        if not file.endswith(".safetensors") or "/" in file or "\\" in file or file.startswith("."):
            raise InputError(f"{where} names the file '{file}'; a .safetensors file of its own folder was expected.")
    for name, tensor in manifest.tensors.items():
        unknown = [piece.file for piece in tensor.pieces if piece.file not in manifest.files]
        problem = f"'{unknown[0]}' is not among its files" if unknown else _shape_problem(tensor)
        if problem:
            raise InputError(f"{where}: tensor '{name}' of shape {list(tensor.shape)}: {problem}. Use an earlier checkpoint.")
    return manifest


def _shape_problem(tensor: StoredTensor) -> str:
    if any(size < 0 for size in tensor.shape):
        return "a size is below 0"
    return cover_problem(tensor.shape, [piece.box for piece in tensor.pieces])
