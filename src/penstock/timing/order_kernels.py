"""The simulator's inner loops for fixed orders without contention, compiled: times, and memory."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["peak_of_order", "run_orders", "warm"]


@njit(cache=True, nogil=True)
def run_orders(actions, bounds, durations, transfers, start, end):  # type: ignore[no-untyped-def]
    """Fills `start` and `end`; returns the index of an action that can never run, or -1.

    Devices take turns: each runs on until its next action waits for one that has not ended yet. Arrays have two kinds of action
    (F, B), or four (F, B, I, W).
    """
    num_devices, last, split = len(bounds) - 1, durations.shape[1] - 1, durations.shape[0] > 2
    position = bounds[:-1].copy()
    clock = np.zeros(num_devices)
    left = len(actions)
    while left > 0:
        before = left
        for device in range(num_devices):
            while position[device] < bounds[device + 1]:
                stage, kind, m = actions[position[device]]
                ready = _arrival(stage, kind, m, last, split, end, transfers)
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
def _arrival(stage, kind, m, last, split, end, transfers):  # type: ignore[no-untyped-def]
    """When the input of an action is there; infinite while its producer has not run."""
    if kind == 0:
        return 0.0 if stage == 0 else end[0, stage - 1, m] + transfers[0, stage - 1, m]
    if kind == 3:
        return end[2, stage, m]
    if stage == last:
        return end[0, stage, m]
    gradient = end[1, stage + 1, m]
    if split:
        gradient = min(gradient, end[2, stage + 1, m])
    return max(end[0, stage, m], gradient + transfers[1, stage, m])


@njit(cache=True, nogil=True)
def peak_of_order(actions, labels, stored, waiting, workspace, base):  # type: ignore[no-untyped-def]
    """The most bytes one device holds that runs these actions in order; action m is of micro-batch `labels[m]`."""
    level = peak = base
    for index in range(len(actions)):
        stage, kind, slot = actions[index]
        m = labels[slot]
        if kind == 0:
            level += stored[stage, m]
        peak = max(peak, level + workspace[kind, stage, m])
        if kind == 1:
            level -= stored[stage, m]
        elif kind == 2:
            level -= stored[stage, m] - waiting[stage, m]
        elif kind == 3:
            level -= waiting[stage, m]
    return peak


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    actions = np.array([[0, 0, 0], [0, 1, 0]], dtype=np.int32)
    ones = np.ones((2, 1, 1))
    run_orders(actions, np.array([0, 2]), ones, np.ones((2, 0, 1)), np.full((2, 1, 1), np.inf), np.full((2, 1, 1), np.inf))
    peak_of_order(actions, np.arange(1), ones[0], ones[0], np.ones((4, 1, 1)), np.float64(0.0))
