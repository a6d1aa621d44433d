"""The compiled loop behind bounds of several kinds of devices: the cheapest stages of a chain, which know the kinds of their neighbours."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["cheapest_stages", "warm"]


@njit(cache=True, nogil=True)
def cheapest_stages(stages, prices, longest, ends, own, chosen, places):  # type: ignore[no-untyped-def]
    """Least cost of a chain in stages of at most `longest` that know the pools of their neighbours, and how many stages there are.

    A stage (`NeighbourStages`) that takes t costs what `StagePrices` says. own [cuts, P, 2] receives the cost of all stages from a cut on,
    for the pool of the first of them and whether the stage before it has another one; chosen [cuts, P, 2, 3] that stage's option, its
    end, and whether the next one has another pool. `ends` are the pools of the first op and of op `stages.tied`, or less than 0 for any.
    `places` [cuts, 4] receives the cheapest stages: first and last cut, option, and 2 or 1 or both where the neighbour before or
    behind has another pool.
    """
    offset, width, times, enter, leave, hidden, pool_of, tied = stages
    busy, after, first_s, last_s = prices
    num_cuts, num_pools = enter.shape[2] - 1, own.shape[1]
    own[:] = np.inf
    rest, towards = np.full((num_cuts + 1, num_pools, 2), np.inf), np.full((num_cuts + 1, num_pools, 2), -1)
    rest[num_cuts, :, 0] = 0.0
    for a in range(num_cuts - 1, -1, -1):
        for c in range(len(pool_of)):
            p, rate = pool_of[c], 1 + busy[c]
            if a == 0 and ends[0] >= 0 and p != ends[0]:
                continue
            for d in range(min(width[c, a], num_cuts - a)):
                b = a + d + 1
                alone = times[offset[c, a] + d]
                if alone > longest:
                    break
                has_tied = a <= tied < b
                if has_tied and ends[1] >= 0 and p != ends[1]:
                    continue
                fixed = after[c, b] - after[c, a]
                if a > 0 or b < num_cuts:  # with one stage there is nothing to fill
                    fixed -= hidden[c, b] - hidden[c, a]
                if a == 0 and not has_tied:
                    fixed += first_s[c, b]
                elif a > 0 and has_tied:
                    fixed += last_s[c, b] - last_s[c, a] + last_s[c, num_cuts + 1]
                for right in range(2):
                    if rest[b, p, right] == np.inf:
                        continue
                    goes = alone + leave[c, right, b]
                    least = rate * goes + fixed + rest[b, p, right]
                    for left in range(1 if a == 0 else 2):
                        come = enter[c, left, a]
                        if goes + come <= longest and least + rate * come < own[a, p, left]:
                            own[a, p, left] = least + rate * come
                            chosen[a, p, left] = c, b, right
        for p in range(num_pools):
            rest[a, p, 0], towards[a, p, 0] = own[a, p, 0], p
            for q in range(num_pools):
                if q != p and own[a, q, 1] < rest[a, p, 1]:
                    rest[a, p, 1], towards[a, p, 1] = own[a, q, 1], q
    p = 0
    for q in range(num_pools):
        if own[0, q, 0] < own[0, p, 0]:
            p = q
    value, a, left, number = own[0, p, 0], 0, 0, 0
    while a < num_cuts and value < np.inf:
        c, b, right = chosen[a, p, left]
        places[number] = a, b, c, 2 * left + right
        a, p, left, number = b, towards[b, p, right], right, number + 1
    return value, number


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.search.partition.by_neighbours import NeighbourStages, StagePrices

    one, two, sides = np.ones((1, 1), np.int64), np.zeros((1, 2)), np.zeros((1, 2, 2))
    stages = NeighbourStages(0 * one, one, np.ones(1), sides, sides, two, np.zeros(1, np.int64), -1)
    prices, shape = StagePrices(np.ones(1), two, two, np.zeros((1, 3))), (2, 1, 2)
    cheapest_stages(
        stages, prices, 9.0, np.array([-1, -1]), np.zeros(shape), np.zeros((*shape, 3), np.int64), np.zeros((2, 4), np.int64)
    )  # fmt: skip
