"""Where a rank's tensors lie in the global ones: tensor-parallel parts, fused weights divided part by part, flat ZeRO shards.

    whole qkv weight (rows)   | q0 q1 | k0 k1 | v0 v1 |        global, the order every plan agrees on
    rank 1 of tp 2            |   q1  |   k1  |   v1  |        local: three runs of rows
    ZeRO shard of it            ·····└──── flat ────┘··        elements [a, b) of the local tensor: a few boxes

Everything becomes pieces: a view of this rank's memory and the box of the global tensor it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from penstock.models.modules import OpModule, build_op
from penstock.models.ops import Model, PlacedOp
from penstock.models.stored import is_trained, stored_name
from penstock.runtime.checkpoints.manifest import Box, intersection, volume, whole_box

__all__ = [
    "BUFFERS",
    "WEIGHTS",
    "CheckpointLayout",
    "FlatRun",
    "TensorPiece",
    "optimizer_kinds",
    "own_share",
    "parameter_layout",
    "stored_shapes",
    "whole_layout",
]  # fmt: skip

WEIGHTS, BUFFERS = "weights", "buffers"
"""Kinds of tensors: a global name is `KIND/op.parameter`. Optimizers add kinds of their own (`exp_avg`)."""


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A tensor and the box of the global tensor that it is."""

    name: str
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box
    tensor: torch.Tensor
    """A view of the rank's own memory: saving reads it, loading fills it."""

    def __post_init__(self) -> None:
        sizes = tuple(stop - start for start, stop in self.box)
        if tuple(self.tensor.shape) != sizes or len(self.box) != len(self.shape):
            raise ValueError(f"{self.name} {list(self.shape)}: a tensor of shape {tuple(self.tensor.shape)} cannot be box {self.box}")

    @property
    def key(self) -> str:
        """The piece's name inside a file: that of its tensor, and where it begins unless it is the whole."""
        if self.box == whole_box(self.shape):
            return self.name
        return f"{self.name}@{','.join(str(start) for start, _ in self.box)}"


def optimizer_kinds(shapes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, bool]:
    """What an optimizer keeps of each weight, by names and global shapes of tensors, and whether that is one number, as a count of steps
    is: a weight of one number has moments of one number too, but those of other weights are tensors."""
    kinds: dict[str, bool] = {}
    for name, shape in shapes:
        kind = name.partition("/")[0]
        kinds[kind] = not len(shape) and kinds.get(kind, True)
    return {kind: is_number for kind, is_number in kinds.items() if kind not in (WEIGHTS, BUFFERS)}


@dataclass(frozen=True)
class FlatRun:
    """Neighbouring indices of one dimension, here and in the global tensor."""

    local: int
    place: int
    length: int


