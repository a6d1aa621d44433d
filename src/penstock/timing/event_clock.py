"""The event clock, compiled: a discrete-event simulation of the actions, of transfers that take turns on links, of work after the last
backward pass, and of memory over time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.kernels import borrowing
from penstock.timing.clock import Orders
from penstock.timing.workload import Floats, Integers

__all__ = ["Happened", "HeldBytes", "Work", "run_events", "warm"]

_ROUNDING = 1 + 1e-9  # sums of bytes that should equal a limit may exceed it in their last digits


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
    limit: Floats
    """[devices]"""
    records: Floats
    """Rows (device, time, bytes) of each change,"""
    num_records: Integers
    """[1] and how many there are so far."""
    violation: Floats
    """(device, time, bytes) when a device was first above its limit; the device is -1 before."""


class _Heap(NamedTuple):
    """A binary heap of events, the earliest first."""

    times: Floats
    slots: Integers
    size: Integers
    """[1]"""


class _Simulation(NamedTuple):
    """What is run, what came of it so far, and what is under way or waits.

    An event is the end of something, on a *slot*: what device d computes (slot d), the transfer on link l (`first_link` + l), the work
    after the last backward pass on d (`first_after` + d), or a transfer that waits for nothing (`first_unqueued` + its number).
    """

    orders: Orders
    work: Work
    happened: Happened
    held: HeldBytes
    first_link: int
    first_after: int
    first_unqueued: int
    position: Integers
    """[devices] the next action of each."""
    busy: NDArray[np.bool_]
    """[devices] whether it computes or, without overlap, sends."""
    on_link: Integers
    """[links] the transfer under way, -1 for none."""
    last_in_queue: Integers
    """[links] the last transfer that was asked for."""
    next_in_queue: Integers
    """[transfers] the one that uses the same link after it, -1 for none."""
    left: Integers
    """[stages] actions that have not ended."""
    due: NDArray[np.bool_]
    """[stages] whether the last backward pass has ended and the work after it has not begun."""
    after_of: Integers
    """[devices] the stage whose work after the last backward pass is under way, -1 for none."""
    heap: _Heap
    """The events to come."""


@njit(cache=True, nogil=True)
def run_events(orders, work, happened, held):  # type: ignore[no-untyped-def]
    """Runs the actions; returns the index of one that can never run, -1 if all do."""
    return _run(_simulation(orders, work, happened, held))


@borrowing
def _run(sim):  # type: ignore[no-untyped-def]
    """`run_events`. Of events at one instant the lowest slot comes first."""
    num_devices = len(sim.busy)
    for device in range(num_devices):
        _push(sim.heap, 0.0, sim.first_after + device)  # wakes the device
        _record(sim.held, device, 0.0, 0.0)
    while sim.heap.size[0] > 0:
        time, slot = _pop(sim.heap)
        sender = -1
        if slot < sim.first_link:
            woken = slot
            _end_action(sim, time, slot)
        elif slot < sim.first_after:
            transfer = _free_link(sim, time, slot - sim.first_link)
            woken, sender = _end_transfer(sim, time, transfer)
        elif slot < sim.first_unqueued:
            woken = slot - sim.first_after
            _end_after(sim, time, woken)
        else:
            woken, sender = _end_transfer(sim, time, slot - sim.first_unqueued)
        for device in (woken, sender):
            if device >= 0 and not sim.busy[device]:
                _begin_next(sim, time, device)
    for device in range(num_devices):
        if sim.position[device] < sim.orders.bounds[device + 1]:
            return sim.position[device]
    return -1


@njit(cache=True, nogil=True)
def _simulation(orders, work, happened, held):  # type: ignore[no-untyped-def]
    """A simulation in which nothing has begun."""
    num_devices, num_links = len(orders.bounds) - 1, work.links.max() + 1 if work.links.size else 0
    num_stages, num_transfers = work.durations.shape[1], 2 * work.transfers.shape[1] * work.transfers.shape[2]
    first_after = num_devices + num_links
    first_unqueued = first_after + num_devices
    left = np.zeros(num_stages, np.int64)
    for index in range(len(orders.actions)):
        left[orders.actions[index, 0]] += 1
    on_link, last_in_queue, next_in_queue = np.full(num_links, -1), np.full(num_links, -1), np.full(num_transfers, -1)
    heap = _Heap(np.empty(first_unqueued + num_transfers), np.empty(first_unqueued + num_transfers, np.int64), np.zeros(1, np.int64))
    return _Simulation(
        orders, work, happened, held, num_devices, first_after, first_unqueued, orders.bounds[:-1].copy(), np.zeros(num_devices, np.bool_),
        on_link, last_in_queue, next_in_queue, left, np.zeros(num_stages, np.bool_), np.full(num_devices, -1), heap,
    )  # fmt: skip


@borrowing
def _begin_next(sim, time, device):  # type: ignore[no-untyped-def]
    """Begins what an idle device does next, if what that takes is there."""
    work, happened, held = sim.work, sim.happened, sim.held
    if not work.overlap and _begin_after(sim, time, device):
        sim.busy[device] = True
        return
    if sim.position[device] == sim.orders.bounds[device + 1]:
        return
    stage, kind, m = sim.orders.actions[sim.position[device]]
    if not _is_ready(stage, kind, m, happened.end, happened.arrived):
        return
    sim.busy[device] = True
    happened.start[kind, stage, m] = time
    if kind == 0:
        held.level[device] += work.stored[stage, m]
        if stage > 0 and work.devices[stage - 1] != device:
            held.level[device] -= work.message[0, stage - 1, m]
    _record(sim.held, device, time, work.workspace[kind, stage, m])
    _push(sim.heap, time + work.durations[kind, stage, m], device)


@borrowing
def _is_ready(stage, kind, m, end, arrived):  # type: ignore[no-untyped-def]
    """Whether everything the action takes is there."""
    if kind == 0:
        return stage == 0 or arrived[0, stage - 1, m] < np.inf
    if kind == 3:
        return end[2, stage, m] < np.inf
    return end[0, stage, m] < np.inf and (stage == end.shape[1] - 1 or arrived[1, stage, m] < np.inf)


@borrowing
def _end_action(sim, time, device):  # type: ignore[no-untyped-def]
    """Ends what a device computes, frees its memory, and asks for its output to be sent."""
    work, last = sim.work, len(sim.left) - 1
    stage, kind, m = sim.orders.actions[sim.position[device]]
    sim.happened.end[kind, stage, m] = time
    sim.position[device] += 1
    sim.busy[device] = False
    if kind > 0:
        sim.held.level[device] -= _freed_bytes(work, device, stage, kind, m)
    _record(sim.held, device, time, 0.0)
    if kind == 0 and stage < last:
        _request_transfer(sim, time, device, 0, stage, m)
    elif (kind == 1 or kind == 2) and stage > 0:
        _request_transfer(sim, time, device, 1, stage - 1, m)
    sim.left[stage] -= 1
    if sim.left[stage] == 0 and work.after[stage] == 0.0:
        sim.happened.after_start[stage] = sim.happened.after_end[stage] = time
    elif sim.left[stage] == 0:
        sim.due[stage] = True
        if work.overlap:
            _begin_after(sim, time, device)


@borrowing
def _freed_bytes(work, device, stage, kind, m):  # type: ignore[no-untyped-def]
    """What a device no longer holds after a backward pass, or half of one."""
    if kind == 3:
        return work.waiting[stage, m]
    freed = work.stored[stage, m]
    if kind == 2:
        freed -= work.waiting[stage, m]
    if stage < len(work.after) - 1 and work.devices[stage + 1] != device:
        freed += work.message[1, stage, m]
    return freed


@borrowing
def _request_transfer(sim, time, sender, direction, cut, m):  # type: ignore[no-untyped-def]
    """Begins a transfer, or puts it at the end of its link's queue."""
    _, cuts, count = sim.work.transfers.shape
    transfer, link = (direction * cuts + cut) * count + m, sim.work.links[direction, cut]
    if link < 0 or sim.on_link[link] < 0:
        _begin_transfer(sim, time, transfer)
    else:
        sim.next_in_queue[sim.last_in_queue[link]] = transfer
        sim.last_in_queue[link] = transfer
    if not sim.work.overlap and sim.work.devices[cut] != sim.work.devices[cut + 1]:
        sim.busy[sender] = True


