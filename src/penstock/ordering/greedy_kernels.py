"""The greedy scheduler's inner loop, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from penstock.timing.workload import Floats, Integers

__all__ = ["GreedLoad", "GreedRules", "list_schedule", "warm"]

_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits


class GreedLoad(NamedTuple):
    """What is to be scheduled, see `timing.workload.Workload`."""

    durations: Floats
    transfers: Floats
    devices: Integers
    stored: Floats
    waiting: Floats
    workspace: Floats
    base: Floats
    limit: Floats


class GreedRules(NamedTuple):
    """What a device does first, see `greedy.Greed`; words are the numbers of their places in the lists there."""

    order: Integers
    """Micro-batches in the order of injection."""
    depths: Integers
    split: bool
    first_kind: int
    weights: int
    patience: float
    reserve: bool


class _Progress(NamedTuple):
    done: Integers
    """[3, stages] F, B or I, W of each stage, in the order of injection."""
    arrived: Floats
    """[2, stages, micro-batches] when the input of F and of B is there, by position in the order."""


class _Offers(NamedTuple):
    """[3] the best F, B or I, W that a device could do: when, which stage, which position in the order."""

    times: Floats
    stages: Integers
    positions: Integers


@njit(cache=True, nogil=True)
def list_schedule(load, rules, bounds, actions):  # type: ignore[no-untyped-def]
    """Fills `actions` of device d from bounds[d] on; returns how many, fewer than all if memory stops every device, and the makespan.

    The device that can start something first does. What else it could start soon after, within `patience` times the duration of that,
    counts as ready too. Of a forward and a backward pass (I if `split`) that are ready, `first_kind` says which goes first: F (0),
    B (1), or the one that did not run last (2). Of several stages it is the one whose micro-batch is first in `order`. A forward pass
    must leave its stage at most `depths` micro-batches, and its device within its limit. `weights` says when a weight gradient runs:
    right after its input gradient (0), when there is nothing else to do (1), or also when a forward pass waits for the memory that it
    frees (2). With `reserve` a micro-batch comes to a device only once there is room for it in all stages of the device: those before
    it then always get through.
    """
    durations, transfers, devices, stored, waiting, _, base, _ = load
    order, reserve = rules.order, rules.reserve
    num_stages, count, num_devices = durations.shape[1], len(order), len(base)
    progress = _Progress(np.zeros((3, num_stages), np.int64), np.full((2, num_stages, count), np.inf))
    done, arrived = progress.done, progress.arrived
    for position in range(count):
        arrived[0, 0, position] = 0.0
    free, level, reserved, written = np.zeros(num_devices), base.copy(), np.zeros(num_devices), bounds.copy()
    ran_forward, first_of = np.zeros(num_devices, np.bool_), np.full(num_devices, num_stages)
    for stage in range(num_stages - 1, -1, -1):
        first_of[devices[stage]] = stage
    next_time, next_stage, next_kind = np.empty(num_devices), np.empty(num_devices, np.int64), np.empty(num_devices, np.int64)
    stale = np.ones(num_devices, np.bool_)  # a choice changes only with the device's own state or with what arrives
    offers = _Offers(np.empty(3), np.empty(3, np.int64), np.empty(3, np.int64))
    total = 0
    while True:
        device = 0
        for other in range(num_devices):
            if stale[other]:
                forward_first = not ran_forward[other] if rules.first_kind == 2 else rules.first_kind == 0
                next_time[other], next_stage[other], next_kind[other] = _choose(
                    other, load, rules, progress, free[other], level[other] + reserved[other], forward_first, first_of[other], offers
                )
                stale[other] = False
            if next_time[other] < next_time[device]:
                device = other
        if next_time[device] == np.inf:
            return total, free.max()
        stage, kind = next_stage[device], next_kind[device]
        row = 2 if kind == 3 else min(kind, 1)
        position = done[row, stage]
        m = order[position]
        done[row, stage] += 1
        end = next_time[device] + durations[kind, stage, m]
        free[device] = end
        stale[device] = True
        index = written[device]
        actions[index, 0], actions[index, 1], actions[index, 2] = stage, kind, m
        written[device] = index + 1
        total += 1
        if kind != 3:
            ran_forward[device] = kind == 0
        if kind == 0:
            level[device] += stored[stage, m]
            if reserve and stage != first_of[device]:
                reserved[device] -= stored[stage, m]
            elif reserve:
                for other in range(stage + 1, num_stages):
                    if devices[other] == device:
                        reserved[device] += stored[other, m]
            if stage + 1 < num_stages:
                arrived[0, stage + 1, position] = end + transfers[0, stage, m]
                stale[devices[stage + 1]] = True
            else:
                arrived[1, stage, position] = end
        elif kind == 3:
            level[device] -= waiting[stage, m]
        else:
            level[device] -= stored[stage, m] if kind == 1 else stored[stage, m] - waiting[stage, m]
            if stage > 0:
                arrived[1, stage - 1, position] = end + transfers[1, stage - 1, m]
                stale[devices[stage - 1]] = True


@njit(cache=True, nogil=True)
def _choose(device, load, rules, progress, free, level, forward_first, first, offers):  # type: ignore[no-untyped-def]
    """(time, stage, kind) of what the device would do next; the time is infinite if it can only wait."""
    order, depths, split, weights = rules.order, rules.depths, rules.split, rules.weights
    done, arrived = progress
    times, stages, positions = offers
    count, blocked = len(order), False
    for row in range(3):  # the best F, B or I, W
        times[row], stages[row], positions[row] = np.inf, -1, count
    for stage in range(first, len(load.devices)):
        if load.devices[stage] != device:
            continue
        backward = done[1, stage]
        if backward < count and backward < done[0, stage]:
            _offer(offers, 1, max(free, arrived[1, stage, backward]), stage, backward)
        if split and done[2, stage] < backward:
            _offer(offers, 2, free, stage, done[2, stage])
        forward = done[0, stage]
        if forward == count or arrived[0, stage, forward] == np.inf:
            continue
        shallow = forward - done[2 if split else 1, stage] < depths[stage]
        if shallow and _fits(device, stage, order[forward], load, rules, done, level, first):
            _offer(offers, 0, max(free, arrived[0, stage, forward]), stage, forward)
        elif arrived[0, stage, forward] <= free:
            blocked = True
    earliest = 0
    for row in range(1, 3):
        if times[row] < times[earliest]:
            earliest = row
    if times[earliest] == np.inf:
        return np.inf, -1, -1
    kinds = (0, 2 if split else 1, 3)
    horizon = times[earliest] + rules.patience * load.durations[kinds[earliest], stages[earliest], order[positions[earliest]]]
    choice = 2
    if times[2] > horizon or not (weights == 0 or (weights == 2 and blocked)):
        preferred, other = (0, 1) if forward_first else (1, 0)
        if times[preferred] <= horizon:
            choice = preferred
        elif times[other] <= horizon:
            choice = other
    return times[choice], stages[choice], kinds[choice]


@njit(cache=True, nogil=True)
def _offer(offers, row, time, stage, position):  # type: ignore[no-untyped-def]
    """Keeps the earliest, of equal ones the first in the order of injection."""
    times, stages, positions = offers
    if time < times[row] or (time == times[row] and position < positions[row]):
        times[row], stages[row], positions[row] = time, stage, position


@njit(cache=True, nogil=True)
def _fits(device, stage, m, load, rules, done, level, first):  # type: ignore[no-untyped-def]
    """Whether the device has room for the forward pass, and afterwards for any later pass of a micro-batch it then holds."""
    devices, stored, workspace, limit = load.devices, load.stored, load.workspace, load.limit[device]
    order, split, reserve = rules.order, rules.split, rules.reserve
    if limit == np.inf or (reserve and stage != first):
        return True
    needed, extra = stored[stage, m], workspace[0, stage, m]
    for other in range(first, len(devices)):
        if devices[other] != device:
            continue
        if reserve and other > stage:
            needed += stored[other, m]
        for position in range(done[2 if split else 1, other], done[0, first if reserve else other]):
            extra = max(extra, _later(other, order[position], workspace, split))
            if position >= done[0, other]:
                extra = max(extra, workspace[0, other, order[position]])
        if other == stage or reserve:
            extra = max(extra, _later(other, m, workspace, split))
            if reserve:
                extra = max(extra, workspace[0, other, m])
    return level + needed + extra <= limit * _ROUNDING


@njit(cache=True, nogil=True)
def _later(stage, m, workspace, split):  # type: ignore[no-untyped-def]
    """The workspace of a backward pass, whole or in halves."""
    return max(workspace[2, stage, m], workspace[3, stage, m]) if split else workspace[1, stage, m]


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.ordering.greedy import greedy
    from penstock.timing.workload import workload_of

    greedy(workload_of(np.ones((2, 2, 2))))
