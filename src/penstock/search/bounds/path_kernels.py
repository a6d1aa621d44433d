"""The compiled loops behind bounds from ops alone: the cheapest way through a chain whose ops each take one of several options, and the
weights of pools for which it costs most."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from penstock.costs.table import Floats
from penstock.search.space.stage_costs import Ints

__all__ = ["WeighedOps", "best_weights", "cheapest_path", "warm"]

_STEPS, _GOOD = 40, 1e-3
"""Rounds in which the weights of several pools are improved, and how near to the best they need to come."""


class WeighedOps(NamedTuple):
    """What the ops of a chain cost under each of C options, in which devices have weights."""

    chain: Ints
    """[N] number of each op among the distinct ones."""
    fixed: Floats
    time: Floats
    """[C, O] whatever the weights are, and for each device of the option its weight."""
    changes: Floats
    """[C, 2] of arriving at an option and of leaving it, which cost time in each stage."""
    ends: Floats
    """[C] what may be counted too much at the ends of the chain."""
    devices: Floats
    """[C, P + 1] of each pool, and stages."""
    besides: Floats
    """[P + 1] device-seconds of each pool besides, and seconds in the sum of stages."""
    filled: float
    """How often the sum of stages counts."""


@njit(cache=True, nogil=True)
def best_weights(ops, sizes, more, known_s):  # type: ignore[no-untyped-def]
    """Weights with Σ weight · size = `more` that make the cheapest way dear, or no less than `known_s`: a pool that is given more work is
    made dearer."""
    num_options, num_pools = ops.devices.shape
    shares = (sizes > 0) / (sizes > 0).sum()
    weights, load, best, found = np.zeros(num_pools), np.zeros(num_pools), shares.copy(), -np.inf
    costs, counts = np.zeros(ops.time.shape), np.zeros(ops.time.shape, np.int64)
    factor, arriving, leaving = np.zeros(num_options), np.zeros(num_options), np.zeros(num_options)
    for step in range(_STEPS if more > 0 else 1):
        for p in range(num_pools):
            weights[p] = more * shares[p] / sizes[p] if sizes[p] > 0 else 0.0
        now, ends = ops.filled * ops.besides[-1], -np.inf
        for p in range(num_pools):
            now += ops.besides[p] * weights[p]
        for c in range(num_options):
            busy = 0.0
            for p in range(num_pools):
                busy += ops.devices[c, p] * weights[p]
            factor[c] = ops.filled + busy
            arriving[c], leaving[c] = ops.changes[c, 0] * factor[c], ops.changes[c, 1] * factor[c]
            ends = max(ends, ops.ends[c] * factor[c])
            for o in range(ops.time.shape[1]):
                costs[c, o] = ops.fixed[c, o] + ops.time[c, o] * busy
        now += cheapest_path(costs, ops.chain, arriving, leaving, counts) - ends
        if now > found:
            found, best = now, shares.copy()
        load[:] = ops.besides
        for c in range(num_options):
            worked = 0.0
            for o in range(ops.time.shape[1]):
                worked += counts[c, o] * ops.time[c, o] if counts[c, o] else 0.0
            for p in range(num_pools):
                load[p] += worked * ops.devices[c, p]
        mean = 0.0
        for p in range(num_pools):
            load[p] = load[p] / sizes[p] if sizes[p] > 0 else 0.0
            mean += shares[p] * load[p]
        most = now + more * (load.max() - mean)  # a concave value is nowhere above its tangent
        if found >= known_s or most <= found * (1 + _GOOD):
            break
        shares = shares * np.exp(3.0 / (1 + step / 4) * (load / max(load.max(), 1e-300) - 1))
        shares = shares / shares.sum()
    for p in range(num_pools):
        weights[p] = more * best[p] / sizes[p] if sizes[p] > 0 else 0.0
    return weights


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
    """Compiles the kernels for the types they are called with."""
    chain, table = np.array([0, 1]), np.ones((1, 2))
    cheapest_path(table, chain, np.ones(1), np.ones(1), np.zeros((1, 2), np.int64))
    best_weights(WeighedOps(chain, table, table, table, np.ones(1), table, np.ones(2), 1.0), np.ones(2), 1.0, 9.0)
