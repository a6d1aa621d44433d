"""What the checker finds: a rank, an instruction, and what is wrong there."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]


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
