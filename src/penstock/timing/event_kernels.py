"""The whole simulator, compiled: one event after the other in time, with links that take turns and memory that is counted.

An event is the end of something, on a *slot*: what device d computes (slot d), the transfer on link l (devices + l), the work after
the last backward pass on d (devices + links + d), or a transfer that waits for nothing (after those). Of events at one instant the
lowest slot comes first. At time 0 each device is woken by an event on its third slot.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["run_events", "warm"]

_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits


@njit(cache=True, nogil=True)
def run_events(  # type: ignore[no-untyped-def]
    actions, bounds, devices, durations, transfers, links, overlap, after, stored, waiting, workspace, message, limit,
    start, end, sent, arrived, after_start, after_end, level, peak, memory, violation,
):  # fmt: skip
    """Runs the actions; returns the index of one that can never run (-1 if all do), and the number of memory records.

    Inputs are those of a `Workload`. Filled are start and end of actions, of transfers (`sent`, `arrived`) and of the work after,
    all infinite before; `level`, at first what a device holds all the time; `peak`; rows (device, time, bytes) of `memory`; and
    the first `violation`, whose device is -1 before. It is one function, because handing two dozen arrays around costs more than
    the work itself.
    """
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
    """Compiles the kernel for the types it is called with."""
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.execution import execute
    from penstock.timing.workload import workload_of

    execute(one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2)), 1.0))
