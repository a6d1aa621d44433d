"""Orders in which neighbours have similar lengths, so that consecutive samples pad each other little."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ORDERS", "Ints", "by_length", "curves", "hilbert", "tour"]

Ints = NDArray[np.int64]


def by_length(enc: Ints, dec: Ints) -> Ints:
    """Longest first; those of equal length by their decoder length."""
    return np.lexsort((-dec, -enc))


def hilbert(enc: Ints, dec: Ints, unit: int, turn: int) -> Ints:
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


def tour(enc: Ints, dec: Ints) -> Ints:
    """Clusters of complete linkage (16 apart at most), visited along a nearest-neighbour path improved by 2-opt, as DynaPipe orders."""
    from scipy.cluster.hierarchy import fcluster, linkage

    points = np.stack([enc, dec], axis=1).astype(float)
    cluster = fcluster(linkage(points, "complete"), 16, "distance") - 1
    centres = np.stack([points[cluster == c].mean(axis=0) for c in range(cluster.max() + 1)])
    away = np.abs(centres[:, None] - centres[None]).sum(axis=-1)
    path, left = [0], set(range(1, len(centres)))
    while left:
        path.append(min(left, key=lambda c: away[path[-1], c]))
        left.remove(path[-1])
    improved = True
    while improved:
        improved = False
        for i in range(len(path) - 2):
            at, to = np.array(path[i + 2 : -1], dtype=int), np.array(path[i + 3 :], dtype=int)
            if not len(at):
                continue
            gain = away[path[i], path[i + 1]] + away[at, to] - away[path[i], at] - away[path[i + 1], to]
            best = int(np.argmax(gain))
            if gain[best] > 1e-9:
                path[i + 1 : i + 3 + best] = path[i + 1 : i + 3 + best][::-1]
                improved = True
    return np.concatenate([np.flatnonzero(cluster == c) for c in path])


ORDERS: dict[str, Callable[[Ints, Ints, int], list[Ints]]] = {
    "hilbert": lambda enc, dec, unit: [hilbert(enc, dec, unit, turn) for turn in (1, 3)],
    "sorted": lambda enc, dec, unit: [by_length(enc, dec)],
    "tour": lambda enc, dec, unit: [tour(enc, dec)],
}
"""Orders by name, each of one or several of which the best is split."""
