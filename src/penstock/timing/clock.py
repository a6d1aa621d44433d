"""The two pipeline clocks, compiled; everything that tells when an action of a schedule runs comes from one of them.

`run_orders` is the fixed-order clock: every device runs its actions in a given order, and transfers take time but wait for nothing.
`run_events` is the event clock: beside that, transfers take turns on links, work follows the last backward pass, and memory is counted
over time; it takes some twelve times as long. `simulator` and `execution` are the ways in for everyone but other kernels.
`special_clocks` holds faster copies for special cases, which tests hold equal to these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

__all__ = ["Happened", "HeldBytes", "Orders", "Work", "peak_of_order", "run_events", "run_orders", "warm"]

Floats = NDArray[np.float64]
_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits


class Orders(NamedTuple):
    """The actions of all devices, one device after the other."""

    actions: NDArray[np.int32]
    """Rows (stage, kind, micro-batch); kinds are F, B, I and W."""
    bounds: NDArray[np.int64]
    """Where the actions of each device begin, and the end of the last."""


class Work(NamedTuple):
    """What actions take and hold, see `workload.Workload`."""

    durations: Floats
    transfers: Floats
    devices: NDArray[np.int64]
    links: NDArray[np.int64]
    overlap: bool
    after: Floats
    stored: Floats
    waiting: Floats
    workspace: Floats
    message: Floats
    limit: Floats


class Happened(NamedTuple):
    """Filled by `run_events`: start and end of actions, of transfers and of the work after the last backward pass; infinite before."""

    start: Floats
    end: Floats
    sent: Floats
    arrived: Floats
    after_start: Floats
    after_end: Floats


class HeldBytes(NamedTuple):
    """Filled by `run_events`: what devices hold."""

    level: Floats
    """[devices] at first what a device holds all the time."""
    peak: Floats
    """[devices]"""
    records: Floats
    """Rows (device, time, bytes)."""
    violation: Floats
    """(device, time, bytes) when a device was first above its limit; the device is -1 before."""


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


@njit(cache=True, nogil=True)
def run_events(orders, work, happened, held):  # type: ignore[no-untyped-def]
    """Runs the actions; returns the index of one that can never run (-1 if all do), and the number of memory records.

    An event is the end of something, on a *slot*: what device d computes (slot d), the transfer on link l (devices + l), the work
    after the last backward pass on d (devices + links + d), or a transfer that waits for nothing (after those). Of events at one
    instant the lowest slot comes first. At time 0 each device is woken by an event on its third slot. It is one function, because
    handing two dozen arrays around costs more than the work itself.
    """
    actions, bounds = orders
    durations, transfers, devices, links, overlap, after, stored, waiting, workspace, message, limit = work
    start, end, sent, arrived, after_start, after_end = happened
    level, peak, memory, violation = held
    num_devices, num_links, last = len(bounds) - 1, links.max() + 1 if links.size else 0, durations.shape[1] - 1
    count, per_direction = transfers.shape[2], transfers.shape[1] * transfers.shape[2]
    position, busy = bounds[:-1].copy(), np.zeros(num_devices, np.bool_)
    on_link, last_in_queue = np.full(num_links, -1), np.full(num_links, -1)
    next_in_queue = np.full(2 * per_direction, -1)  # of each transfer, the one that uses the same link after it
    after_now, after_due = np.full(num_devices, -1), np.zeros(last + 1, np.bool_)
    left = np.zeros(last + 1, np.int64)
    for index in range(len(actions)):
        left[actions[index, 0]] += 1
    heap_time = np.empty(2 * num_devices + num_links + 2 * per_direction)
    heap_slot = np.empty(len(heap_time), np.int64)
    size = records = 0
    for device in range(num_devices):
        size = _push(heap_time, heap_slot, size, 0.0, num_devices + num_links + device)
        records = _record(memory, records, peak, limit, violation, device, 0.0, level[device])
    while size > 0:
        time, slot = heap_time[0], heap_slot[0]
        size = _pop(heap_time, heap_slot, size)
        begins = ended = woken = after_on = -1
        if slot < num_devices:
            stage, kind, m = actions[position[slot]]
            end[kind, stage, m] = time
            position[slot] += 1
            busy[slot] = False
            woken = slot
            wanted = -1
            if kind == 0:
                if stage < last:
                    wanted = stage * count + m
            else:
                freed = waiting[stage, m] if kind == 3 else stored[stage, m]
                if kind == 2:
                    freed -= waiting[stage, m]
                if kind != 3:
                    if stage < last and devices[stage + 1] != slot:
                        freed += message[1, stage, m]
                    if stage > 0:
                        wanted = per_direction + (stage - 1) * count + m
                level[slot] -= freed
            records = _record(memory, records, peak, limit, violation, slot, time, level[slot])
            if wanted >= 0:
                direction, cut = (0, stage) if kind == 0 else (1, stage - 1)
                link = links[direction, cut]
                if link < 0 or on_link[link] < 0:
                    begins = wanted
                else:
                    next_in_queue[last_in_queue[link]] = wanted
                    last_in_queue[link] = wanted
                if not overlap and devices[cut] != devices[cut + 1]:
                    busy[slot] = True
            left[stage] -= 1
            if left[stage] == 0:
                if after[stage] == 0.0:
                    after_start[stage] = after_end[stage] = time
                else:
                    after_due[stage] = True
                    after_on = slot
        elif slot < num_devices + num_links:
            ended = on_link[slot - num_devices]
            on_link[slot - num_devices] = -1
            begins = next_in_queue[ended]
        elif slot < 2 * num_devices + num_links:
            woken = slot - num_devices - num_links
            if after_now[woken] >= 0:
                after_end[after_now[woken]] = time
                after_now[woken] = -1
                after_on = woken
                if not overlap:
                    busy[woken] = False
        else:
            ended = slot - 2 * num_devices - num_links

        if begins >= 0:
            direction, cut, m = begins // per_direction, begins % per_direction // count, begins % count
            sent[direction, cut, m] = time
            link = links[direction, cut]
            if link >= 0:
                on_link[link] = begins
                if next_in_queue[begins] < 0:
                    last_in_queue[link] = begins
            its_slot = num_devices + link if link >= 0 else 2 * num_devices + num_links + begins
            size = _push(heap_time, heap_slot, size, time + transfers[direction, cut, m], its_slot)
            receiver = devices[cut + 1 - direction]
            if devices[cut + direction] != receiver:
                level[receiver] += message[direction, cut, m]
                records = _record(memory, records, peak, limit, violation, receiver, time, level[receiver])
        sender = -1
        if ended >= 0:
            direction, cut = ended // per_direction, ended % per_direction // count
            arrived[direction, cut, ended % count] = time
            woken = devices[cut + 1 - direction]
            if not overlap and devices[cut + direction] != woken:
                sender = devices[cut + direction]
                busy[sender] = False
        if overlap and after_on >= 0 and after_now[after_on] < 0:
            stage = _next_after(after_due, devices, after_on)
            if stage >= 0:
                after_due[stage], after_now[after_on], after_start[stage] = False, stage, time
                size = _push(heap_time, heap_slot, size, time + after[stage], num_devices + num_links + after_on)

        for device in (woken, sender):
            if device < 0 or busy[device]:
                continue
            stage = -1 if overlap else _next_after(after_due, devices, device)
            if stage >= 0:
                busy[device] = True
                after_due[stage], after_now[device], after_start[stage] = False, stage, time
                size = _push(heap_time, heap_slot, size, time + after[stage], num_devices + num_links + device)
                continue
            if position[device] == bounds[device + 1]:
                continue
            stage, kind, m = actions[position[device]]
            if not _is_ready(stage, kind, m, last, end, arrived):
                continue
            busy[device] = True
            start[kind, stage, m] = time
            if kind == 0:
                level[device] += stored[stage, m]
                if stage > 0 and devices[stage - 1] != device:
                    level[device] -= message[0, stage - 1, m]
            used = level[device] + workspace[kind, stage, m]
            records = _record(memory, records, peak, limit, violation, device, time, used)
            size = _push(heap_time, heap_slot, size, time + durations[kind, stage, m], device)
    for device in range(num_devices):
        if position[device] < bounds[device + 1]:
            return position[device], records
    return -1, records


@njit(cache=True, nogil=True)
def _is_ready(stage, kind, m, last, end, arrived):  # type: ignore[no-untyped-def]
    """Whether everything the action takes is there."""
    if kind == 0:
        return stage == 0 or arrived[0, stage - 1, m] < np.inf
    if kind == 3:
        return end[2, stage, m] < np.inf
    return end[0, stage, m] < np.inf and (stage == last or arrived[1, stage, m] < np.inf)


@njit(cache=True, nogil=True)
def _next_after(due, devices, device):  # type: ignore[no-untyped-def]
    """The highest stage of the device whose last backward pass is over and whose work after it has not begun; -1 for none."""
    for stage in range(len(due) - 1, -1, -1):
        if due[stage] and devices[stage] == device:
            return stage
    return -1


@njit(cache=True, nogil=True)
def _record(memory, records, peak, limit, violation, device, time, level):  # type: ignore[no-untyped-def]
    """Notes the level of a device, and the first time that one is above its limit."""
    memory[records, 0], memory[records, 1], memory[records, 2] = device, time, level
    peak[device] = max(peak[device], level)
    if level > limit[device] * _ROUNDING and violation[0] < 0:
        violation[0], violation[1], violation[2] = device, time, level
    return records + 1


@njit(cache=True, nogil=True)
def _push(times, slots, size, time, slot):  # type: ignore[no-untyped-def]
    """Adds an event to the heap; returns its new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if times[parent] < time or (times[parent] == time and slots[parent] < slot):
            break
        times[child], slots[child] = times[parent], slots[parent]
        child = parent
    times[child], slots[child] = time, slot
    return size + 1


@njit(cache=True, nogil=True)
def _pop(times, slots, size):  # type: ignore[no-untyped-def]
    """Takes the first event off the heap; returns its new size."""
    size -= 1
    time, slot, hole = times[size], slots[size], 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (times[right] < times[child] or (times[right] == times[child] and slots[right] < slots[child])):
            child = right
        if time < times[child] or (time == times[child] and slot < slots[child]):
            break
        times[hole], slots[hole] = times[child], slots[child]
        hole = child
    times[hole], slots[hole] = time, slot
    return size


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.execution import execute
    from penstock.timing.order_memory import order_peak_bytes
    from penstock.timing.simulator import simulate
    from penstock.timing.workload import workload_of

    schedule, work = one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2)), 1.0)
    simulate(schedule, work.durations_s, work.transfers_s)
    execute(schedule, work)
    order_peak_bytes(schedule, work)
