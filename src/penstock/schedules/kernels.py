"""The simulator's inner loop, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["run_orders", "warm"]


@njit(cache=True, nogil=True)
def run_orders(actions, bounds, durations, transfers, start, end):  # type: ignore[no-untyped-def]
    """Fills `start` and `end`; returns the index of an action that can never run, or -1.

    Devices take turns: each runs on until its next action waits for one that has not ended yet.
    """
    num_devices, last = len(bounds) - 1, durations.shape[1] - 1
    position = bounds[:-1].copy()
    clock = np.zeros(num_devices)
    left = len(actions)
    while left > 0:
        before = left
        for device in range(num_devices):
            while position[device] < bounds[device + 1]:
                stage, kind, m = actions[position[device]]
                ready = _arrival(stage, kind, m, last, end, transfers)
                if ready == np.inf:
                    break
                begin = max(clock[device], ready)
                start[kind, stage, m] = begin
                clock[device] = begin + durations[kind, stage, m]
                end[kind, stage, m] = clock[device]
                position[device] += 1
                left -= 1
        if left == before:
            for device in range(num_devices):
                if position[device] < bounds[device + 1]:
                    return position[device]
    return -1


@njit(cache=True, nogil=True, inline="always")
def _arrival(stage, kind, m, last, end, transfers):  # type: ignore[no-untyped-def]
    """When the input of an action is there; infinite while its producer has not run."""
    if kind == 0:
        return 0.0 if stage == 0 else end[0, stage - 1, m] + transfers[0, stage - 1, m]
    if stage == last:
        return end[0, stage, m]
    return max(end[0, stage, m], end[1, stage + 1, m] + transfers[1, stage, m])


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    actions = np.array([[0, 0, 0], [0, 1, 0]], dtype=np.int32)
    ones = np.ones((2, 1, 1))
    run_orders(actions, np.array([0, 2]), ones, np.ones((2, 0, 1)), np.full((2, 1, 1), np.inf), np.full((2, 1, 1), np.inf))
