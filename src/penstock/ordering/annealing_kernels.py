"""The schedule search's inner loop, compiled: annealing over the order of injection and the order of actions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from penstock.timing.clock import peak_of_order, run_orders
from penstock.timing.workload import Floats

__all__ = ["Cooling", "Memory", "anneal", "warm"]

_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits
_COOLING = 60.0
_REACH = 6


class Memory(NamedTuple):
    """What actions hold on their devices, see `timing.workload.Workload`."""

    stored: Floats
    waiting: Floats
    workspace: Floats
    base: Floats
    limit: Floats


class Cooling(NamedTuple):
    """How long and how hot to search."""

    num_steps: int
    seed: int
    temperature: float


@njit(cache=True, nogil=True)
def anneal(orders, durations, transfers, memory, cooling, labels):  # type: ignore[no-untyped-def]
    """Improves the actions of `orders` in place and fills `labels`, the micro-batch that runs in the place of each; returns the best
    makespan.

    A step exchanges two micro-batches, moves one to another place, or moves an action of a device by a few positions. It is taken
    if no device exceeds its limit and the makespan does not rise by more than a random share of the temperature, which falls to
    1 / 60. A makespan is given up as soon as one device's clock and remaining work exceed that.
    """
    np.random.seed(cooling.seed)
    actions, bounds = orders.actions, orders.bounds
    num_devices, count = len(bounds) - 1, len(labels)
    ends = np.empty((durations.shape[0], durations.shape[1], count))
    now = best = run_orders(orders, durations, transfers, None, ends, labels, np.inf)[1]
    best_actions, best_labels = actions.copy(), labels.copy()
    for step in range(cooling.num_steps):
        heat = cooling.temperature * _COOLING ** (-step / cooling.num_steps)
        bound = now - heat * np.log(1.0 - np.random.random())
        kind = np.random.random()
        if kind < 0.5 and count > 1:
            a, b = np.random.randint(count), np.random.randint(count)
            if a == b:
                continue
            swap = kind < 0.3
            _relabel(labels, a, b, swap)
            found = np.inf
            if _all_fit(actions, bounds, labels, memory):
                found = run_orders(orders, durations, transfers, None, ends, labels, bound * _ROUNDING)[1]
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
            if _fits(actions[first:last], labels, memory, device):
                found = run_orders(orders, durations, transfers, None, ends, labels, bound * _ROUNDING)[1]
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
def _all_fit(actions, bounds, labels, memory):  # type: ignore[no-untyped-def]
    for device in range(len(memory.base)):
        if memory.limit[device] < np.inf and not _fits(actions[bounds[device] : bounds[device + 1]], labels, memory, device):
            return False
    return True


@njit(cache=True, nogil=True)
def _fits(own, labels, memory, device):  # type: ignore[no-untyped-def]
    peak = peak_of_order(own, labels, memory.stored, memory.waiting, memory.workspace, memory.base[device])
    return peak <= memory.limit[device] * _ROUNDING


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.ordering.annealing import refine
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.workload import workload_of

    refine(one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2))), num_steps=2)
