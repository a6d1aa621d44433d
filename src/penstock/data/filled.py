"""How many positions the samples of a data set fill where a longest length is given, and what that length cuts off."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.data.dataset import DataSet
from penstock.data.forms import Ints, SampleForm
from penstock.data.limits import NO_LIMITS, Limits

__all__ = ["FilledPositions", "filled_positions", "sample_limits"]


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


def sample_limits(form: SampleForm, longest: int, longest_dec: int) -> Limits:
    """The most that samples may have so that they fill no more than `longest` (beside an encoder, `longest_dec`) positions."""
    if form.kind == "images":
        return NO_LIMITS
    if form.kind == "encoder-decoder":
        return Limits((longest, longest_dec))
    if form.kind == "masked":
        return Limits((longest,))
    return Limits(together=longest + 1) if form.paired else Limits((longest + 1,))  # the last token is only a label


def filled_positions(form: SampleForm, data: DataSet, longest: int, longest_dec: int) -> FilledPositions:
    """The positions that each sample of a data set fills, from its index alone."""
    columns = [np.asarray(side) for side in data.lengths]
    kept = sample_limits(form, longest, longest_dec).kept(columns)
    cut = np.any([side > part for side, part in zip(columns, kept, strict=True)], axis=0)
    tokens, left = (int(sum(side.sum(dtype=np.int64) for side in sides)) for sides in (columns, kept))
    own, dec = form.positions(np.stack(kept, axis=1))
    return FilledPositions(own, dec, int(cut.sum()), tokens - left, tokens)
