"""Which ops are recomputed together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from penstock.models.ops import PlacedOp

__all__ = ["Segment", "segments"]


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
    flags = set(recompute)
    found: list[Segment] = []
    for index, place in enumerate(places):
        again = index in flags
        last = found[-1] if found else None
        same_block = index > 0 and (places[index - 1].block, places[index - 1].copy) == (place.block, place.copy)
        if last is not None and last.recomputed == again and (not again or same_block):
            found[-1] = Segment(last.start, index + 1, again)
        else:
            found.append(Segment(index, index + 1, again))
    return found
