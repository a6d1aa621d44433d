"""The order in which micro-batches enter the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedules.actions import Action, Schedule
from penstock.timing.workload import Workload

__all__ = ["pyramid", "reordered"]


def reordered(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """The same schedule with micro-batch `order[m]` in the place of m."""
    return tuple(tuple(Action(stage, kind, order[m]) for stage, kind, m in actions) for actions in schedule)


def pyramid(workload: Workload) -> list[int]:
    """Short micro-batches first and last, where the pipeline fills and drains, long ones between: 1 3 5 4 2 of five by length."""
    times_s = workload.durations_s[:2].sum(axis=(0, 1))
    ranked = sorted(range(workload.num_micro_batches), key=lambda m: (times_s[m], m))
    return ranked[::2] + ranked[1::2][::-1]
