"""When each action of a schedule would run if transfers took no time: the order that all ranks derive theirs from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from penstock.errors import InputError
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule

__all__ = ["Timeline"]

_SHORTEST = 1e-6
"""As a share of the longest, so that no action takes no time at all."""

Pass = tuple[int, int, bool]
"""(stage, micro-batch, backward): what other stages wait for; the backward pass ends with B or I."""


class Timeline:
    """Starts and ends of the actions on each device, in the order of the schedule."""

    def __init__(self, schedule: Schedule, durations_s: Sequence[Sequence[Sequence[float]]]) -> None:
        """`durations_s` is [kind][stage][micro-batch]; its sizes are those of the pipeline."""
        self.schedule = schedule
        self.starts: list[list[float]] = [[] for _ in schedule]
        self.ends: list[list[float]] = [[] for _ in schedule]
        self.position: dict[Action, int] = {}
        """Where an action stands on its device."""
        self.device: dict[int, int] = {}
        """The device of each stage."""
        self.backward: dict[tuple[int, int], Action] = {}
        """B or I of each stage and micro-batch."""
        sizes = len(durations_s[0]), len(durations_s[0][0])
        self._place(*sizes)
        self._run(sizes[0], durations_s)

    def _place(self, num_stages: int, num_micro_batches: int) -> None:
        for device, actions in enumerate(self.schedule):
            for position, action in enumerate(actions):
                if self.device.setdefault(action.stage, device) != device:
                    raise InputError(f"schedule: stage {action.stage} has actions on devices {self.device[action.stage]} and {device}.")
                if action.stage >= num_stages or action.micro_batch >= num_micro_batches:
                    raise InputError(f"schedule: there is no {action} with {num_stages} stages and {num_micro_batches} micro-batches.")
                if action in self.position:
                    raise InputError(f"schedule: action {action} is there twice.")
                self.position[action] = position
                if action.kind in (BACKWARD, INPUT_GRAD):
                    if (action.stage, action.micro_batch) in self.backward:
                        raise InputError(f"schedule: {action} is a second backward pass of the same stage and micro-batch.")
                    self.backward[action.stage, action.micro_batch] = action

    def _run(self, num_stages: int, durations_s: Sequence[Sequence[Sequence[float]]]) -> None:
        """Runs each device as far as it can, then those that waited for what it did."""
        least = _SHORTEST * max((float(value) for kind in durations_s for row in kind for value in row), default=1.0) or 1.0
        done: dict[Pass, float] = {}
        waiting: dict[Pass, int] = {}
        ready = deque(range(len(self.schedule)))
        while ready:
            device = ready.popleft()
            actions, starts, ends = self.schedule[device], self.starts[device], self.ends[device]
            time = ends[-1] if ends else 0.0
            for action in actions[len(ends) :]:
                stage, kind, micro = action
                missing: Pass | None = None
                for need in _needs(action, num_stages):
                    if need not in done:
                        missing = need
                        break
                    time = max(time, done[need])
                if missing is not None:
                    waiting[missing] = device
                    break
                starts.append(time)
                time += max(durations_s[kind][stage][micro], least)
                ends.append(time)
                if kind == WEIGHT_GRAD:
                    continue
                made = (stage, micro, kind != FORWARD)
                done[made] = time
                if made in waiting:
                    ready.append(waiting.pop(made))
        for device, actions in enumerate(self.schedule):
            if len(self.ends[device]) < len(actions):
                raise InputError(
                    f"schedule: device {device} waits for ever before {actions[len(self.ends[device])]}; the orders contradict."
                )

    def start(self, action: Action) -> float:
        """When an action starts."""
        return self.starts[self.device[action.stage]][self.position[action]]

    def end(self, action: Action) -> float:
        """When an action ends."""
        return self.ends[self.device[action.stage]][self.position[action]]


def _needs(action: Action, num_stages: int) -> tuple[Pass, ...]:
    stage, kind, micro = action
    if kind == FORWARD:
        return ((stage - 1, micro, False),) if stage else ()
    if kind == WEIGHT_GRAD:
        return ((stage, micro, True),)
    own = (stage, micro, False)
    return (own, (stage + 1, micro, True)) if stage + 1 < num_stages else (own,)
