"""The fixed-order clock, compiled: every device runs its actions in a given order, and transfers take time but wait for nothing.

Everything that tells when an action of a schedule runs comes from it or from `event_clock`, which simulates more and takes some twelve
times as long. `simulator` and `execution` are the ways in for everyone but other kernels; `special_clocks` holds faster copies for
special cases, which tests hold equal to these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["Orders", "peak_of_order", "run_orders", "warm"]

Floats = NDArray[np.float64]


class Orders(NamedTuple):
    """The actions of all devices, one device after the other."""

    actions: NDArray[np.int32]
    """Rows (stage, kind, micro-batch); kinds are F, B, I and W."""
    bounds: NDArray[np.int64]
    """Where the actions of each device begin, and the end of the last."""


@njit(cache=True, nogil=True)
def run_orders(orders, durations, transfers, start, end, labels=None, bound=None):  # type: ignore[no-untyped-def]
    """Fills `start` and `end`; returns the index of an action that can never run (-1 if all do), and when the last one ends.

    Devices take turns: each runs on until its next action waits for one that has not ended yet. Arrays have two kinds of action
    (F, B), or four (F, B, I, W). For searches `labels` gives the micro-batch that runs in the place of each, and as soon as one
    device's clock and remaining work exceed `bound` the time is infinite; `start` may be left out. What is None is not compiled.
    """
    actions, bounds = orders.actions, orders.bounds
    num_devices, last, split = len(bounds) - 1, durations.shape[1] - 1, durations.shape[0] > 2
    position, clock, left = bounds[:-1].copy(), np.zeros(num_devices), np.zeros(num_devices)
    for kind in range(end.shape[0]):
        for stage in range(last + 1):
            for slot in range(end.shape[2]):
                end[kind, stage, slot] = np.inf
    if bound is not None:
        for device in range(num_devices):
            for index in range(bounds[device], bounds[device + 1]):
                slot = actions[index, 2]
                left[device] += durations[actions[index, 1], actions[index, 0], slot if labels is None else labels[slot]]
    todo = len(actions)
    while todo > 0:
        before = todo
        for device in range(num_devices):
            while position[device] < bounds[device + 1]:
                stage, kind, slot = actions[position[device]]
                m = slot if labels is None else labels[slot]
                ready = _arrival(stage, kind, slot, m, last, split, end, transfers)
                if ready == np.inf:
                    break
                begin, took = max(clock[device], ready), durations[kind, stage, m]
                if bound is not None:
                    if begin + left[device] > bound:
                        return -1, np.inf
                    left[device] -= took
                if start is not None:
                    start[kind, stage, slot] = begin
                clock[device] = begin + took
                end[kind, stage, slot] = clock[device]
                position[device] += 1
                todo -= 1
        if todo == before:
            for device in range(num_devices):
                if position[device] < bounds[device + 1]:
                    return position[device], np.inf
    longest = 0.0
    for device in range(num_devices):
        longest = max(longest, clock[device])
    return -1, longest


@njit(cache=True, nogil=True, inline="always")
def _arrival(stage, kind, slot, m, last, split, end, transfers):  # type: ignore[no-untyped-def]
    """When the input of an action is there; infinite while its producer has not run."""
    if kind == 0:
        return 0.0 if stage == 0 else end[0, stage - 1, slot] + transfers[0, stage - 1, m]
    if kind == 3:
        return end[2, stage, slot]
    if stage == last:
        return end[0, stage, slot]
    gradient = end[1, stage + 1, slot]
    if split:
        gradient = min(gradient, end[2, stage + 1, slot])
    return max(end[0, stage, slot], gradient + transfers[1, stage, m])


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
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.order_memory import order_peak_bytes
    from penstock.timing.simulator import simulate
    from penstock.timing.workload import workload_of

    schedule, work = one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2)), 1.0)
    simulate(schedule, work.durations_s, work.transfers_s)
    order_peak_bytes(schedule, work)
