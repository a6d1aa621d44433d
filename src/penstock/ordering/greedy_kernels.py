"""The greedy scheduler's inner loop, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.kernels import borrowing
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


class _Devices(NamedTuple):
    """[devices] what each has done and would do next."""

    free: Floats
    """When it has ended all so far."""
    level: Floats
    """What it holds,"""
    reserved: Floats
    """and what it must be able to hold besides."""
    written: Integers
    """Where its next action is written."""
    ran_forward: NDArray[np.bool_]
    """Whether its last pass, weight gradients apart, was a forward pass."""
    first_stage: Integers
    stale: NDArray[np.bool_]
    """Whether to choose anew: a choice changes only with the device's own state or with what arrives."""
    next_time: Floats
    next_stage: Integers
    next_kind: Integers


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
    num_stages, count, num_devices = load.durations.shape[1], len(rules.order), len(load.base)
    progress = _Progress(np.zeros((3, num_stages), np.int64), np.full((2, num_stages, count), np.inf))
    progress.arrived[0, 0] = 0.0
    first_stage = np.full(num_devices, num_stages)
    for stage in range(num_stages - 1, -1, -1):
        first_stage[load.devices[stage]] = stage
    devices = _Devices(
        np.zeros(num_devices), load.base.copy(), np.zeros(num_devices), bounds.copy(), np.zeros(num_devices, np.bool_), first_stage,
        np.ones(num_devices, np.bool_), np.empty(num_devices), np.empty(num_devices, np.int64), np.empty(num_devices, np.int64),
    )  # fmt: skip
    offers = _Offers(np.empty(3), np.empty(3, np.int64), np.empty(3, np.int64))
    return _schedule(load, rules, progress, devices, offers, actions), devices.free.max()


@borrowing
def _schedule(load, rules, progress, devices, offers, actions):  # type: ignore[no-untyped-def]
    """Runs one pass after the other, on the device that can start one first; returns how many."""
    total = 0
    while True:
        soonest = 0
        for device in range(len(devices.free)):
            if devices.stale[device]:
                _choose(device, load, rules, progress, devices, offers)
            if devices.next_time[device] < devices.next_time[soonest]:
                soonest = device
        if devices.next_time[soonest] == np.inf:
            return total
        _run_next(soonest, load, rules, progress, devices, actions)
        total += 1


@borrowing
def _run_next(device, load, rules, progress, devices, actions):  # type: ignore[no-untyped-def]
    """Runs what a device has chosen, and notes what it holds and what arrives elsewhere afterwards."""
    stage, kind = devices.next_stage[device], devices.next_kind[device]
    row = 2 if kind == 3 else min(kind, 1)
    position = progress.done[row, stage]
    m = rules.order[position]
    progress.done[row, stage] += 1
    end = devices.next_time[device] + load.durations[kind, stage, m]
    devices.free[device], devices.stale[device] = end, True
    index = devices.written[device]
    actions[index, 0], actions[index, 1], actions[index, 2] = stage, kind, m
    devices.written[device] = index + 1
    if kind != 3:
        devices.ran_forward[device] = kind == 0
        _deliver(kind, stage, position, end, load, rules, progress, devices)
    if kind == 0:
        devices.level[device] += load.stored[stage, m]
        if rules.reserve:
            _reserve(device, stage, m, load, devices)
    elif kind == 1:
        devices.level[device] -= load.stored[stage, m]
    elif kind == 2:
        devices.level[device] -= load.stored[stage, m] - load.waiting[stage, m]
    else:
        devices.level[device] -= load.waiting[stage, m]


@borrowing
def _deliver(kind, stage, position, end, load, rules, progress, devices):  # type: ignore[no-untyped-def]
    """Notes when the output of a pass is where it is needed; the device there chooses anew."""
    m, last = rules.order[position], len(load.devices) - 1
    if kind == 0 and stage == last:
        progress.arrived[1, stage, position] = end
    elif kind == 0:
        progress.arrived[0, stage + 1, position] = end + load.transfers[0, stage, m]
        devices.stale[load.devices[stage + 1]] = True
    elif stage > 0:
        progress.arrived[1, stage - 1, position] = end + load.transfers[1, stage - 1, m]
        devices.stale[load.devices[stage - 1]] = True


