"""The compiled loops that choose which ops of a block are recomputed.

A block of ops start..stop has `forward` and `kept` of each op, and `ending`, its forward time as the last op of a recomputed run. Memory is
in any one unit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["cheapest_flags", "least_times", "limited_levels", "piece_levels", "warm"]


@njit(cache=True, nogil=True)
def cheapest_flags(forward, ending, kept, start, stop, first_free, price, flags):  # type: ignore[no-untyped-def]
    """Fills `flags` of ops start..stop so that time less price × saved is least; returns (saved, time, peak).

    An op saves what it keeps when it and the op after it are both recomputed; the last op of a piece never does. The last op of a
    recomputed run takes `ending` instead of its forward time.
    """
    n = stop - start
    back = np.zeros((n, 2), np.int8)
    plain, again = 0.0, ending[start] if first_free else np.inf
    for p in range(1, n):
        gained = again + forward[start + p - 1] - ending[start + p - 1] - price * kept[start + p - 1]
        back[p, 0] = 1 if again < plain else 0
        back[p, 1] = 1 if gained < plain else 0
        plain, again = min(plain, again), min(plain, gained) + ending[start + p]
    state = 1 if again < plain else 0
    for p in range(n - 1, -1, -1):
        flags[p] = state
        state = back[p, state]
    return _effect(forward, ending, kept, start, n, flags)


@njit(cache=True, nogil=True)
def _effect(forward, ending, kept, start, n, flags):  # type: ignore[no-untyped-def]
    """(saved, time, peak) of flags: the peak is the largest run that is brought back at once."""
    saved = time = peak = run = 0.0
    for p in range(n):
        if not flags[p]:
            run = 0.0
            continue
        run += kept[start + p]
        peak = max(peak, run)
        if p + 1 < n and flags[p + 1]:
            time += forward[start + p]
            saved += kept[start + p]
        else:
            time += ending[start + p]
    return saved, time, peak


@njit(cache=True, nogil=True)
def piece_levels(forward, ending, kept, block_start, first_free, prices, head, tail):  # type: ignore[no-untyped-def]
    """(saved, time, peak) at each price of the piece from op i to its block's end (`head`) and from its start to j (`tail`)."""
    longest = 0
    for b in range(len(block_start) - 1):
        longest = max(longest, block_start[b + 1] - block_start[b])
    flags = np.zeros(longest, np.int8)
    for b in range(len(block_start) - 1):
        start, stop = block_start[b], block_start[b + 1]
        if stop - start <= 2:
            continue
        for level in range(len(prices)):
            for i in range(start, stop):
                free = first_free[b] or i > start
                head[level, i] = cheapest_flags(forward, ending, kept, i, stop, free, prices[level], flags)
            for j in range(start + 1, stop):
                tail[level, j] = cheapest_flags(forward, ending, kept, start, j, first_free[b], prices[level], flags)


@njit(cache=True, nogil=True)
def _cheapest_runs(forward, ending, kept, start, stop, first_free, price, most):  # type: ignore[no-untyped-def]
    """(saved, time, 0) of the flags of `cheapest_flags` if no run may save more than `most`."""
    n = stop - start
    # Of the first p ops: the value, what is saved and its time where the last of them is not recomputed, and where it may be.
    plain, free = np.zeros((n + 1, 3)), np.zeros((n + 1, 3))
    for p in range(1, n + 1):
        plain[p] = free[p - 1]
        free[p] = plain[p]
        saved = time = 0.0
        for a in range(p - 2, -1, -1):
            saved += kept[start + a]
            time += forward[start + a]
            if saved > most or (a == 0 and not first_free):
                break
            value = plain[a, 0] + time + ending[start + p - 1] - price * saved
            if value < free[p, 0]:
                free[p, 0], free[p, 1], free[p, 2] = value, plain[a, 1] + saved, plain[a, 2] + time + ending[start + p - 1]
    return free[n, 1], free[n, 2], 0.0


@njit(cache=True, nogil=True)
def limited_levels(forward, ending, kept, start, stop, first_free, most, prices, head, tail):  # type: ignore[no-untyped-def]
    """`piece_levels` of one block if no run may save more than `most`; peaks are left out."""
    for level in range(len(prices)):
        for i in range(start, stop):
            head[level, i] = _cheapest_runs(forward, ending, kept, i, stop, first_free or i > start, prices[level], most)
        for j in range(start + 1, stop):
            tail[level, j] = _cheapest_runs(forward, ending, kept, start, j, first_free, prices[level], most)


@njit(cache=True, nogil=True)
def least_times(forward, ending, kept, start, stop, first_free, unit, least, parents):  # type: ignore[no-untyped-def]
    """least[s]: least time to save at least s units in ops start..stop; `parents` [ops, 2, units] lets flags be read back."""
    n, size = stop - start, len(least)
    plain, again = np.full(size, np.inf), np.full(size, np.inf)
    plain[0] = 0.0
    if first_free:
        again[0] = ending[start]
    for p in range(1, n):
        gain, rest = int(kept[start + p - 1] / unit), forward[start + p - 1] - ending[start + p - 1]
        next_plain, next_again = np.empty(size), np.empty(size)
        for s in range(size):
            parents[p, 0, s] = 1 if again[s] < plain[s] else 0
            next_plain[s] = min(plain[s], again[s])
            kept_on = again[s - gain] + rest if s >= gain else np.inf
            parents[p, 1, s] = 1 if kept_on < plain[s] else 0
            next_again[s] = min(plain[s], kept_on) + ending[start + p]
        plain, again = next_plain, next_again
    for s in range(size):
        parents[0, 0, s] = 1 if again[s] < plain[s] else 0
        least[s] = min(plain[s], again[s])
    for s in range(size - 2, -1, -1):
        least[s] = min(least[s], least[s + 1])


def warm() -> None:
    """Compiles every kernel for the types it is called with, on a chain of two tiny blocks."""
    ones, starts = np.ones(6), np.array([0, 3, 6])
    head, tail, prices = np.zeros((2, 6, 3)), np.zeros((2, 7, 3)), np.array([0.0, 9.0])
    cheapest_flags(ones, ones, ones, 0, 3, True, 9.0, np.zeros(3, np.int8))
    piece_levels(ones, ones, ones, starts, np.array([True, True]), prices, head, tail)
    limited_levels(ones, ones, ones, 0, 3, True, 1.0, prices, head, tail)
    least_times(ones, ones, ones, 0, 3, True, 0.5, np.full(8, np.inf), np.zeros((3, 2, 8), np.int8))
