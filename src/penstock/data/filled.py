"""How many positions the samples of a data set fill where a longest length is given, and what that length cuts off."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from penstock.data.dataset import DataSet
from penstock.data.forms import Ints, SampleForm

__all__ = ["FilledPositions", "filled_positions", "side_limits"]


@dataclass(frozen=True, eq=False)
class FilledPositions:
    """Positions of each sample on both sides (none of a decoder that is not there), and the tokens that were cut off."""

    own: Ints
    dec: Ints
    num_truncated: int
    """Samples that are longer than they may be."""
    tokens_lost: int
    tokens: int
    """Of all samples, before anything was cut off."""

    @property
    def mean(self) -> float:
        """Positions of a sample on the side of its input."""
        return float(self.own.mean())


def side_limits(form: SampleForm, data: DataSet, longest: int, longest_dec: int) -> tuple[int | None, ...]:
    """The longest input and target whose sample fills no more than `longest` (and, in a decoder, `longest_dec`) positions."""
    if form.kind == "images":
        return ()
    if form.kind == "encoder-decoder":
        return longest, longest_dec
    if form.kind == "masked":
        return (longest,)
    if not form.paired:
        return (longest + 1,)
    target = min(int(data.lengths[1].max()), max(1, longest // 2))
    return longest + 1 - target, target


def filled_positions(form: SampleForm, data: DataSet, longest: int, longest_dec: int) -> FilledPositions:
    """What all samples of a data set fill, from its index alone."""
    limits = side_limits(form, data, longest, longest_dec)
    columns = [np.asarray(side) for side in data.lengths]
    kept = [side if limit is None else np.minimum(side, limit) for side, limit in zip_longest(columns, limits)]
    cut = np.any([side > part for side, part in zip(columns, kept, strict=True)], axis=0)
    tokens, left = (int(sum(side.sum(dtype=np.int64) for side in sides)) for sides in (columns, kept))
    own, dec = form.positions(np.stack(kept, axis=1))
    return FilledPositions(own, dec, int(cut.sum()), tokens - left, tokens)
