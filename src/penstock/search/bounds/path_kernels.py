"""The compiled loop behind bounds from ops alone: the cheapest way through a chain whose ops each take one of several options."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["cheapest_path", "warm"]


@njit(cache=True, nogil=True)
def cheapest_path(costs, chain, arriving, leaving, counts):  # type: ignore[no-untyped-def]
    """Least cost of a chain whose ops each take one of C options: costs [C, distinct ops], `leaving` one and `arriving` at another.

    `counts` [C, distinct ops] receives how many ops took which option.
    """
    num_options, num_ops = costs.shape[0], len(chain)
    best, came = np.zeros(num_options), np.zeros((num_ops, num_options), np.int32)
    for i in range(num_ops):
        exit_from = 0
        for c in range(num_options):
            if best[c] + leaving[c] < best[exit_from] + leaving[exit_from]:
                exit_from = c
        through = best[exit_from] + leaving[exit_from]
        for c in range(num_options):
            came[i, c] = c
            if i > 0 and through + arriving[c] < best[c]:
                came[i, c] = exit_from
        for c in range(num_options):
            if came[i, c] != c:
                best[c] = through + arriving[c]
            best[c] += costs[c, chain[i]]
    at = 0
    for c in range(num_options):
        if best[c] < best[at]:
            at = c
    value = best[at]
    counts[:] = 0
    for i in range(num_ops - 1, -1, -1):
        counts[at, chain[i]] += 1
        at = came[i, at]
    return value


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    cheapest_path(np.ones((1, 2)), np.array([0, 1]), np.ones(1), np.ones(1), np.zeros((1, 2), np.int64))
