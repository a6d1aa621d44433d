"""Where each rank is: a few numbers in a file mapped into memory, which outlive a process that is killed."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from penstock.programs.instructions import INSTRUCTIONS, Program, stage_of

__all__ = ["Status", "StatusBoard"]

_NAMES = {kind: number for number, kind in enumerate(INSTRUCTIONS)}
_SLOT = struct.Struct("qqqqqq")
"""Iteration, instruction, how many, kind, stage, micro-batch; -1 where there is none."""
_SIZE = 64
_ASKED = struct.Struct("q")
"""After the ranks: the signal that asks them to end."""


class StatusBoard:
    """The launcher's view of all ranks."""

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.path, self.num_ranks = path, num_ranks
        path.write_bytes(_SLOT.pack(-1, -1, 0, -1, -1, -1).ljust(_SIZE, b"\0") * num_ranks + _ASKED.pack(0))

    def ask_to_end(self, number: int) -> None:
        """Tells all ranks of a signal after which they are to end."""
        with self.path.open("r+b") as file:
            file.seek(self.num_ranks * _SIZE)
            file.write(_ASKED.pack(number))

    def where(self, rank: int) -> str:
        """`at Forward of stage 1, micro-batch 2 (iteration 3, instruction 17 of 40)`."""
        data = self.path.read_bytes()[rank * _SIZE : rank * _SIZE + _SLOT.size]
        iteration, index, count, kind, stage, micro_batch = _SLOT.unpack(data)
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

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
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
        """It has run; after the last one the rank is between iterations."""
        if index + 1 == self._count:
            _SLOT.pack_into(self._map, self._offset, self._iteration, -1, self._count, -1, -1, -1)
