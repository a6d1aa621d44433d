"""The compiled loop that anneals pipelines over several kinds of devices: cuts, options and order of stages together."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.partition.annealed import PipelineArrays

__all__ = ["anneal", "pipeline_s", "warm"]

STEP = 4
"""Ops by which a cut moves at most, most of the time."""


@njit(cache=True, nogil=True)
def pipeline_s(arrays, count, held_by_all, number, cuts, options, starts):  # type: ignore[no-untyped-def]
    """An iteration of a pipeline of so many stages by formula; `starts` receives their first devices. Infinite where it does not fit,
    or where all stages are of one kind, as the partition programme finds them exactly.

    `arrays` are `PipelineArrays`. Stages of a kind take its devices in turn; one that would end in another node begins with it.
    """
    work, hidden, after, state, kept, got, back, link, ends_s, devices, pool_of, sizes, nodes, tied = arrays
    taken = np.zeros(len(sizes), np.int64)
    for i in range(number):
        pool, wanted = pool_of[options[i]], devices[options[i]]
        node, at = nodes[pool], taken[pool]
        if at % node + wanted > node and at % node:
            at += node - at % node
        starts[i], taken[pool] = at, at + wanted
        if taken[pool] > sizes[pool]:
            return np.inf
    if np.count_nonzero(taken) < 2:
        return np.inf
    slowest, total, late = 0.0, 0.0, 0.0
    end = 0  # the stage that shares a weight with the first
    while end < number - 1 and cuts[end + 1] <= tied:
        end += 1
    first, last = options[0], options[end]
    apart = end > 0 and (pool_of[first] != pool_of[last] or starts[0] // nodes[pool_of[first]] != starts[end] // nodes[pool_of[first]])
    across = 0
    for i in range(number):
        c, a, b = options[i], cuts[i], cuts[i + 1]
        flight = min(number if held_by_all else number - i, count)
        if state[c, b] - state[c, a] + flight * (kept[c, b] - kept[c, a]) > 1:
            return np.inf
        time = work[c, b] - work[c, a]
        if i > 0:
            time += link[across, options[i - 1], c, 0] + link[across, options[i - 1], c, 1] * got[c, a]
        if i < number - 1:
            d, node = options[i + 1], nodes[pool_of[c]]
            across = 1 if pool_of[d] != pool_of[c] or starts[i + 1] // node != (starts[i] + devices[c] - 1) // node else 0
            time += link[across, c, d, 0] + link[across, c, d, 2] * back[c, b]
        slowest = max(slowest, time)
        total += time - (hidden[c, b] - hidden[c, a] if number > 1 else 0.0)
        ending = after[c, b] - after[c, a]
        if apart and (i == 0 or i == end):
            ending += ends_s[first, last]
        late = max(late, ending)
    return (count - 1) * slowest + total + late


@njit(cache=True, nogil=True)
def anneal(arrays, count, held_by_all, steps, warmth, draw, number, cuts, options):  # type: ignore[no-untyped-def]
    """Changes a pipeline of `number` stages step by step and leaves the best met in `cuts` and `options`, whose length says how many
    stages there may be; returns its time and its number of stages.

    `warmth` is the share of its time by which a pipeline may first become slower at a step. Equal input, `draw` too, gives equal stages.
    """
    np.random.seed(draw)
    devices, pool_of = arrays.devices, arrays.pool_of
    num_ops, most, kinds = arrays.work.shape[1] - 1, len(options), len(devices)
    starts = np.zeros(most, np.int64)
    here = best = pipeline_s(arrays, count, held_by_all, number, cuts, options, starts)
    at, by, at_number, best_number = cuts.copy(), options.copy(), number, number
    to, way = cuts.copy(), options.copy()
    for step in range(steps):
        to[:], way[:], now = at, by, at_number
        kind, i = np.random.random(), np.random.randint(at_number)
        if kind < 0.4:  # a cut, or all cuts from one to another, moves
            last = np.random.randint(i, at_number) if kind < 0.06 else i
            far = 2 * STEP * np.random.randint(-2, 3) if kind > 0.3 else np.random.randint(-STEP, STEP + 1)
            if i == 0:
                continue
            to[i : last + 1] += far
            if to[i] <= to[i - 1] or to[last] >= to[last + 1]:
                continue
        elif kind < 0.6:  # a stage gets other devices or degrees
            way[i] = np.random.randint(kinds)
        elif kind < 0.7:  # two stages change places
            j = np.random.randint(at_number)
            way[i], way[j] = by[j], by[i]
        elif kind < 0.85:  # a stage is divided
            if at_number == most or to[i + 1] - to[i] < 2:
                continue
            middle = np.random.randint(to[i] + 1, to[i + 1])
            to[i + 2 : now + 2] = at[i + 1 : now + 1]
            way[i + 1 : now + 1] = by[i:now]
            to[i + 1] = middle
            for half in (i, i + 1):
                if np.random.random() < 0.7:
                    way[half] = _of_pool(pool_of, pool_of[by[i]], kinds)
            now += 1
        else:  # two stages become one
            if i == at_number - 1:
                continue
            to[i + 1 : now] = at[i + 2 : now + 1]
            way[i + 1 : now - 1] = by[i + 2 : now]
            if np.random.random() < 0.7:
                way[i] = _of_pool(pool_of, pool_of[by[i]], kinds)
            now -= 1
        time = pipeline_s(arrays, count, held_by_all, now, to, way, starts)
        cold = warmth * best * (1 - step / steps) ** 2
        if time < here or np.random.random() < np.exp((here - time) / max(cold, 1e-12)):
            at[:], by[:], at_number, here = to, way, now, time
            if time < best:
                best, best_number = time, now
                cuts[:], options[:] = to, way
    assert cuts[best_number] == num_ops
    return best, best_number


@njit(cache=True, nogil=True)
def _of_pool(pool_of, pool, kinds):  # type: ignore[no-untyped-def]
    """Some option of a pool."""
    while True:
        c = np.random.randint(kinds)
        if pool_of[c] == pool:
            return c


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    sums, ones = np.zeros((2, 3)), np.ones(2, np.int64)
    none = (sums, sums, sums, sums, sums, sums)
    arrays = PipelineArrays(sums + np.arange(3.0), *none, np.zeros((2, 2, 2, 3)), np.zeros((2, 2)), ones, np.arange(2), ones, ones, 1)
    cuts, options = np.array([0, 1, 2, 2]), np.arange(2)
    anneal(arrays, 2, True, 9, 0.1, 0, 2, cuts, options)
    pipeline_s(arrays, 2, True, 2, cuts, options, np.zeros(2, np.int64))
