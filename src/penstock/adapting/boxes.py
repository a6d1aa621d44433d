"""Regions of a global tensor as boxes that do not overlap: their union, and boxes of bounded size."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.runtime.checkpoints.manifest import Box, outside, volume

__all__ = ["Region", "chopped", "union"]

Region = tuple[Box, ...]
"""Boxes that do not overlap."""


def union(one: Region, other: Region) -> Region:
    """Both regions, what they share counted once."""
    return (*one, *outside(other, one)) if one != other else one


def chopped(box: Box, most: int) -> Iterator[Box]:
    """A box in boxes of at most `most` elements, cut along its first dimensions: such boxes are few runs of memory.

    >>> list(chopped(((0, 5), (0, 2)), 4))
    [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]
    """
    if volume(box) <= most:
        yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    step = max(1, most * (stop - start) // volume(box))
    for at in range(start, stop, step):
        yield from chopped((*box[:dim], (at, min(at + step, stop)), *box[dim + 1 :]), most)
