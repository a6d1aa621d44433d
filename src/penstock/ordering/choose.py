"""Orders by name, and the best order for a workload by the event clock.

The orders of the schedules know nothing of what micro-batches take; those in `MADE` are made for a workload. All of them are made by the
fixed-order clock, in which transfers never wait for each other; whether one is really better, the event clock decides, with links that
are shared and memory over time.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import InputError, near_misses
from penstock.ordering.adaptive import adaptive
from penstock.ordering.annealing import Candidate, best_schedule, candidates, refine
from penstock.ordering.greedy import best_greedy
from penstock.schedules.actions import Schedule
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.execution import execute
from penstock.timing.simulator import simulate
from penstock.timing.workload import Workload

__all__ = ["MADE", "ORDERS", "better_order", "order_of"]

_SEARCH_ACTIONS = 400_000_000
"""Actions that a search by name may simulate: a few seconds."""
_MOST_STEPS = 20_000
_JUDGED = 3
"""Of the orders that the fixed-order clock finds shortest, so many are judged by the event clock."""

MADE: dict[str, Callable[[Workload], Schedule]] = {
    "adaptive": adaptive,
    "greedy": best_greedy,
    "search": lambda workload: best_schedule(workload, _steps(workload)).schedule,
}
ORDERS = (*SCHEDULES, *MADE)


def _steps(workload: Workload) -> int:
    actions = len(workload.durations_s) * workload.num_stages * workload.num_micro_batches
    return max(1, min(_MOST_STEPS, _SEARCH_ACTIONS // actions))


def order_of(name: str, workload: Workload) -> Schedule:
    """The order of a schedule, or the one made for the workload; `InfeasibleError` where none can be made within its memory."""
    if name in MADE:
        return MADE[name](workload)
    if name not in SCHEDULES:
        raise InputError(f"there is no order '{name}'. {near_misses(name, ORDERS)}")
    chunks = workload.num_stages // workload.num_devices
    if SCHEDULES[name].chunked != (chunks > 1):
        has, wants = ("one stage", "several") if chunks == 1 else (f"{chunks} stages", "one")
        raise InputError(f"order '{name}' is of pipelines with {wants} on each device group, this one has {has}. Use another.")
    return schedule_of(name, workload.num_stages, workload.num_micro_batches, chunks)


def better_order(workload: Workload, own: Schedule, num_steps: int, seed: int = 0) -> Candidate | None:
    """An order that ends before `own`, which fits, and fits as well, by the event clock; None where none of those tried does.

    Tried are the best orders of all kinds, and what `num_steps` steps of search make of the best and of `own`.
    """
    starts = candidates(workload)[:_JUDGED]
    tried = [(start.name, start.schedule) for start in starts]
    if num_steps:
        tried.append((f"{starts[0].name}, refined", refine(starts[0].schedule, workload, num_steps, seed)))
        tried.append(("refined", refine(own, workload, num_steps, seed)))
    best, best_s = None, execute(own, workload).makespan_s * (1 - 1e-9)
    for name, schedule in tried:
        # The event clock only adds waits, so that what is no shorter without them need not be run through it.
        if simulate(schedule, workload.durations_s, workload.transfers_s).makespan_s >= best_s:
            continue
        run = execute(schedule, workload)
        if run.violation is None and run.makespan_s < best_s:
            best, best_s = Candidate(name, schedule, run.pipeline_s), run.makespan_s
    return best
