"""The whole simulator as slow plain Python: a list of coming events, the earliest of which is looked for each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from penstock.timing.workload import Workload


@dataclass
class SlowExecution:
    """What `SlowPipeline.run` finds out, by action, by (direction, cut, micro-batch) and by stage."""

    spans: dict[Action, tuple[float, float]] = field(default_factory=dict)
    transfers: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    after: dict[int, tuple[float, float]] = field(default_factory=dict)
    memory: list[tuple[int, float, float]] = field(default_factory=list)


class SlowPipeline:
    """Devices, links and streams as lists; an event is (time, rank among equals, what, whose)."""

    def __init__(self, schedule: Schedule, workload: Workload) -> None:
        self.work, self.found = workload, SlowExecution()
        self.todo = [list(actions) for actions in schedule]
        self.level = workload.base_bytes.tolist()
        self.running: list[object] = [None] * len(schedule)
        self.streams: list[int | None] = [None] * len(schedule)
        self.due: set[int] = set()
        self.link_queues: dict[int, list[tuple[int, int, int]]] = {}
        self.begun: dict[object, float] = {}
        self.events: list[tuple[float, tuple[int, ...], str, object]] = []

    def run(self) -> SlowExecution:
        """Everything that can happen."""
        for device in range(len(self.todo)):
            self.note(device, 0.0)
            self.events.append((0.0, (2, device), "wake", device))
        while self.events:
            event = min(self.events, key=lambda each: each[:2])
            self.events.remove(event)
            time, _, what, whose = event
            getattr(self, f"on_{what}")(time, whose)
        return self.found

    def note(self, device: int, time: float, extra: float = 0.0) -> None:
        self.found.memory.append((device, time, self.level[device] + extra))

    def on_wake(self, time: float, device: int) -> None:
        self.go_on(device, time)

    def on_action(self, time: float, action: Action) -> None:
        stage, kind, m = action
        device = self.work.devices[stage]
        self.found.spans[action] = self.begun[action], time
        self.running[device] = None
        stored, waiting = float(self.work.stored_bytes[stage, m]), float(self.work.waiting_bytes[stage, m])
        freed = {FORWARD: 0.0, BACKWARD: stored, INPUT_GRAD: stored - waiting, WEIGHT_GRAD: waiting}[kind]
        transfer = None
        if kind == FORWARD and stage + 1 < self.work.num_stages:
            transfer = (0, stage, m)
        if kind in (BACKWARD, INPUT_GRAD):
            if stage + 1 < self.work.num_stages and self.work.devices[stage + 1] != device:
                freed += float(self.work.message_bytes[1, stage, m])
            transfer = (1, stage - 1, m) if stage else None
        self.level[device] -= freed
        self.note(device, time)
        if transfer is not None:
            self.send(transfer, time)
        if not any(each.stage == stage for actions in self.todo for each in actions):
            if self.work.after_s[stage] == 0:
                self.found.after[stage] = time, time
            else:
                self.due.add(stage)
                if self.work.overlap and self.streams[device] is None:
                    self.start_after(device, time)
        self.go_on(device, time)

    def ends_of(self, transfer: tuple[int, int, int]) -> tuple[int, int]:
        direction, cut, _ = transfer
        ends = self.work.devices[cut], self.work.devices[cut + 1]
        return ends if direction == 0 else ends[::-1]

    def send(self, transfer: tuple[int, int, int], time: float) -> None:
        sender, receiver = self.ends_of(transfer)
        if not self.work.overlap and sender != receiver:
            self.running[sender] = transfer
        link = int(self.work.links[transfer[0], transfer[1]])
        if link < 0:
            self.begin(transfer, time)
            return
        queue = self.link_queues.setdefault(link, [])
        queue.append(transfer)
        if len(queue) == 1:
            self.begin(transfer, time)

    def begin(self, transfer: tuple[int, int, int], time: float) -> None:
        direction, cut, m = transfer
        self.begun[transfer] = time
        link = int(self.work.links[direction, cut])
        rank = (3, direction, cut, m) if link < 0 else (1, link)
        self.events.append((time + float(self.work.transfers_s[transfer]), rank, "transfer", transfer))
        sender, receiver = self.ends_of(transfer)
        if sender != receiver:
            self.level[receiver] += float(self.work.message_bytes[transfer])
            self.note(receiver, time)

    def on_transfer(self, time: float, transfer: tuple[int, int, int]) -> None:
        link = int(self.work.links[transfer[0], transfer[1]])
        if link >= 0:
            self.link_queues[link].pop(0)
            if self.link_queues[link]:
                self.begin(self.link_queues[link][0], time)
        self.found.transfers[transfer] = self.begun[transfer], time
        sender, receiver = self.ends_of(transfer)
        if self.running[sender] == transfer:
            self.running[sender] = None
            self.go_on(receiver, time)
            self.go_on(sender, time)
        else:
            self.go_on(receiver, time)

    def start_after(self, device: int, time: float) -> bool:
        own = [stage for stage in self.due if self.work.devices[stage] == device]
        if not own:
            return False
        stage = max(own)
        self.due.remove(stage)
        self.streams[device] = stage
        self.begun[stage] = time
        self.events.append((time + float(self.work.after_s[stage]), (2, device), "after", stage))
        return True

    def on_after(self, time: float, stage: int) -> None:
        device = self.work.devices[stage]
        self.found.after[stage] = self.begun[stage], time
        self.streams[device] = None
        if self.work.overlap:
            self.start_after(device, time)
        else:
            self.running[device] = None
        self.go_on(device, time)

    def go_on(self, device: int, time: float) -> None:
        if self.running[device] is not None:
            return
        if not self.work.overlap and self.start_after(device, time):
            self.running[device] = "after"
            return
        if not self.todo[device] or not self.is_ready(self.todo[device][0]):
            return
        action = self.todo[device].pop(0)
        stage, kind, m = action
        self.running[device] = action
        self.begun[action] = time
        if kind == FORWARD:
            self.level[device] += float(self.work.stored_bytes[stage, m])
            if stage and self.work.devices[stage - 1] != device:
                self.level[device] -= float(self.work.message_bytes[0, stage - 1, m])
        self.note(device, time, float(self.work.workspace_bytes[kind, stage, m]))
        self.events.append((time + float(self.work.durations_s[kind, stage, m]), (0, device), "action", action))

    def is_ready(self, action: Action) -> bool:
        stage, kind, m = action
        if kind == FORWARD:
            return stage == 0 or (0, stage - 1, m) in self.found.transfers
        if kind == WEIGHT_GRAD:
            return Action(stage, INPUT_GRAD, m) in self.found.spans
        there = stage + 1 == self.work.num_stages or (1, stage, m) in self.found.transfers
        return there and Action(stage, FORWARD, m) in self.found.spans
