"""What the checker finds, and how it is shown: the schedule as a grid with the bad step marked, and the instructions around it.

rank 0 │  0F0   0F1   0B0   0B1
rank 1 │  1F0  [1B0]  1F1   1B1

rank 1, instruction 5: …
    4  free b2 b0
  → 5  backward s1 m0 result b2 hidden:fp32[24x64]
    6  send-start gradient c0 m0 to 0 b2 hidden:fp32[24x64]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import plural
from penstock.programs import instructions as i
from penstock.programs.text import format_instruction

__all__ = ["Problem", "grid", "passes", "picture"]

_LETTERS: dict[type, str] = {i.Forward: "F", i.Backward: "B", i.BackwardInput: "I", i.BackwardWeight: "W"}
_COLUMNS = 16
_RANKS = 16
_AROUND = 3


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    rank: int
    """-1: with the programs together."""
    index: int
    """Which instruction of the rank; -1: none in particular."""
    text: str

    def __str__(self) -> str:
        if self.rank < 0:
            return self.text
        step = f", instruction {self.index}" if self.index >= 0 else ""
        return f"rank {self.rank}{step}: {self.text}"


def passes(program: i.Program) -> list[tuple[int, str]]:
    """(instruction, text such as `1F0`) of each pass."""
    steps = enumerate(program.instructions)
    return [(at, f"{step.stage}{_LETTERS[type(step)]}{step.micro_batch}") for at, step in steps if type(step) in _LETTERS]  # type: ignore[union-attr]


def grid(programs: Sequence[i.Program], problem: Problem) -> str:
    """The passes of each rank in order; the one at or next after the problem's instruction in brackets."""
    rows = {program.rank: passes(program) for program in programs}
    marked = next((place for place, (at, _) in enumerate(rows.get(problem.rank, ())) if at >= problem.index), None)
    if marked is None and rows.get(problem.rank):
        marked = len(rows[problem.rank]) - 1
    first = max(0, (marked or 0) - _COLUMNS // 2)
    shown = sorted(rows)
    if len(shown) > _RANKS and problem.rank in rows:
        start = max(0, min(shown.index(problem.rank) - _RANKS // 2, len(shown) - _RANKS))
        shown = shown[start : start + _RANKS]
    shown = shown[:_RANKS]
    width = max((len(text) for rank in shown for _, text in rows[rank]), default=0)
    label = max((len(str(rank)) for rank in shown), default=1)
    lines = []
    for rank in shown:
        cells = []
        for place, (_, text) in list(enumerate(rows[rank]))[first : first + _COLUMNS]:
            here = rank == problem.rank and place == marked and problem.index >= 0
            cells.append(f"[{text}]".center(width + 2) if here else f" {text} ".center(width + 2))
        more = (" … " if first else "", " …" if len(rows[rank]) > first + _COLUMNS else "")
        lines.append(f"rank {rank:>{label}} │{more[0]}{' '.join(cells)}{more[1]}".rstrip())
    if len(shown) < len(rows):
        lines.append(f"({plural(len(rows) - len(shown), 'more rank')})")
    return "\n".join(lines)


def picture(programs: Sequence[i.Program], problem: Problem) -> str:
    """The grid, the problem, and the instructions around it."""
    lines = [grid(programs, problem), "", str(problem)]
    steps = next((program.instructions for program in programs if program.rank == problem.rank), ())
    if problem.index >= 0 and steps:
        for at in range(max(0, problem.index - _AROUND), min(len(steps), problem.index + _AROUND + 1)):
            lines.append(f"  {'→' if at == problem.index else ' '} {at:>4}  {format_instruction(steps[at])}")
    return "\n".join(lines)
