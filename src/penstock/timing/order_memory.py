"""What a schedule holds: micro-batches in flight on each stage and device, and bytes, told from the order of actions alone.

A device runs its actions one after the other, so that what it holds depends on their order, not on when they run. Only messages
that have arrived too early come on top; `execution` counts those.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from penstock.timing.simulator import as_arrays
from penstock.timing.workload import Floats, Workload

__all__ = ["InFlight", "in_flight", "order_peak_bytes"]

_CHANGES = {FORWARD: 1, BACKWARD: -1, INPUT_GRAD: 0, WEIGHT_GRAD: -1}
_WAITING_CHANGES = {FORWARD: 0, BACKWARD: 0, INPUT_GRAD: 1, WEIGHT_GRAD: -1}


@dataclass(frozen=True)
class InFlight:
    """The most micro-batches held at once, from their forward pass until B, or until W where the backward pass is split."""

    by_stage: tuple[int, ...]
    by_device: tuple[int, ...]
    """Pairs of stage and micro-batch."""
    waiting: tuple[int, ...]
    """By stage, those that only wait for W."""


def in_flight(schedule: Schedule) -> InFlight:
    """What each stage and device holds at its fullest moment."""
    num_stages = 1 + max((action.stage for actions in schedule for action in actions), default=-1)
    own: list[list[Action]] = [[] for _ in range(num_stages)]
    for actions in schedule:
        for action in actions:
            own[action.stage].append(action)
    return InFlight(
        by_stage=tuple(_most(actions, _CHANGES) for actions in own),
        by_device=tuple(_most(actions, _CHANGES) for actions in schedule),
        waiting=tuple(_most(actions, _WAITING_CHANGES) for actions in own),
    )


def _most(actions: Iterable[Action], changes: dict[int, int]) -> int:
    return max(accumulate(changes[action.kind] for action in actions), default=0)


def order_peak_bytes(schedule: Schedule, workload: Workload) -> Floats:
    """The most bytes each device holds, messages that wait apart: [devices]."""
    from penstock.timing.clock import peak_of_order

    actions, bounds = as_arrays(schedule)
    none = np.arange(workload.num_micro_batches)
    return np.array([
        peak_of_order(actions[first:last], none, workload.stored_bytes, workload.waiting_bytes, workload.workspace_bytes, base)
        for first, last, base in zip(bounds[:-1], bounds[1:], workload.base_bytes, strict=True)
    ])  # fmt: skip
