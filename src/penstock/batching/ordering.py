"""Orders in which neighbours have similar lengths, so that consecutive samples pad each other little."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ints", "by_length", "curves", "hilbert"]

Ints = NDArray[np.int64]


def by_length(enc: Ints, dec: Ints) -> Ints:
    """Longest first; those of equal length by their decoder length."""
    return np.lexsort((-dec, -enc))


def hilbert(enc: Ints, dec: Ints, unit: int = 8, turn: int = 0) -> Ints:
    """Samples along a Hilbert curve over (length, decoder length) in steps of `unit`: near on the curve is near in both.

    The curve visits all cells of a square before it leaves it, at every scale. It is not symmetric: `turn` 0 to 3 swaps the axes
    (odd) and mirrors the second (2 and 3). Samples of one cell lie by length.
    """
    from penstock.batching.kernels import hilbert_distances

    x, y = -(-enc // unit), -(-dec // unit)
    bits = max(int(max(x.max(initial=0), y.max(initial=0))).bit_length(), 1)
    if turn % 2:
        x, y = y, x
    if turn >= 2:
        y = (1 << bits) - 1 - y
    return np.lexsort((-dec, -enc, hilbert_distances(x, y, bits)))


def curves(enc: Ints, dec: Ints, unit: int = 8) -> list[Ints]:
    """Orders worth splitting: by length where there is one length, two Hilbert curves where there are two (four found no more)."""
    return [hilbert(enc, dec, unit, turn) for turn in (1, 3)] if dec.any() else [by_length(enc, dec)]
