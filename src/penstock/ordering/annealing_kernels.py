"""The schedule search's inner loop, compiled: annealing over the order of injection and the order of actions."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.timing.order_kernels import peak_of_order

__all__ = ["anneal", "warm"]

_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits
_COOLING = 60.0
_REACH = 6


@njit(cache=True, nogil=True)
def anneal(  # type: ignore[no-untyped-def]
    actions, bounds, durations, transfers, stored, waiting, workspace, base, limit, num_steps, seed, temperature, labels
):
    """Improves `actions` in place and fills `labels`, the micro-batch that runs in the place of each; returns the best makespan.

    A step exchanges two micro-batches, moves one to another place, or moves an action of a device by a few positions. It is taken
    if no device exceeds its limit and the makespan does not rise by more than a random share of the temperature, which falls to
    1 / 60. A makespan is given up as soon as one device's clock and remaining work exceed that.
    """
    np.random.seed(seed)
    num_devices, count = len(bounds) - 1, len(labels)
    ends = np.empty((2, durations.shape[1], count))
    clock, left, position = np.empty(num_devices), np.empty(num_devices), np.empty(num_devices, np.int64)
    now = best = _makespan(actions, bounds, labels, durations, transfers, np.inf, ends, clock, left, position)
    best_actions, best_labels = actions.copy(), labels.copy()
    for step in range(num_steps):
        heat = temperature * _COOLING ** (-step / num_steps)
        bound = now - heat * np.log(1.0 - np.random.random())
        kind = np.random.random()
        if kind < 0.5 and count > 1:
            a, b = np.random.randint(count), np.random.randint(count)
            if a == b:
                continue
            swap = kind < 0.3
            _relabel(labels, a, b, swap)
            found = np.inf
            if _all_fit(actions, bounds, labels, stored, waiting, workspace, base, limit):
                found = _makespan(actions, bounds, labels, durations, transfers, bound, ends, clock, left, position)
            if found > bound:
                _relabel(labels, b, a, swap)
                continue
        else:
            device = np.random.randint(num_devices)
            first, last = bounds[device], bounds[device + 1]
            if last - first < 2:
                continue
            a = np.random.randint(first, last)
            b = min(max(a + np.random.randint(1, _REACH + 1) * (1 if np.random.random() < 0.5 else -1), first), last - 1)
            if a == b or not _may_pass(actions, a, b):
                continue
            _move(actions, a, b)
            found = np.inf
            peak = peak_of_order(actions[first:last], labels, stored, waiting, workspace, base[device])
            if peak <= limit[device] * _ROUNDING:
                found = _makespan(actions, bounds, labels, durations, transfers, bound, ends, clock, left, position)
            if found > bound:
                _move(actions, b, a)
                continue
        now = found
        if now < best:
            best = now
            _copy(actions, labels, best_actions, best_labels)
    _copy(best_actions, best_labels, actions, labels)
    return best


@njit(cache=True, nogil=True)
def _copy(actions, labels, to_actions, to_labels):  # type: ignore[no-untyped-def]
    for index in range(len(actions)):
        for part in range(3):
            to_actions[index, part] = actions[index, part]
    for place in range(len(labels)):
        to_labels[place] = labels[place]


@njit(cache=True, nogil=True)
def _relabel(labels, a, b, swap):  # type: ignore[no-untyped-def]
    """Exchanges two micro-batches, or moves one from place a to place b; the same from b to a takes it back."""
    kept = labels[a]
    if swap:
        labels[a], labels[b] = labels[b], kept
        return
    step = 1 if b > a else -1
    for place in range(a, b, step):
        labels[place] = labels[place + step]
    labels[b] = kept


@njit(cache=True, nogil=True)
def _move(actions, a, b):  # type: ignore[no-untyped-def]
    """Moves the action at a to b; those between make room."""
    step = 1 if b > a else -1
    stage, kind, m = actions[a]
    for place in range(a, b, step):
        for part in range(3):
            actions[place, part] = actions[place + step, part]
    actions[b, 0], actions[b, 1], actions[b, 2] = stage, kind, m


@njit(cache=True, nogil=True)
def _may_pass(actions, a, b):  # type: ignore[no-untyped-def]
    """Whether no action between is of the same stage and micro-batch: their order is fixed."""
    step, may = 1 if b > a else -1, True
    for place in range(a + step, b + step, step):
        may = may and (actions[place, 0] != actions[a, 0] or actions[place, 2] != actions[a, 2])
    return may


@njit(cache=True, nogil=True)
def _all_fit(actions, bounds, labels, stored, waiting, workspace, base, limit):  # type: ignore[no-untyped-def]
    for device in range(len(base)):
        if limit[device] == np.inf:
            continue
        own = actions[bounds[device] : bounds[device + 1]]
        if peak_of_order(own, labels, stored, waiting, workspace, base[device]) > limit[device] * _ROUNDING:
            return False
    return True


@njit(cache=True, nogil=True)
def _makespan(actions, bounds, labels, durations, transfers, bound, ends, clock, left, position):  # type: ignore[no-untyped-def]
    """When the last action ends; infinite if the order deadlocks, or as soon as it is certain to exceed the bound."""
    num_devices, last, todo = len(bounds) - 1, durations.shape[1] - 1, len(actions)
    for stage in range(last + 1):
        for slot in range(len(labels)):
            ends[0, stage, slot] = ends[1, stage, slot] = np.inf
    for device in range(num_devices):
        clock[device], left[device], position[device] = 0.0, 0.0, bounds[device]
        for index in range(bounds[device], bounds[device + 1]):
            left[device] += durations[actions[index, 1], actions[index, 0], labels[actions[index, 2]]]
    longest = 0.0
    while todo > 0:
        before = todo
        for device in range(num_devices):
            while position[device] < bounds[device + 1]:
                stage, kind, slot = actions[position[device]]
                m, ready = labels[slot], 0.0
                if kind == 0:
                    if stage > 0:
                        ready = ends[0, stage - 1, slot] + transfers[0, stage - 1, m]
                elif kind < 3:
                    ready = ends[0, stage, slot]
                    if stage < last:
                        ready = max(ready, ends[1, stage + 1, slot] + transfers[1, stage, m])
                if ready == np.inf:
                    break
                begin, took = max(clock[device], ready), durations[kind, stage, m]
                if begin + left[device] > bound * _ROUNDING:
                    return np.inf
                left[device] -= took
                clock[device] = begin + took
                if kind < 3:
                    ends[min(kind, 1), stage, slot] = begin + took
                position[device] += 1
                todo -= 1
        if todo == before:
            return np.inf
    for device in range(num_devices):
        longest = max(longest, clock[device])
    return longest


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.ordering.annealing import refine
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.workload import workload_of

    refine(one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2))), num_steps=2)
