"""When each action of a schedule would run if transfers took no time: the order that all ranks derive theirs from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.errors import InputError, plural
from penstock.schedules.actions import BACKWARD, INPUT_GRAD, Action, Schedule
from penstock.timing.simulator import simulate
from penstock.timing.workload import Floats

__all__ = ["LoweringTimeline"]

_SHORTEST = 1e-6
"""As a share of the longest, so that no action takes no time at all: then no two actions of a device start at one moment."""


class LoweringTimeline:
    """Starts and ends of the actions on each device, in the order of the schedule."""

    def __init__(self, schedule: Schedule, durations_s: Sequence[Sequence[Sequence[float]]]) -> None:
        """`durations_s` is [kind][stage][micro-batch]; its sizes are those of the pipeline."""
        self.schedule = schedule
        self.position: dict[Action, int] = {}
        """Where an action stands on its device."""
        self.device: dict[int, int] = {}
        """The device of each stage."""
        self.backward: dict[tuple[int, int], Action] = {}
        """B or I of each stage and micro-batch."""
        times = np.array(durations_s, dtype=np.float64).reshape(len(durations_s), len(durations_s[0]), -1)
        _, num_stages, num_micro_batches = times.shape
        self._place(num_stages, num_micro_batches)
        times = np.maximum(times, _SHORTEST * times.max(initial=0.0) or 1.0)
        found = simulate(schedule, times, np.zeros((2, max(num_stages - 1, 0), num_micro_batches)))
        self.starts, self.ends = self._by_device(found.start_s), self._by_device(found.end_s)

    def _place(self, num_stages: int, num_micro_batches: int) -> None:
        for device, actions in enumerate(self.schedule):
            for position, action in enumerate(actions):
                if self.device.setdefault(action.stage, device) != device:
                    raise InputError(f"schedule: stage {action.stage} has actions on devices {self.device[action.stage]} and {device}.")
                if action.stage >= num_stages or action.micro_batch >= num_micro_batches:
                    raise InputError(
                        f"schedule: there is no {action} with {plural(num_stages, 'stage')} and {plural(num_micro_batches, 'micro-batch')}."
                    )
                if action in self.position:
                    raise InputError(f"schedule: action {action} is there twice.")
                self.position[action] = position
                if action.kind in (BACKWARD, INPUT_GRAD):
                    if (action.stage, action.micro_batch) in self.backward:
                        raise InputError(f"schedule: {action} is a second backward pass of the same stage and micro-batch.")
                    self.backward[action.stage, action.micro_batch] = action

    def _by_device(self, times_s: Floats) -> list[list[float]]:
        """Values of actions as a list for each device, in the order of its schedule."""
        values = times_s.tolist()
        return [[values[action.kind][action.stage][action.micro_batch] for action in actions] for actions in self.schedule]

    def start(self, action: Action) -> float:
        """When an action starts."""
        return self.starts[self.device[action.stage]][self.position[action]]

    def end(self, action: Action) -> float:
        """When an action ends."""
        return self.ends[self.device[action.stage]][self.position[action]]
