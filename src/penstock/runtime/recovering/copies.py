"""Copies of what each rank has learned, in memory that outlives it: the launcher holds them, and a rank's successor reads them.

    process 0   slot 0: step 40   slot 1: step 50        a rank writes over the older of its two slots, so that one step is always whole:
    process 1   slot 0: step 40   slot 1: (writing)      here step 40, until process 1 is done

Pieces lie by the names and boxes of checkpoints, each part of a tensor once over all ranks: any plan can go on from them.
"""

from __future__ import annotations

import mmap
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.processes.shared_memory import SharedMemory
from penstock.runtime.checkpoints.files import DTYPE_NAMES
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, TensorPiece
from penstock.runtime.checkpoints.manifest import Box
from penstock.runtime.checkpoints.reader import PiecesInMemory
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import TrainedState

__all__ = ["SLOTS", "Copies", "CopyPlace"]

SLOTS = 2
"""Copies of each process, of which one is whole while the other is written."""
_SLOT_BYTES = 1 << 40
"""Of addresses, not of memory: where nothing is written, there is none."""
_HEAD = struct.Struct("<qqqqq")
"""Steps behind it and one more (0: nothing, or not whole), generation, place, how many places, bytes of the description."""
_ALIGNED = 64
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class CopyPlace(NamedTuple):
    """Whose copy it is: a rank's place among those that have work, in a numbered generation of process groups."""

    generation: int
    place: int
    count: int


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a tensor in a slot."""

    name: str
    shape: tuple[int, ...]
    box: Box
    dtype: str
    offset: int


class _Description(msgspec.Struct, frozen=True):
    """What is in a slot."""

    pieces: list[_Piece]
    state: dict[str, Any]


class Copies:
    """The copies of a job of `num_processes` on one machine; made by its launcher, who gives it to each process that it starts."""

    def __init__(self, num_processes: int, memory: SharedMemory | None = None) -> None:
        self.num_processes = num_processes
        self._memory = memory or SharedMemory(num_processes * SLOTS * _SLOT_BYTES)
        self._maps: dict[int, mmap.mmap] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Copies, (self.num_processes, self._memory)

    def close(self) -> None:
        """Lets go of them here."""
        self._maps.clear()
        self._memory.close()

    def save(self, process: int, step: int, whose: CopyPlace, pieces: Iterable[TensorPiece], state: Mapping[str, Any]) -> int:
        """Copies what a process has learned that has `step` steps behind it; the bytes. Until it returns, the copy before it is the newest.
        `state` is that of a checkpoint."""
        found = list(pieces)
        offsets, size = _places(found)
        head = [_Piece(one.name, tuple(one.shape), one.box, DTYPE_NAMES[one.tensor.dtype], at)
                for one, at in zip(found, offsets, strict=True)]  # fmt: skip
        description = msgspec.json.encode(_Description(head, msgspec.to_builtins(dict(state), str_keys=True)))
        slot = min(self._slots(process), key=lambda slot: self._head(slot)[0])
        begin = _aligned(_HEAD.size + len(description))
        memory = self._mapped(slot, begin + size)
        _HEAD.pack_into(memory, 0, 0, *whose, len(description))
        memory[_HEAD.size : _HEAD.size + len(description)] = description
        for piece, at in zip(found, offsets, strict=True):
            _view(memory, piece.tensor.dtype, begin + at, tuple(piece.tensor.shape)).copy_(piece.tensor.detach())
        struct.pack_into("<q", memory, 0, step + 1)  # the last: a process that is killed before it has left nothing here
        return begin + size

    def newest(self, before: int) -> int | None:
        """The newest step below `before` of which every rank has left its copy."""
        return max((step for step, _ in self._whole() if step < before), default=None)

    def keep(self, step: int | None) -> None:
        """Forgets the copies of all other steps, to which training does not go back; no process may be writing."""
        for slot in range(self.num_processes * SLOTS):
            if step is None or self._head(slot)[0] != step + 1:
                self._memory.write(slot * _SLOT_BYTES, _HEAD.pack(0, 0, 0, 0, 0))

    def state(self, step: int) -> TrainedState:
        """What all ranks together had learned after so many steps."""
        pieces, state = self._copied(step)
        kinds = {one.name.partition("/")[0]: one.shape == () for one in pieces if not one.name.startswith((f"{WEIGHTS}/", f"{BUFFERS}/"))}
        numbers = frozenset(kind for kind, is_number in kinds.items() if is_number)
        return TrainedState(PiecesInMemory(pieces), tuple(kinds), numbers, state.get("loss_scale"))

    def write_checkpoint(self, step: int, writer: CheckpointWriter) -> None:
        """Writes them down as a checkpoint, for a job that cannot go on."""
        writer.save(step, *self._copied(step))
        writer.wait()

    def _copied(self, step: int) -> tuple[list[TensorPiece], dict[str, Any]]:
        """The pieces of all ranks after a step that is whole, in the order of their places, and the first one's state."""
        slots = next(slots for whole, slots in self._whole() if whole == step)
        described = [(slot, self._described(slot)) for slot in slots]
        return [piece for slot, one in described for piece in self._pieces(slot, one)], described[0][1].state

    def _whole(self) -> Iterator[tuple[int, Sequence[int]]]:
        """(step, slots) of each step whose copies are complete."""
        found: defaultdict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
        for slot in range(self.num_processes * SLOTS):
            marked, generation, place, count, _ = self._head(slot)
            if marked:
                found[marked - 1, generation, count][place] = slot
        for (step, _, count), slots in found.items():
            if len(slots) == count:
                yield step, [slots[place] for place in range(count)]

    def _slots(self, process: int) -> range:
        return range(process * SLOTS, (process + 1) * SLOTS)

    def _head(self, slot: int) -> tuple[int, int, int, int, int]:
        step, generation, place, count, described = _HEAD.unpack(self._memory.read(slot * _SLOT_BYTES, _HEAD.size))
        return step, generation, place, count, described

    def _described(self, slot: int) -> _Description:
        return msgspec.json.decode(self._memory.read(slot * _SLOT_BYTES + _HEAD.size, self._head(slot)[4]), type=_Description)

    def _pieces(self, slot: int, found: _Description) -> Iterator[TensorPiece]:
        begin = _aligned(_HEAD.size + self._head(slot)[4])
        sizes = [[stop - start for start, stop in one.box] for one in found.pieces]
        ends = [one.offset + _num_bytes(size, _DTYPES[one.dtype]) for one, size in zip(found.pieces, sizes, strict=True)]
        memory = self._mapped(slot, begin + max(ends, default=0))
        for one, size in zip(found.pieces, sizes, strict=True):
            yield TensorPiece(one.name, one.shape, one.box, _view(memory, _DTYPES[one.dtype], begin + one.offset, tuple(size)))

    def _mapped(self, slot: int, size: int) -> mmap.mmap:
        """A slot as memory, mapped again only where it has grown: touching each page anew costs as much as copying."""
        memory = self._maps.get(slot)
        if memory is None or len(memory) < size:
            memory = self._maps[slot] = self._memory.mapped(slot * _SLOT_BYTES, size)
        return memory


def _places(pieces: Sequence[TensorPiece]) -> tuple[list[int], int]:
    """Where the bytes of each piece begin, and where the last end."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end = _aligned(end + piece.tensor.nbytes)
    return offsets, end


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _view(memory: mmap.mmap, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if not count:  # torch takes no empty part of a buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
