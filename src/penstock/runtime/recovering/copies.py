"""Copies of what each rank has learned, in memory that outlives it: the launcher holds them, and a rank's successor reads them.

    process 0   slot 0: step 40   slot 1: step 50        a rank writes over the older of its two slots, so that one step is always whole:
    process 1   slot 0: step 40   slot 1: (writing)      here step 40, until process 1 is done

Pieces lie by the names and boxes of checkpoints, each part of a tensor once over all ranks: any plan can go on from them.
"""

from __future__ import annotations

import mmap
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch

from penstock.processes.shared_memory import SharedMemory
from penstock.runtime.checkpoints.files import DTYPE_NAMES
from penstock.runtime.checkpoints.layout import TensorPiece, optimizer_kinds
from penstock.runtime.checkpoints.manifest import Box
from penstock.runtime.checkpoints.reader import PiecesInMemory
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import TrainedState

__all__ = ["SLOTS", "Copies", "CopyPlace", "SlotHead", "whole_copies"]

SLOTS = 2
"""Copies of each process, of which one is whole while the other is written."""
_SLOT_BYTES = 1 << 40
"""Of addresses, not of memory: where nothing is written, there is none."""
_HEAD = struct.Struct("<qqqqqqq")
"""Steps behind it and one more (0: nothing, or not whole), generation, place, how many places, bytes of the description, bytes in all; and
the first of these once more when the copy is at another node too."""
_ELSEWHERE = _HEAD.size - 8
_ALIGNED = 64
_PART_BYTES = 1 << 22
"""In which copies travel."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class CopyPlace(NamedTuple):
    """Whose copy it is: a rank's place among those that have work, in a numbered generation of process groups."""

    generation: int
    place: int
    count: int


