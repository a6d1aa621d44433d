"""The compiled loop that balances the groups of an interleaved pipeline."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.interleaved.balanced_cuts import CutPlaces

__all__ = ["balance", "warm"]

POWER = 8
"""Of a group's time over the average: high enough for the slowest to count most, low enough for its neighbours to make room."""
PRICE = 0.02
"""Of chunks as unequal as that, as a share of the pipeline."""


@njit(cache=True, nogil=True)
def balance(places, low, high, more, share, steps, draw, even, cuts):  # type: ignore[no-untyped-def]
    """Moves cuts by annealing and leaves the best met in `cuts`; returns more × slowest group + share × sum of groups + the last to end,
    and a price for unequal chunks where `even` is not 0.

    `places` are `CutPlaces`, `low` and `high` [cuts] the first and last place of each cut. Numbers are drawn by a fixed rule: equal input,
    `draw` too, gives equal cuts.
    """
    before, enter, leave, weights, after, tied = places
    num_chunks, groups = len(cuts) - 1, len(enter)
    chunks, sums, ends = np.zeros(num_chunks), np.zeros(groups), tied.copy()
    for chunk in range(num_chunks):
        group, first, last = chunk % groups, cuts[chunk], cuts[chunk + 1]
        chunks[chunk] = before[last] - before[first] + enter[group, first] + leave[group, last]
        sums[group] += chunks[chunk]
        ends[group] += after[group] * (weights[last] - weights[first])
    average, each = sums.mean(), chunks.mean()
    unequal, price = ((chunks / each) ** POWER).sum(), even * PRICE * more * average / num_chunks
    best, at = more * sums.max() + share * sums.sum() + ends.max() + price * unequal, cuts.copy()
    warmth = np.float64(100.0)
    cooling = np.float64(1e-7) ** (1.0 / max(steps, 1))
    seed = np.uint64(88172645463325252) + np.uint64(draw) * np.uint64(7046029254386353131)
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
        more_left = shift + leave[left, to] - leave[left, here]
        more_right = enter[right, to] - enter[right, here] - shift
        new_left, new_right = sums[left] + more_left, sums[right] + more_right
        worse = (new_left / average) ** POWER + (new_right / average) ** POWER
        worse -= (sums[left] / average) ** POWER + (sums[right] / average) ** POWER
        bent = np.float64(0.0)
        if even > 0:
            bent += ((chunks[cut - 1] + more_left) / each) ** POWER + ((chunks[cut] + more_right) / each) ** POWER
            bent -= (chunks[cut - 1] / each) ** POWER + (chunks[cut] / each) ** POWER
            worse += even * bent
        if worse > 0 and np.float64(seed & np.uint64(0xFFFFF)) / 1048576.0 >= np.exp(-worse / warmth):
            continue
        at[cut], sums[left], sums[right] = to, new_left, new_right
        chunks[cut - 1] += more_left
        chunks[cut] += more_right
        unequal += bent
        moved = weights[to] - weights[here]
        ends[left] += after[left] * moved
        ends[right] -= after[right] * moved
        if worse <= 0 or groups <= 16:  # a move that makes groups less equal may still make all of them shorter
            value = more * sums.max() + share * sums.sum() + ends.max() + price * unequal
            if value < best:
                best = value
                cuts[:] = at
    return best


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    cuts = np.array([0, 1, 2, 4, 6])
    none, messages = np.zeros(2), np.zeros((2, 7))
    places = CutPlaces(np.arange(7.0), messages, messages, np.arange(7.0), none, none)
    balance(places, cuts, cuts, 3.5, 0.5, 9, 0, 0.5, cuts.copy())
