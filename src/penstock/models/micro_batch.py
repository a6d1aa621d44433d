"""A micro-batch: samples that run together, as planners choose them, programs name them and the cost formulas see them.

It crosses processes inside of programs as an array of its fields, so fields keep their order, and new ones come last with a default.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, TypeAlias

import msgspec

from penstock.models.shapes import Layout, Shape

__all__ = ["Count", "Degree", "MicroBatch", "row_bounds"]

_MOST = 2**63 - 1
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Degree: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """Samples run together, all of them: a rank's own are those of `share(dp, index)`."""

    index: Count
    """Its number within the replica, which actions and instructions name."""
    samples: tuple[Count, ...]
    """Ids in the data set's global batch, row by row (padded) or in the order in which they lie end to end (packed)."""
    layout: Layout
    lengths: tuple[Count, ...] = ()
    """Token positions that each sample really fills; none for images."""
    dec_lengths: tuple[Count, ...] = ()
    row_length: Count = 0
    """Positions that each row is padded to. When packed, where there are no rows: those of all samples with filler behind them, or 0."""
    dec_row_length: Count = 0
    row_sizes: tuple[Count, ...] = ()
    """How many samples share each padded row, attending across each other; none where each has a row of its own."""
    counted: tuple[Count, ...] = ()
    """Positions of each sample that count in the loss; none: all of its (decoder's) true length, or one for an image."""
    bounds: dict[Degree, Annotated[tuple[Count, ...], msgspec.Meta(min_length=3)]] = {}
    """Programs: for each dp above 1 that a stage has, where the samples are divided: dp + 1 positions from 0 to their number."""
    recompute: tuple[Count, ...] = ()
    """Batch plans: for each stage, which of its recomputation patterns (`Stage.recompute`) is used. Programs say it in `Forward`."""

    def share(self, dp: int, index: int) -> tuple[int, int]:
        """[first, last) positions in `samples` that rank `index` of `dp` has; may be empty, then the rank skips the micro-batch."""
        if dp == 1:
            return 0, len(self.samples)
        bounds = self.bounds[dp]
        return bounds[index], bounds[index + 1]

    def shape(self, dp: int = 1, index: int = 0) -> Shape:
        """The share's size as the cost formulas and the carry's specs see it."""
        first, last = self.share(dp, index)
        if not self.lengths:
            return Shape.images(last - first)
        if self.layout == "packed":
            return Shape.packed(self.lengths[first:last], self.dec_lengths[first:last])
        rows = last - first if not self.row_sizes else self._rows_before(last) - self._rows_before(first)
        return Shape.padded(rows, self.row_length, self.dec_row_length)

    def _rows_before(self, position: int) -> int:
        """Rows that end before a sample's position."""
        return sum(end <= position for end in accumulate(self.row_sizes))

    def loss_tokens(self, first: int = 0, last: int | None = None) -> int:
        """Positions that count in the loss, of some of the samples or of all."""
        counts: Sequence[int] = self.counted or self.dec_lengths or self.lengths
        return sum(counts[first:last]) if counts else len(self.samples[first:last])

    @property
    def num_rows(self) -> int:
        """Rows of a padded micro-batch, sequences of a packed one."""
        return len(self.row_sizes) or len(self.samples)

    @property
    def num_tokens(self) -> int:
        """Tokens that count, both sides, padding left out."""
        return sum(self.lengths) + sum(self.dec_lengths)

    @property
    def num_positions(self) -> int:
        """Tokens that are computed, padding included."""
        shape = self.shape()
        return shape.tokens + shape.dec_tokens

    def even_bounds(self, dp: int, shares: Sequence[float] = ()) -> tuple[int, ...]:
        """Where the samples are best divided among `dp` ranks: equal rows if padded, about equal tokens if packed; or such parts of them
        as `shares` say, one number for each rank.

        Shares follow each other, so that stages of different dp exchange whole neighbouring pieces.
        """
        if self.row_sizes:
            ends = (0, *accumulate(self.row_sizes))
            return tuple(ends[row] for row in row_bounds(len(self.row_sizes), dp, shares))
        if self.layout == "padded":
            return row_bounds(len(self.samples), dp, shares)
        weights = [n + m for n, m in zip(self.lengths, self.dec_lengths or (0,) * len(self.lengths), strict=True)]
        return _balanced_bounds(weights, shares or (1.0,) * dp)


def row_bounds(count: int, parts: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Where each part of so many rows begins, and the end: equal parts, the larger ones first, or such as `shares` say."""
    if shares:
        return (0, *(math.floor(count * end / sum(shares) + 0.5) for end in accumulate(shares)))
    small, extra = divmod(count, parts)
    return tuple(part * small + min(part, extra) for part in range(parts + 1))


def _balanced_bounds(weights: list[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Consecutive parts, each ending where the running sum is nearest to its share."""
    ends, total, running, at = [0], sum(weights), 0, 0
    for end in list(accumulate(shares))[:-1]:
        goal = total * end / sum(shares)
        while at < len(weights) and abs(running + weights[at] - goal) <= abs(running - goal):
            running += weights[at]
            at += 1
        ends.append(at)
    return (*ends, len(weights))
