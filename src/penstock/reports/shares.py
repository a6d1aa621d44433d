"""Spans too short to be drawn one by one: what share of each column of a picture they fill."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from penstock.timing.workload import Floats

__all__ = ["shares"]


def shares(starts: ArrayLike, ends: ArrayLike, edges: ArrayLike) -> Floats:
    """The share of each interval between two edges that some spans cover; spans are in the order of time and do not overlap.

    >>> shares([0.0, 3.0], [1.0, 4.0], [0.0, 2.0, 4.0]).tolist()
    [0.5, 0.5]
    """
    starts, ends, edges = (np.asarray(values, dtype=np.float64) for values in (starts, ends, edges))
    if not len(starts):
        return np.zeros(len(edges) - 1)
    # Time covered up to each start and end; between two of them it grows evenly, or not at all.
    covered = np.cumsum(ends - starts)
    until = np.interp(edges, np.stack([starts, ends], axis=1).ravel(), np.stack([covered - (ends - starts), covered], axis=1).ravel())
    return np.clip(np.diff(until) / np.maximum(np.diff(edges), 1e-300), 0.0, 1.0)