@borrowing
def _begin_transfer(sim, time, transfer):  # type: ignore[no-untyped-def]
    """Begins a transfer; from now on its receiver holds the message."""
    work, held = sim.work, sim.held
    direction, cut, m = _place_of(transfer, work.transfers.shape)
    sim.happened.sent[direction, cut, m] = time
    link = work.links[direction, cut]
    if link >= 0:
        sim.on_link[link] = transfer
        if sim.next_in_queue[transfer] < 0:
            sim.last_in_queue[link] = transfer
    _push(sim.heap, time + work.transfers[direction, cut, m], sim.first_link + link if link >= 0 else sim.first_unqueued + transfer)
    receiver = work.devices[cut + 1 - direction]
    if work.devices[cut + direction] != receiver:
        held.level[receiver] += work.message[direction, cut, m]
        _record(sim.held, receiver, time, 0.0)


@borrowing
def _free_link(sim, time, link):  # type: ignore[no-untyped-def]
    """Begins the next transfer on a link; returns the one that has ended."""
    transfer = sim.on_link[link]
    sim.on_link[link] = -1
    if sim.next_in_queue[transfer] >= 0:
        _begin_transfer(sim, time, sim.next_in_queue[transfer])
    return transfer


@borrowing
def _end_transfer(sim, time, transfer):  # type: ignore[no-untyped-def]
    """Ends a transfer; returns its receiver, and its sender if that has waited for it, else -1."""
    devices = sim.work.devices
    direction, cut, m = _place_of(transfer, sim.work.transfers.shape)
    sim.happened.arrived[direction, cut, m] = time
    sender, receiver = devices[cut + direction], devices[cut + 1 - direction]
    if sim.work.overlap or sender == receiver:
        return receiver, -1
    sim.busy[sender] = False
    return receiver, sender


