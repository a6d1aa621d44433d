"""Where each rank is: a few numbers in shared memory, which outlive a process that is killed."""

from __future__ import annotations

import struct

from penstock.processes.shared_memory import SharedMemory
from penstock.programs.instructions import (
    INSTRUCTIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Load,
    Program,
    stage_of,
)  # fmt: skip

__all__ = ["Status", "StatusBoard"]

_NAMES = {kind: number for number, kind in enumerate(INSTRUCTIONS)}
_SLOT = struct.Struct("qqqqqq")
"""Iteration, instruction, how many, kind, stage, micro-batch; -1 where there is none."""
_SIZE = 64
_ASKED = struct.Struct("q")
"""After the ranks: the signal that asks them to end."""


_PASSES = [_NAMES[kind] for kind in (Load, Forward, Backward, BackwardInput, BackwardWeight)]
_NOWHERE = _SLOT.pack(-1, -1, 0, -1, -1, -1)


class StatusBoard:
    """The launcher's view of all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.memory = SharedMemory(num_ranks * _SIZE + _ASKED.size)
        """For the ranks."""
        self.clear()

    def clear(self) -> None:
        """No rank has begun."""
        self.memory.write(0, _NOWHERE.ljust(_SIZE, b"\0") * self.num_ranks)

    def ask_to_end(self, number: int) -> None:
        """Tells all ranks of a signal after which they are to end."""
        self.memory.write(self.num_ranks * _SIZE, _ASKED.pack(number))

    def position(self, rank: int) -> tuple[tuple[int, int], bool]:
        """Iteration and instruction at which a rank is, and whether it computes there, and waits for nobody."""
        iteration, index, _, kind, _, _ = _SLOT.unpack(self.memory.read(rank * _SIZE, _SLOT.size))
        return (iteration, index), kind in _PASSES

    def where(self, rank: int) -> str:
        """`at Forward of stage 1, micro-batch 2 (iteration 3, instruction 17 of 40)`."""
        iteration, index, count, kind, stage, micro_batch = _SLOT.unpack(self.memory.read(rank * _SIZE, _SLOT.size))
        if iteration < 0:
            return "before its first program"
        if index < 0:
            return f"after iteration {iteration}"
        where = [f"stage {stage}"] if stage >= 0 else []
        where += [f"micro-batch {micro_batch}"] if micro_batch >= 0 else []
        of = f" of {', '.join(where)}" if where else ""
        return f"at {INSTRUCTIONS[kind].__name__}{of} (iteration {iteration}, instruction {index} of {count})"


class Status:
    """One rank's side of the board: an executor's observer."""

    def __init__(self, memory: SharedMemory, rank: int) -> None:
        self._map = memory.mapped()
        self._offset = rank * _SIZE
        self._program: Program | None = None

    def asked_to_end(self) -> int:
        """The signal after which the launcher wants the run to end; 0: none."""
        number: int = _ASKED.unpack_from(self._map, len(self._map) - _ASKED.size)[0]
        return number

    def begin(self, program: Program) -> None:
        """A program is about to run."""
        self._program = program
        self._instructions, self._count, self._iteration = program.instructions, len(program.instructions), program.iteration

    def at(self, index: int) -> None:
        """An instruction is about to run."""
        step = self._instructions[index]
        micro = getattr(step, "micro_batch", None)
        _SLOT.pack_into(
            self._map, self._offset, self._iteration, index, self._count, _NAMES[type(step)], stage_of(step), -1 if micro is None else micro
        )

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """An instruction has run; after the last one the rank is between iterations."""
        if index + 1 == self._count:
            _SLOT.pack_into(self._map, self._offset, self._iteration, -1, self._count, -1, -1, -1)
