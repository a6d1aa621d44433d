"""The best schedule for a workload: the best of all known kinds, then refined by a seeded search of a fixed number of steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from penstock.errors import InfeasibleError, InputError
from penstock.ordering.adaptive import adaptive
from penstock.ordering.greedy import best_greedy, does_not_fit
from penstock.ordering.injection import pyramid, reordered
from penstock.schedules.actions import Action, Schedule
from penstock.schedules.orders import with_depths
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, schedule_of
from penstock.timing.order_memory import order_peak_bytes
from penstock.timing.simulator import as_arrays, simulate
from penstock.timing.workload import Workload

__all__ = ["Candidate", "best_schedule", "candidates", "refine"]

_TEMPERATURE = 0.03  # of what a stage takes for a micro-batch; hotter searches lose the start before they find better


@dataclass(frozen=True)
class Candidate:
    """A schedule that fits the limits."""

    name: str
    schedule: Schedule
    makespan_s: float


def candidates(workload: Workload) -> list[Candidate]:
    """Schedules of every kind that suits the placement and fits memory, micro-batches as numbered and as a pyramid; shortest first."""
    found = []
    for name, schedule in _known(workload):
        if (order_peak_bytes(schedule, workload) <= workload.limit_bytes * (1 + 1e-9)).all():
            found.append(Candidate(name, schedule, simulate(schedule, workload.durations_s, workload.transfers_s).makespan_s))
    if not found:
        raise does_not_fit(workload)
    return sorted(found, key=lambda candidate: candidate.makespan_s)


def _known(workload: Workload) -> Iterator[tuple[str, Schedule]]:
    stages, count, devices = workload.num_stages, workload.num_micro_batches, workload.num_devices
    named: list[tuple[str, Schedule]] = []
    suited = [rules for rules in SCHEDULES.values() if not rules.asynchronous and (workload.splits or not rules.splits_backward)]
    if workload.devices == tuple(range(stages)):
        named = [(rules.name, schedule_of(rules.name, stages, count)) for rules in suited if not rules.chunked]
        named.append((f"{DEFAULT_SCHEDULE}, deeper", with_depths([left + left // 2 for left in range(stages, 0, -1)], count)))
    elif workload.devices == tuple(stage % devices for stage in range(stages)) and stages % devices == 0:
        named = [(rules.name, schedule_of(rules.name, stages, count, stages // devices)) for rules in suited if rules.chunked]
    for suffix, order in (("", range(count)), (", pyramid", pyramid(workload))):
        yield from ((name + suffix, reordered(schedule, order)) for name, schedule in named)
        for name, make in (("adaptive", adaptive), ("greedy", best_greedy)):
            try:
                schedule = make(workload, order)
            except InfeasibleError:  # another may fit still
                continue
            yield f"{name}{suffix}", schedule


def refine(schedule: Schedule, workload: Workload, num_steps: int = 20_000, seed: int = 0) -> Schedule:
    """A schedule that is no longer than the given one: micro-batches exchanged, actions moved; the same for the same seed.

    Times are those of `simulate`, memory that of `order_peak_bytes`; the given schedule has to fit the limits.
    """
    from penstock.ordering.annealing_kernels import Cooling, Memory, anneal
    from penstock.timing.clock import Orders

    simulate(schedule, workload.durations_s, workload.transfers_s)  # refuses what does not fit the arrays, or deadlocks
    above = np.flatnonzero(order_peak_bytes(schedule, workload) > workload.limit_bytes * (1 + 1e-9))
    if len(above):
        raise InputError(f"refine: the schedule to start from exceeds the memory limit of device {above[0]}. Start from one that fits.")
    actions, bounds = as_arrays(schedule)
    labels = np.arange(workload.num_micro_batches)
    temperature = _TEMPERATURE * float(workload.durations_s[:2].sum(axis=0).mean())
    memory = Memory(
        workload.stored_bytes, workload.waiting_bytes, workload.workspace_bytes, workload.base_bytes, workload.limit_bytes
    )  # fmt: skip
    cooling = Cooling(num_steps, seed % 2**32, temperature)
    anneal(Orders(actions, bounds), workload.durations_s, workload.transfers_s, memory, cooling, labels)
    rows = [Action(stage, kind, int(labels[m])) for stage, kind, m in actions.tolist()]
    return tuple(tuple(rows[first:last]) for first, last in pairwise(bounds))


def best_schedule(workload: Workload, num_steps: int = 20_000, seed: int = 0) -> Candidate:
    """The best candidate, refined; raises `InfeasibleError` if none fits."""
    start = candidates(workload)[0]
    found = refine(start.schedule, workload, num_steps, seed)
    time_s = simulate(found, workload.durations_s, workload.transfers_s).makespan_s
    return Candidate(f"{start.name}, refined", found, time_s) if time_s < start.makespan_s else start
