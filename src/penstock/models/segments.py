"""Which ops of a slice belong together: those of one block, and those that are recomputed as one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from penstock.models.ops import Model, PlacedOp

__all__ = ["Piece", "Segment", "pieces", "segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions `start` to `stop` of a slice of the chain, run plainly or recomputed as one."""

    start: int
    stop: int
    recomputed: bool


def segments(places: Sequence[PlacedOp], recompute: Collection[int]) -> list[Segment]:
    """Splits a slice of the chain into plain runs and recomputed segments; `recompute` holds positions in the slice.

    Neighbours that are both recomputed share a segment, but a segment never reaches into the next block: it would have to
    hold the insides of both at once.
    """
    found: list[Segment] = []
    done = 0
    for index in sorted(set(recompute)):
        last = found[-1] if found else None
        if last is not None and last.recomputed and last.stop == index and _same_block(places[index - 1], places[index]):
            found[-1] = Segment(last.start, index + 1, True)
        else:
            found += [Segment(done, index, False)] if index > done else []
            found.append(Segment(index, index + 1, True))
        done = index + 1
    return [*found, Segment(done, len(places), False)] if done < len(places) else found


def _same_block(a: PlacedOp, b: PlacedOp) -> bool:
    return a.copy == b.copy and a.block == b.block


@dataclass(frozen=True, slots=True)
class Piece:
    """Ops `start` to `stop` of the chain, all of one copy of a block."""

    start: int
    stop: int
    likeness: tuple[int, int, int, bool]
    """Equal for pieces of equal ops that follow equal ops."""


def pieces(model: Model, start: int, stop: int) -> Iterator[Piece]:
    """The slice block by block; long chains repeat few blocks, so that work done once for each likeness serves them all."""
    first = 0
    for number, (block, copies) in enumerate(model.runs):
        size = len(block.ops)
        for copy in range(max((start - first) // size, 0), min(-(-(stop - first) // size), copies)) if size else ():
            at = first + copy * size
            a, b = max(start - at, 0), min(stop - at, size)
            if a < b:
                yield Piece(at + a, at + b, (number, a, b, copy > 0 or a > 0))
        first += size * copies