@dataclass(frozen=True)
class CheckpointLayout:
    """The boxes of a checkpoint's tensor that one local tensor of a rank holds."""

    name: str
    """`op.parameter`; a weight that ops share has the name of its owner."""
    shape: tuple[int, ...]
    """Of the global tensor."""
    runs: tuple[tuple[FlatRun, ...], ...]
    """For each dimension: the local tensor is the product of these."""
    kind: str = field(default=WEIGHTS, compare=False)
    """Of the tensor itself."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the tensor on this rank."""
        return tuple(sum(run.length for run in runs) for runs in self.runs)

    def pieces(self, tensor: torch.Tensor, kind: str = "") -> Iterator[TensorPiece]:
        """The pieces of a local tensor: the weight, or anything of its shape (a moment)."""
        if tuple(tensor.shape) != self.local_shape:
            raise ValueError(f"{self.name}: a tensor of shape {tuple(tensor.shape)}, {self.local_shape} was expected")
        for local, place in self._boxes():
            yield TensorPiece(f"{kind or self.kind}/{self.name}", self.shape, place, tensor[_slices(local)])

    def flat_pieces(self, flat: torch.Tensor, start: int, kind: str = "") -> Iterator[TensorPiece]:
        """The pieces of elements [start, start + len(flat)) of the local tensor laid flat, as sharded optimizers hold them."""
        stop = start + flat.numel()
        if flat.dim() != 1 or not 0 <= start <= stop <= math.prod(self.local_shape):
            raise ValueError(f"{self.name}: elements {start} to {stop} of a local tensor of shape {self.local_shape}")
        for at, block, inside, place in self._flat_places(start, stop):
            view = flat[at : at + volume(block)].view([b - a for a, b in block])
            yield TensorPiece(f"{kind or self.kind}/{self.name}", self.shape, place, view[_slices(inside)])

    def boxes(self, start: int | None = None, stop: int = 0) -> tuple[Box, ...]:
        """The boxes of the global tensor that the local one is, or that elements [start, stop) of it laid flat are."""
        if start is None:
            return tuple(place for _, place in self._boxes())
        return tuple(place for _, _, _, place in self._flat_places(start, stop))

    def _flat_places(self, start: int, stop: int) -> Iterator[tuple[int, Box, Box, Box]]:
        """(where a box of the local tensor begins after `start`, that box, a part of it counted from there, the global box it is)."""
        at = 0
        for block in _flat_boxes(self.local_shape, start, stop):
            for local, place in self._boxes():
                shared = intersection(block, local)
                if shared is None:
                    continue
                inside = tuple((a - origin, b - origin) for (a, b), (origin, _) in zip(shared, block, strict=True))
                moved = tuple((a - origin + to, b - origin + to) for (a, b), (origin, _), (to, _) in zip(shared, local, place, strict=True))
                yield at, block, inside, moved
            at += volume(block)

    def _boxes(self) -> Iterator[tuple[Box, Box]]:
        """(local box, global box) of every part."""
        for runs in product(*self.runs):
            yield (
                tuple((run.local, run.local + run.length) for run in runs),
                tuple((run.place, run.place + run.length) for run in runs),
            )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that elements [start, stop) of a row-major tensor form, in order: rest of a row, whole rows, begin of a row."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside of one row
        yield from (((last, last + 1), *box) for box in _flat_boxes(shape[1:], start - last * row, stop - last * row))
        return
    if start < first * row:
        yield from (((first - 1, first), *box) for box in _flat_boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield ((first, last), *whole_box(shape[1:]))
    if last * row < stop:
        yield from (((last, last + 1), *box) for box in _flat_boxes(shape[1:], 0, stop - last * row))


class _LightCat(TorchFunctionMode):
    """Concatenates repeated values without writing them out, so that asking a shard for its indices costs one row or column."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.cat:
            return func(*args, **(kwargs or {}))
        parts, dim = args[0], args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
        repeated = [d != dim and parts[0].stride(d) == 0 for d in range(parts[0].dim())]
        narrow = func([part[tuple(slice(0, 1) if r else slice(None) for r in repeated)] for part in parts], dim)
        return narrow.expand([parts[0].shape[d] if r else narrow.shape[d] for d, r in enumerate(repeated)])


def _runs(module: OpModule, parameter: str) -> tuple[tuple[FlatRun, ...], ...]:
    """Asks the op's own cut: it is given the indices of each dimension in place of the weight."""
    shape, shard = module.whole_shapes[parameter], module.shards[parameter]
    if shard is None:
        return tuple((FlatRun(0, 0, size),) for size in shape)
    found = []
    for dim, size in enumerate(shape):
        index = torch.arange(size).view([size if d == dim else 1 for d in range(len(shape))]).expand(shape)
        with _LightCat():
            part = shard(index)
        if part.numel() == 0:
            return tuple(() for _ in shape)
        found.append(_neighbours(part[tuple(slice(None) if d == dim else 0 for d in range(len(shape)))].tolist()))
    return tuple(found)


def _neighbours(indices: Sequence[int]) -> tuple[FlatRun, ...]:
    starts = [0, *(i for i in range(1, len(indices)) if indices[i] != indices[i - 1] + 1), len(indices)]
    return tuple(FlatRun(a, indices[a], b - a) for a, b in pairwise(starts))


def parameter_layout(module: OpModule, name: str, *, known: dict[Any, Any] | None = None) -> CheckpointLayout:
    """The layout of an op's parameter; `known` remembers how ops of one kind are cut."""
    known = {} if known is None else known
    cut = (module.op.signature, name, module.algo, module.tp.rank, module.tp.size)
    if cut not in known:
        known[cut] = _runs(module, name)
    return CheckpointLayout(stored_name(PlacedOp(0, module.name, "", module.op), name), module.whole_shapes[name], known[cut])


def whole_layout(name: str, shape: Sequence[int], kind: str = WEIGHTS) -> CheckpointLayout:
    """The layout of a tensor that every rank has whole."""
    return CheckpointLayout(name, tuple(shape), tuple((FlatRun(0, 0, size),) for size in shape), kind=kind)


def stored_shapes(model: Model, kinds: Sequence[str] = (WEIGHTS,), scalars: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """Name and shape of every global tensor that a checkpoint of the model has: its buffers, its weights, what the optimizer keeps.

    `kinds` have the weights' shapes, `scalars` are one number for each trained weight.
    """
    built = {op.signature: build_op(PlacedOp(0, op.name, "", op), device="meta") for op in model.distinct_ops}
    found: dict[str, tuple[int, ...]] = {}
    seen: set[str] = set()
    for placed in model.ops:
        module = built[placed.op.signature]
        for name, shape in module.whole_shapes.items():
            stored, trained = stored_name(placed, name), is_trained(placed.op, name)
            if stored in seen:
                continue  # shared with an op before, whose it is
            seen.add(stored)
            found |= {f"{kind}/{stored}": shape for kind in kinds if kind == WEIGHTS or trained}
            found |= {f"{kind}/{stored}": () for kind in scalars if trained}
        found |= {f"{BUFFERS}/{stored_name(placed, name)}": tuple(buffer.shape) for name, buffer in module.named_buffers(recurse=False)}
    return found


def own_share(sizes: Sequence[int], index: int, count: int) -> list[int]:
    """Which of some tensors (their sizes given) rank `index` saves of `count` ranks that hold them alike: about equal bytes for each."""
    loads = [(0, holder) for holder in range(count)]
    mine = []
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        load, holder = heapq.heappop(loads)
        heapq.heappush(loads, (load + sizes[number], holder))
        if holder == index:
            mine.append(number)
    return sorted(mine)