@borrowing
def _reserve(device, stage, m, load, devices):  # type: ignore[no-untyped-def]
    """Reserves room for a micro-batch in all later stages of the device when it comes to the first, and takes it up in each of them."""
    if stage != devices.first_stage[device]:
        devices.reserved[device] -= load.stored[stage, m]
        return
    for later in range(stage + 1, len(load.devices)):
        if load.devices[later] == device:
            devices.reserved[device] += load.stored[later, m]


@borrowing
def _choose(device, load, rules, progress, devices, offers):  # type: ignore[no-untyped-def]
    """Notes what the device would do next, and when; the time is infinite if it can only wait."""
    devices.stale[device] = False
    blocked = _collect_offers(device, load, rules, progress, devices, offers)
    times, kinds = offers.times, (0, 2 if rules.split else 1, 3)
    earliest = 0
    for row in range(1, 3):
        if times[row] < times[earliest]:
            earliest = row
    devices.next_time[device] = times[earliest]
    if times[earliest] == np.inf:
        return
    m = rules.order[offers.positions[earliest]]
    horizon = times[earliest] + rules.patience * load.durations[kinds[earliest], offers.stages[earliest], m]
    choice = 2
    if times[2] > horizon or not (rules.weights == 0 or (rules.weights == 2 and blocked)):
        forward_first = not devices.ran_forward[device] if rules.first_kind == 2 else rules.first_kind == 0
        preferred, other = (0, 1) if forward_first else (1, 0)
        if times[preferred] <= horizon:
            choice = preferred
        elif times[other] <= horizon:
            choice = other
    devices.next_time[device], devices.next_stage[device], devices.next_kind[device] = times[choice], offers.stages[choice], kinds[choice]


@borrowing
def _collect_offers(device, load, rules, progress, devices, offers):  # type: ignore[no-untyped-def]
    """Fills `offers` with what the device could do; returns whether a forward pass is there that must wait for a backward pass."""
    done, arrived, free, first = progress.done, progress.arrived, devices.free[device], devices.first_stage[device]
    level, count, blocked = devices.level[device] + devices.reserved[device], len(rules.order), False
    for row in range(3):  # the best F, B or I, W
        offers.times[row], offers.stages[row], offers.positions[row] = np.inf, -1, count
    for stage in range(first, len(load.devices)):
        if load.devices[stage] != device:
            continue
        backward = done[1, stage]
        if backward < count and backward < done[0, stage]:
            _offer(offers, 1, max(free, arrived[1, stage, backward]), stage, backward)
        if rules.split and done[2, stage] < backward:
            _offer(offers, 2, free, stage, done[2, stage])
        forward = done[0, stage]
        if forward == count or arrived[0, stage, forward] == np.inf:
            continue
        shallow = forward - done[2 if rules.split else 1, stage] < rules.depths[stage]
        if shallow and _fits(device, stage, rules.order[forward], load, rules, done, level, first):
            _offer(offers, 0, max(free, arrived[0, stage, forward]), stage, forward)
        elif arrived[0, stage, forward] <= free:
            blocked = True
    return blocked


@borrowing
def _offer(offers, row, time, stage, position):  # type: ignore[no-untyped-def]
    """Keeps the earliest, of equal ones the first in the order of injection."""
    times, stages, positions = offers
    if time < times[row] or (time == times[row] and position < positions[row]):
        times[row], stages[row], positions[row] = time, stage, position


@borrowing
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


@borrowing
def _later(stage, m, workspace, split):  # type: ignore[no-untyped-def]
    """The workspace of a backward pass, whole or in halves."""
    return max(workspace[2, stage, m], workspace[3, stage, m]) if split else workspace[1, stage, m]


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.ordering.greedy import greedy
    from penstock.timing.workload import workload_of

    greedy(workload_of(np.ones((2, 2, 2))))