class SlotHead(NamedTuple):
    """What a slot holds."""

    marked: int
    generation: int = 0
    place: int = 0
    count: int = 0
    described: int = 0
    size: int = 0
    elsewhere: int = 0

    @property
    def step(self) -> int:
        """Steps behind it; -1: nothing, or not whole."""
        return self.marked - 1

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is at another node too."""
        return self.marked == self.elsewhere


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
    """The copies of a job of `num_processes` that are on one machine; made by its launcher, who gives it to each process that it starts.
    Those of several machines keep them for each other (`mirrored`): a copy is safe once it is elsewhere too."""

    HEAD_BYTES = _HEAD.size

    def __init__(self, num_processes: int, memory: SharedMemory | None = None, *, mirrored: bool = False) -> None:
        self.num_processes, self.mirrored = num_processes, mirrored
        self._memory = memory or SharedMemory(num_processes * SLOTS * _SLOT_BYTES)
        self._maps: dict[int, mmap.mmap] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _handed, (self.num_processes, self._memory, self.mirrored)

    def close(self) -> None:
        """Lets go of them here."""
        self._maps.clear()
        self._memory.close()

    def save(
        self, process: int, step: int, whose: CopyPlace, pieces: Iterable[TensorPiece], state: Mapping[str, Any], *, keep: int = -1
    ) -> int:
        """Copies what a process has learned that has `step` steps behind it; the bytes. Until it returns, the copy before it is the newest;
        that of step `keep` stays. `state` is that of a checkpoint."""
        found = list(pieces)
        offsets, size = _places(found)
        head = [_Piece(one.name, tuple(one.shape), one.box, DTYPE_NAMES[one.tensor.dtype], at)
                for one, at in zip(found, offsets, strict=True)]  # fmt: skip
        description = msgspec.json.encode(_Description(head, msgspec.to_builtins(dict(state), str_keys=True)))
        slot = min(self.slots(process), key=lambda slot: (self.head(slot).step == keep >= 0, self.head(slot).marked))
        begin = _aligned(_HEAD.size + len(description))
        memory = self._mapped(slot, begin + size)
        _HEAD.pack_into(memory, 0, 0, *whose, len(description), begin + size, 0)
        memory[_HEAD.size : _HEAD.size + len(description)] = description
        for piece, at in zip(found, offsets, strict=True):
            _view(memory, piece.tensor.dtype, begin + at, tuple(piece.tensor.shape)).copy_(piece.tensor.detach())
        struct.pack_into("<q", memory, 0, step + 1)  # the last: a process that is killed before it has left nothing here
        return begin + size

    def safe_step(self, process: int) -> int:
        """The newest step of which a process has a copy that outlives it, and its machine if there are others; -1: none."""
        return max(head.step if head.is_elsewhere or not self.mirrored else -1 for head in map(self.head, self.slots(process)))

    def newest(self, before: int) -> int | None:
        """The newest step below `before` of which every rank has left its copy."""
        return max((step for step, _ in self._whole() if step < before), default=None)

    def go_back(self, step: int | None) -> None:
        """Forgets the copies of later steps than that to which training goes back, or all; no process may be writing. Older ones stay until
        they are written over: a part of the copies of this step may yet be lost with its node."""
        for slot in range(self.num_processes * SLOTS):
            if step is None or self.head(slot).step > step:
                self._memory.write(slot * _SLOT_BYTES, bytes(_HEAD.size))

    def held(self) -> Iterator[tuple[int, SlotHead]]:
        """Each whole copy that is here, and the slot it is in."""
        for slot in range(self.num_processes * SLOTS):
            if (head := self.head(slot)).marked:
                yield slot, head

    def mirrored_elsewhere(self, slot: int, head: SlotHead) -> None:
        """Notes that another node has this copy. One that was begun in its slot since then is not meant."""
        self._memory.write(slot * _SLOT_BYTES + _ELSEWHERE, struct.pack("<q", head.marked))

    def read(self, slot: int, head: SlotHead) -> Iterator[bytes]:
        """The bytes of a copy, part by part, behind its head. Whoever takes them looks at the head again afterwards: another copy may have
        been begun there."""
        for offset in range(_HEAD.size, head.size, _PART_BYTES):
            yield self._memory.read(slot * _SLOT_BYTES + offset, min(_PART_BYTES, head.size - offset))

    @contextmanager
    def written(self, slot: int, head: SlotHead) -> Iterator[Callable[[bytes], None]]:
        """Takes a copy of another node, part by part; it counts once all of it has come. (`elsewhere`: it came from there.)"""
        memory, offset = self._memory, _HEAD.size
        memory.write(slot * _SLOT_BYTES, _HEAD.pack(*head._replace(marked=0, elsewhere=head.marked)))

        def write(part: bytes) -> None:
            nonlocal offset
            memory.write(slot * _SLOT_BYTES + offset, part)
            offset += len(part)

        yield write
        if offset == head.size:
            memory.write(slot * _SLOT_BYTES, struct.pack("<q", head.marked))

    def state(self, step: int) -> TrainedState:
        """The state of all ranks together after so many steps."""
        pieces, state = self._copied(step)
        kinds = optimizer_kinds((one.name, one.shape) for one in pieces)
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
        return whole_copies((slot, head.step, head.generation, head.place, head.count) for slot, head in self.held())

    def slots(self, process: int) -> range:
        """The slots that belong to one process."""
        return range(process * SLOTS, (process + 1) * SLOTS)

    def head(self, slot: int) -> SlotHead:
        """What is in a slot."""
        return SlotHead(*_HEAD.unpack(self._memory.read(slot * _SLOT_BYTES, _HEAD.size)))

    def _described(self, slot: int) -> _Description:
        return msgspec.json.decode(self._memory.read(slot * _SLOT_BYTES + _HEAD.size, self.head(slot).described), type=_Description)

    def _pieces(self, slot: int, found: _Description) -> Iterator[TensorPiece]:
        begin = _aligned(_HEAD.size + self.head(slot).described)
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


def whole_copies(held: Iterable[tuple[int, int, int, int, int]]) -> Iterator[tuple[int, Sequence[int]]]:
    """(step, slots) of each step whose copies are complete, of copies by (slot, step, generation, place, places)."""
    found: defaultdict[tuple[int, int, int], dict[int, int]] = defaultdict(dict)
    for slot, step, generation, place, count in held:
        found[step, generation, count][place] = slot
    for (step, _, count), slots in found.items():
        if len(slots) == count:
            yield step, [slots[place] for place in range(count)]


def _handed(num_processes: int, memory: SharedMemory, mirrored: bool) -> Copies:
    return Copies(num_processes, memory, mirrored=mirrored)


def _places(pieces: Sequence[TensorPiece]) -> tuple[list[int], int]:
    """Offsets of the pieces' bytes, and the size of all."""
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
