"""The compiled loop that balances the groups of an interleaved pipeline."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["balance", "warm"]

POWER = 8
"""Of a group's time over the average: high enough for the slowest to count most, low enough for its neighbours to make room."""


@njit(cache=True, nogil=True)
def balance(before, enter, leave, low, high, more, share, steps, cuts):  # type: ignore[no-untyped-def]
    """Moves cuts by annealing and leaves the best met in `cuts`; returns more × slowest group + share × sum of groups.

    `before` [places] are prefix sums of op times, `enter` and `leave` [groups, places] the messages at both ends of a group's chunk, `low`
    and `high` [cuts] the first and last place of each cut. Numbers are drawn by a fixed rule: equal input gives equal cuts.
    """
    num_chunks, groups = len(cuts) - 1, len(enter)
    sums = np.zeros(groups)
    for chunk in range(num_chunks):
        group = chunk % groups
        sums[group] += before[cuts[chunk + 1]] - before[cuts[chunk]] + enter[group, cuts[chunk]] + leave[group, cuts[chunk + 1]]
    average = sums.mean()
    best, at = more * sums.max() + share * sums.sum(), cuts.copy()
    warmth = np.float64(100.0)
    cooling, seed = np.float64(1e-7) ** (1.0 / max(steps, 1)), np.uint64(88172645463325252)
    for _ in range(steps):
        warmth *= cooling
        seed ^= seed << np.uint64(13)
        seed ^= seed >> np.uint64(7)
        seed ^= seed << np.uint64(17)
        cut = 1 + np.int64(seed >> np.uint64(40)) % (num_chunks - 1)
        move = np.int64((seed >> np.uint64(20)) & np.uint64(15)) - 8
        to = at[cut] + move + (move >= 0)
        if to <= at[cut - 1] or to >= at[cut + 1] or to < low[cut] or to > high[cut]:
            continue
        left, right, here = (cut - 1) % groups, cut % groups, at[cut]
        shift = before[to] - before[here]
        new_left = sums[left] + shift + leave[left, to] - leave[left, here]
        new_right = sums[right] - shift + enter[right, to] - enter[right, here]
        worse = (new_left / average) ** POWER + (new_right / average) ** POWER
        worse -= (sums[left] / average) ** POWER + (sums[right] / average) ** POWER
        if worse > 0 and np.float64(seed & np.uint64(0xFFFFF)) / 1048576.0 >= np.exp(-worse / warmth):
            continue
        at[cut], sums[left], sums[right] = to, new_left, new_right
        if worse <= 0 or groups <= 16:  # a move that makes groups less equal may still make all of them shorter
            value = more * sums.max() + share * sums.sum()
            if value < best:
                best = value
                cuts[:] = at
    return best


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    cuts = np.array([0, 1, 2, 4, 6])
    balance(np.arange(7.0), np.zeros((2, 7)), np.zeros((2, 7)), cuts, cuts, 3.5, 0.5, 9, cuts.copy())
