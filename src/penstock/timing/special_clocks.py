"""Clocks for special cases that searches run millions of times; what they tell is what the clocks of `clock` tell, only sooner.

They need no list of actions: the order follows from the sizes. Tests hold each equal to the clock that it stands for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["run_ahead", "run_alike", "warm"]


@njit(cache=True, nogil=True, error_model="numpy")
def run_ahead(n, ahead, forward, backward, hop, arrives):  # type: ignore[no-untyped-def]
    """When the last pass ends of a pipeline whose stage s runs ahead[s] forward passes, then a backward and a forward pass in turn.

    The event clock on `with_depths(ahead)` where the transfers that a device sends take turns, forty times as fast: 2.5 µs instead of
    97 for 8 stages and 64 micro-batches. Planning a batch calls it for most of its steps, 40,000 of them.

    forward, backward [n, S]; hop [n, 2, S - 1]; arrives [n, 2, S] is scratch. `ahead` never grows along the pipe, so that in the
    order below everything an action waits for comes before it. A device sends results in the order in which they appear.
    """
    stages = len(ahead)
    free, channel = np.zeros(stages), np.zeros(stages)
    for step in range(n + min(ahead[0], n)):
        for s in range(stages - 1, -1, -1):
            j = step - min(ahead[s], n)
            if 0 <= j < n:
                ready = arrives[j, 1, s] if s < stages - 1 else 0.0
                end = max(free[s], ready) + backward[j, s]
                free[s] = end
                if s > 0:
                    channel[s] = max(channel[s], end) + hop[j, 1, s - 1]
                    arrives[j, 1, s - 1] = channel[s]
        if step < n:
            ready = 0.0
            for s in range(stages):
                end = max(free[s], ready) + forward[step, s]
                free[s] = end
                if s < stages - 1:
                    channel[s] = max(channel[s], end) + hop[step, 0, s]
                    ready = channel[s]
    return np.max(free)


@njit(cache=True, nogil=True)
def run_alike(compute, hops, num_micro_batches, ends):  # type: ignore[no-untyped-def]
    """Fills `ends` with the last backward of each stage under 1F1B, micro-batches all alike and a third of their time forward.

    The fixed-order clock on 1F1B, where a hop costs the same both ways, three times as fast: 2.5 µs instead of 8.6 for 8 stages and
    64 micro-batches, before any list of actions is made. The search over FASOP's costs is little else than calls of it.

    In round r stage s runs the forward of micro-batch r + D - 1 - s, which it needs before its backward of r:

        round    -2  -1   0      1
        stage 0  F0  F1  F2 B0  F3 B1
        stage 1      F0  F1 B0  F2 B1
        stage 2          F0 B0  F1 B1
    """
    depth = len(compute)
    arrival = np.zeros(depth)
    ends[:] = 0.0
    for r in range(1 - depth, num_micro_batches):
        for s in range(depth - 1, -1, -1):
            m = r + depth - 1 - s
            if m < 0 or m >= num_micro_batches:
                continue
            begin = ends[s]
            if s > 0 and arrival[s] > begin:
                begin = arrival[s]
            ends[s] = begin + compute[s] / 3
            if s + 1 < depth:
                arrival[s + 1] = ends[s] + hops[s]
        if r < 0:
            continue
        back = 0.0
        for s in range(depth - 1, -1, -1):
            begin = ends[s] if ends[s] > back else back
            ends[s] = begin + 2 * compute[s] / 3
            if s > 0:
                back = ends[s] + hops[s - 1]


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    scratch, hop = np.ones((1, 4, 2)), np.ones((1, 2, 1))
    run_ahead(1, np.array([2, 1]), scratch[:, 0], scratch[:, 1], hop, scratch[:, 2:])
    run_alike(np.ones(2), np.ones(1), 1, np.zeros(2))