@borrowing
def _place_of(transfer, shape):  # type: ignore[no-untyped-def]
    """(direction, cut, micro-batch) of a transfer."""
    _, cuts, count = shape
    return transfer // (cuts * count), transfer % (cuts * count) // count, transfer % count


@borrowing
def _begin_after(sim, time, device):  # type: ignore[no-untyped-def]
    """Begins the work after the last backward pass that is due on a device, the highest stage's first, unless some is under way; returns
    whether there was any."""
    if sim.after_of[device] >= 0:
        return False
    for stage in range(len(sim.due) - 1, -1, -1):
        if sim.due[stage] and sim.work.devices[stage] == device:
            sim.due[stage], sim.after_of[device], sim.happened.after_start[stage] = False, stage, time
            _push(sim.heap, time + sim.work.after[stage], sim.first_after + device)
            return True
    return False


@borrowing
def _end_after(sim, time, device):  # type: ignore[no-untyped-def]
    """Ends the work after a last backward pass, if this event is not the one that wakes the device."""
    if sim.after_of[device] < 0:
        return
    sim.happened.after_end[sim.after_of[device]] = time
    sim.after_of[device] = -1
    if sim.work.overlap:
        _begin_after(sim, time, device)
    else:
        sim.busy[device] = False


@borrowing
def _record(held, device, time, workspace):  # type: ignore[no-untyped-def]
    """Notes what a device holds, and the first time that one is above its limit."""
    level, number = held.level[device] + workspace, held.num_records[0]
    held.records[number, 0], held.records[number, 1], held.records[number, 2] = device, time, level
    held.num_records[0] = number + 1
    held.peak[device] = max(held.peak[device], level)
    if level > held.limit[device] * _ROUNDING and held.violation[0] < 0:
        held.violation[0], held.violation[1], held.violation[2] = device, time, level


@borrowing
def _push(heap, time, slot):  # type: ignore[no-untyped-def]
    """Adds an event."""
    times, slots, child = heap.times, heap.slots, heap.size[0]
    heap.size[0] = child + 1
    while child > 0:
        parent = (child - 1) >> 1
        if times[parent] < time or (times[parent] == time and slots[parent] < slot):
            break
        times[child], slots[child] = times[parent], slots[parent]
        child = parent
    times[child], slots[child] = time, slot


@borrowing
def _pop(heap):  # type: ignore[no-untyped-def]
    """Takes the first event off: its time and slot."""
    times, slots, size = heap.times, heap.slots, heap.size[0] - 1
    first_time, first_slot = times[0], slots[0]
    heap.size[0] = size
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
    return first_time, first_slot


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.schedules.orders import one_forward_one_backward
    from penstock.timing.execution import execute
    from penstock.timing.workload import workload_of

    execute(one_forward_one_backward(2, 2), workload_of(np.ones((2, 2, 2)), 1.0))
