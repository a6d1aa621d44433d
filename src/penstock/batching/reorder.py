"""Other orders for the micro-batches of a planned batch, where the event clock finds one that ends earlier.

The planner's own order is 1F1B with as many forward passes ahead of the first backward pass as each stage has room for. Micro-batches of
unequal cost are sometimes better served by an order that is made for them (`ordering`): backward passes out of turn, or none for a while.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import BatchPlan, ReplicaBatch
from penstock.batching.workloads import batch_workload
from penstock.ordering.choose import better_order
from penstock.ordering.injection import reordered
from penstock.schedules.actions import FORWARD, Schedule
from penstock.timing.execution import execute

__all__ = ["with_better_orders"]


def with_better_orders(plan: BatchPlan, costs: PipelineCosts, steps: int, seed: int = 0) -> BatchPlan:
    """The plan with the slowest replica in a better order, then the next slowest, until one has none; the same for the same seed."""
    replicas, seen = list(plan.replicas), set[int]()
    while True:
        slowest = max(range(len(replicas)), key=lambda index: replicas[index].predicted_s)
        if slowest in seen:
            break
        seen.add(slowest)
        better = _better(replicas[slowest], costs, slowest, steps, seed)
        if better is None:
            break
        replicas[slowest] = better
    time_s = max(replica.predicted_s for replica in replicas)
    return replace(plan, replicas=tuple(replicas), predicted_s=time_s + costs.fixed_s) if seen else plan


def _better(own: ReplicaBatch, costs: PipelineCosts, replica: int, steps: int, seed: int) -> ReplicaBatch | None:
    found = better_order(batch_workload(costs, own.micro_batches, replica), own.schedule, steps, seed)
    if found is None or found.makespan_s >= own.predicted_s:
        return None
    entering = [action.micro_batch for action in found.schedule[0] if action.kind == FORWARD and action.stage == 0]
    micro_batches = tuple(msgspec.structs.replace(own.micro_batches[m], index=index) for index, m in enumerate(entering))
    schedule = _renumbered(found.schedule, entering)
    peaks = execute(schedule, batch_workload(costs, micro_batches, replica)).peak_bytes
    return ReplicaBatch(micro_batches, schedule, found.makespan_s, tuple(map(float, peaks)), found.name)


def _renumbered(schedule: Schedule, entering: list[int]) -> Schedule:
    """The schedule with micro-batches numbered in the order in which they enter the pipeline."""
    numbers = [0] * len(entering)
    for number, micro_batch in enumerate(entering):
        numbers[micro_batch] = number
    return reordered(schedule, numbers)
