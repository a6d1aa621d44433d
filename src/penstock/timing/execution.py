"""The whole simulation: beside the actions, transfers that share links, work after the last backward pass, memory over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import InputError, plural
from penstock.notebooks import Shown
from penstock.schedules.actions import Action, Schedule
from penstock.timing.simulator import Timeline, as_arrays, check_shapes, deadlock_message
from penstock.timing.workload import Floats, Integers, Workload

if TYPE_CHECKING:
    from penstock.timing.clock import Orders
    from penstock.timing.event_clock import Happened, HeldBytes, Work

__all__ = ["Execution", "Violation", "event_arrays", "execute"]


class Violation(NamedTuple):
    """The first moment at which a device holds more than it may."""

    device: int
    time_s: float
    memory_bytes: float
    limit_bytes: float

    def __str__(self) -> str:
        return f"device {self.device} holds {self.memory_bytes:.4g} bytes at {self.time_s:.4g} s, its limit is {self.limit_bytes:.4g}"


@dataclass(frozen=True)
class Execution(Timeline, Shown):
    """A timeline with everything else that happens; times are infinite where nothing does."""

    workload: Workload = field(kw_only=True)
    transfer_start_s: Floats = field(kw_only=True)
    """[2, stages - 1, micro-batches], as `Workload.transfers_s`."""
    transfer_end_s: Floats = field(kw_only=True)
    after_start_s: Floats = field(kw_only=True)
    """[stages]"""
    after_end_s: Floats = field(kw_only=True)
    peak_bytes: Floats = field(kw_only=True)
    """[devices]"""
    memory_device: Integers = field(kw_only=True)
    """Each change of memory in the order of time: the device,"""
    memory_time_s: Floats = field(kw_only=True)
    """when,"""
    memory_bytes: Floats = field(kw_only=True)
    """and what it holds from then on."""
    violation: Violation | None = field(kw_only=True)

    @property
    def makespan_s(self) -> float:
        """When the last action, transfer and work after them have ended."""
        ends = (self.end_s, self.transfer_end_s, self.after_end_s)
        return max(float(np.max(end[np.isfinite(end)], initial=0.0)) for end in ends)

    @property
    def pipeline_s(self) -> float:
        """When the last pass has ended."""
        return float(np.max(self.end_s[np.isfinite(self.end_s)], initial=0.0))

    def device_busy_s(self) -> Floats:
        """Time each device computes."""
        busy = np.zeros(self.workload.num_devices)
        np.add.at(busy, list(self.workload.devices), self.busy_s())
        return busy

    def sending_s(self) -> Floats:
        """Time each device's transfers take, summed over what it sends to other devices."""
        sent = np.zeros(self.workload.num_devices)
        devices, ran = self.workload.devices, np.isfinite(self.transfer_end_s)
        spans = np.subtract(self.transfer_end_s, self.transfer_start_s, out=np.zeros(ran.shape), where=ran).sum(axis=2)
        for (direction, cut), time_s in np.ndenumerate(spans):
            if devices[cut] != devices[cut + 1]:
                sent[devices[cut + direction]] += time_s
        return sent


def execute(schedule: Schedule, workload: Workload) -> Execution:
    """Runs the schedule; what exceeds a memory limit is told by `violation`, not stopped.

    Transfers over one link take turns in the order in which they were asked for; they begin as soon as there is something to send.
    """
    from penstock.timing.event_clock import run_events

    orders, work, happened, held = event_arrays(schedule, workload)
    check_shapes(orders.actions, workload.durations_s, workload.transfers_s)
    _check_placement(schedule, workload)
    stuck = run_events(orders, work, happened, held)
    if stuck >= 0:
        raise InputError(deadlock_message(schedule, Action(*map(int, orders.actions[stuck])), np.isfinite(happened.end)))
    records, (device, time_s, memory_bytes) = held.records[: held.num_records[0]], held.violation.tolist()
    violation = None if device < 0 else Violation(int(device), time_s, memory_bytes, float(workload.limit_bytes[int(device)]))
    return Execution(
        happened.start, happened.end, schedule, workload=workload, transfer_start_s=happened.sent, transfer_end_s=happened.arrived,
        after_start_s=happened.after_start, after_end_s=happened.after_end, peak_bytes=held.peak,
        memory_device=records[:, 0].astype(np.int64), memory_time_s=records[:, 1].copy(), memory_bytes=records[:, 2].copy(),
        violation=violation,
    )  # fmt: skip


def event_arrays(schedule: Schedule, workload: Workload) -> tuple[Orders, Work, Happened, HeldBytes]:
    """What the event clock takes: the schedule, the workload, and arrays for it to fill."""
    from penstock.timing.clock import Orders
    from penstock.timing.event_clock import Happened, HeldBytes, Work

    orders = Orders(*as_arrays(schedule))
    shape, cuts, num = workload.durations_s.shape, workload.transfers_s.shape, workload.num_devices
    work = Work(
        workload.durations_s, workload.transfers_s, np.array(workload.devices), workload.links, workload.overlap, workload.after_s,
        workload.stored_bytes, workload.waiting_bytes, workload.workspace_bytes, workload.message_bytes,
    )  # fmt: skip
    happened = Happened(*(np.full(dims, np.inf) for dims in (shape, shape, cuts, cuts, shape[1], shape[1])))
    most = num + 2 * len(orders.actions) + workload.transfers_s.size  # changes of memory: at first, by actions, by messages
    held = HeldBytes(
        workload.base_bytes.copy(), np.zeros(num), workload.limit_bytes, np.empty((most, 3)), np.zeros(1, np.int64), np.full(3, -1.0)
    )
    return orders, work, happened, held


def _check_placement(schedule: Schedule, workload: Workload) -> None:
    """Refuses actions on another device than their stage's, and actions that come twice."""
    if len(schedule) != workload.num_devices:
        raise InputError(f"execute: the schedule is for {plural(len(schedule), 'device')}, the workload for {workload.num_devices}.")
    for device, actions in enumerate(schedule):
        for action in actions:
            if workload.devices[action.stage] != device:
                raise InputError(f"execute: action {action} is on device {device}, its stage on {workload.devices[action.stage]}.")
        if len(set(actions)) < len(actions):
            twice = next(action for index, action in enumerate(actions) if action in actions[:index])
            raise InputError(f"execute: action {twice} is twice on device {device}.")
