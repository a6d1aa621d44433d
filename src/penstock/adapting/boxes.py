"""Regions of a global tensor as lists of boxes that do not overlap: what of one lies outside of another, and boxes of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from penstock.runtime.checkpoints.manifest import Box, intersection, volume

__all__ = ["Region", "chopped", "outside", "union"]

Region = tuple[Box, ...]
"""Boxes that do not overlap."""


def outside(region: Iterable[Box], other: Sequence[Box]) -> list[Box]:
    """The part of a region that `other` does not cover.

    >>> outside([((0, 4), (0, 4))], [((1, 2), (1, 4))])
    [((0, 1), (0, 4)), ((2, 4), (0, 4)), ((1, 2), (0, 1))]
    """
    left = list(region)
    for hole in other:
        left = [part for box in left for part in _without(box, hole)]
    return left


def _without(box: Box, hole: Box) -> Iterator[Box]:
    """A box less a hole: along each dimension in turn what lies before and after it."""
    shared = intersection(box, hole)
    if shared is None:
        yield box
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, shared, strict=True)):
        for part in ((start, first), (last, stop)):
            if part[0] < part[1]:
                yield (*shared[:dim], part, *box[dim + 1 :])


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
