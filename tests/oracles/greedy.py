"""The greedy scheduler as slow plain Python: all that could be done next is listed, the best of it taken."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.ordering.greedy import Greed
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from penstock.timing.workload import Workload


class SlowGreedy:
    """Counts what each stage has done; memory is added up anew from what is in flight at every choice."""

    def __init__(self, workload: Workload, greed: Greed, order: Sequence[int], reserve: bool) -> None:
        self.work, self.greed, self.order, self.reserve = workload, greed, list(order), reserve
        self.ends: dict[Action, float] = {}
        self.free = [0.0] * workload.num_devices
        self.actions: list[list[Action]] = [[] for _ in range(workload.num_devices)]
        self.backward = INPUT_GRAD if greed.split else BACKWARD
        self.final = WEIGHT_GRAD if greed.split else BACKWARD

    def run(self) -> Schedule | None:
        """The schedule, or None where memory stops every device."""
        while True:
            choices = [choice for device in range(len(self.free)) if (choice := self.choose(device))]
            if not choices:
                break
            time, device, action = min(choices, key=lambda choice: choice[:2])
            self.ends[action] = self.free[device] = time + float(self.work.durations_s[action.kind, action.stage, action.micro_batch])
            self.actions[device].append(action)
        total = (3 if self.greed.split else 2) * self.work.num_stages * len(self.order)
        return tuple(map(tuple, self.actions)) if len(self.ends) == total else None

    def next_of(self, stage: int, kind: int) -> int | None:
        """The micro-batch that comes next."""
        return next((m for m in self.order if Action(stage, kind, m) not in self.ends), None)

    def ready(self, action: Action) -> float | None:
        """When what the action takes is there, if that is known."""
        stage, kind, m = action
        if kind == FORWARD:
            if stage == 0:
                return 0.0
            before = self.ends.get(Action(stage - 1, FORWARD, m))
            return None if before is None else before + float(self.work.transfers_s[0, stage - 1, m])
        if kind == WEIGHT_GRAD:
            return self.ends.get(Action(stage, INPUT_GRAD, m))
        if Action(stage, FORWARD, m) not in self.ends:
            return None
        if stage == self.work.num_stages - 1:
            return self.ends[Action(stage, FORWARD, m)]
        after = self.ends.get(Action(stage + 1, self.backward, m))
        return None if after is None else after + float(self.work.transfers_s[1, stage, m])

    def choose(self, device: int) -> tuple[float, int, Action] | None:
        """(time, device, action) of what the device does next."""
        offers: list[tuple[float, int, int, Action]] = []
        blocked = False
        own = self.work.stages_of(device)
        for kind in (FORWARD, self.backward, *([WEIGHT_GRAD] if self.greed.split else [])):
            found = []
            for stage in own:
                m = self.next_of(stage, kind)
                ready = None if m is None else self.ready(Action(stage, kind, m))
                if m is None or ready is None:
                    continue
                if kind == FORWARD and not self.fits(device, stage, m):
                    blocked |= ready <= self.free[device]
                    continue
                found.append((max(self.free[device], ready), self.order.index(m), Action(stage, kind, m)))
            if found:
                time, _, action = min(found, key=lambda offer: offer[:2])
                offers.append((time, self.rank(device, kind, blocked), kind, action))
        if not offers:
            return None
        soonest, _, _, first = min(offers, key=lambda offer: offer[0])
        horizon = soonest + self.greed.patience * float(self.work.durations_s[first.kind, first.stage, first.micro_batch])
        time, _, _, action = min((offer for offer in offers if offer[0] <= horizon), key=lambda offer: offer[1])
        return time, device, action

    def rank(self, device: int, kind: int, blocked: bool) -> int:
        """The lowest goes first at equal times; `blocked` is known once forward passes were looked at."""
        if kind == WEIGHT_GRAD:
            return -1 if self.greed.weights == "soon" or (self.greed.weights == "for memory" and blocked) else 3
        passes = [action for action in self.actions[device] if action.kind != WEIGHT_GRAD]
        forward_first = {"forward": True, "backward": False, "alternate": not passes or passes[-1].kind != FORWARD}[self.greed.first]
        return 0 if (kind == FORWARD) == forward_first else 1

    def fits(self, device: int, stage: int, m: int) -> bool:
        """Room for the forward pass now, and for the largest later pass of all that is then held."""
        held = [(own, other) for own in self.work.stages_of(device) for other in self.order if self.holds(own, other)]
        depth = self.greed.depths[stage] if self.greed.depths else len(self.order)
        if sum(own == stage for own, _ in held) >= depth:
            return False
        stages = self.work.stages_of(device)
        if self.reserve and stage != stages[0]:
            return True
        coming = [(own, m) for own in stages] if self.reserve else [(stage, m)]
        level, largest = float(self.work.base_bytes[device]), 0.0
        for own, other in held:
            gone = Action(own, INPUT_GRAD, other) in self.ends
            level += float((self.work.waiting_bytes if gone else self.work.stored_bytes)[own, other])
        if self.reserve:
            expected = [
                (own, other) for own in stages[1:] for other in self.order
                if Action(stages[0], FORWARD, other) in self.ends and Action(own, FORWARD, other) not in self.ends
            ]  # fmt: skip
            level += sum(float(self.work.stored_bytes[pair]) for pair in expected)
            largest = max((float(self.work.workspace_bytes[(FORWARD, *pair)]) for pair in expected), default=0.0)
            held += expected
        later = [INPUT_GRAD, WEIGHT_GRAD] if self.greed.split else [BACKWARD]
        extra = max(
            [float(self.work.workspace_bytes[kind, own, other]) for own, other in held + coming for kind in later]
            + [float(self.work.workspace_bytes[FORWARD, own, other]) for own, other in coming]
            + [largest]
        )
        level += sum(float(self.work.stored_bytes[own, other]) for own, other in coming) + extra
        return level <= float(self.work.limit_bytes[device]) * (1 + 1e-9)

    def holds(self, stage: int, m: int) -> bool:
        """Whether the forward pass has run and the last of the backward pass has not."""
        return Action(stage, FORWARD, m) in self.ends and Action(stage, self.final, m) not in self.ends
