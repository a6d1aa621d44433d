"""What the plan's costs say of the steps that a run did, with the micro-batches that it really had: to compare with what was measured.

A plan is predicted for samples of its full length; real ones are shorter, and so are rows that are padded to the longest of each
micro-batch. Pipelines that micro-batches are not priced for (images, interleaved, split backward passes) are predicted as the plan is.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.schedules.actions import BACKWARD, FORWARD
from penstock.schedules.batched import batch_workload
from penstock.schedules.execution import execute
from penstock.schedules.workload import Floats

if TYPE_CHECKING:
    from penstock.data.planners import BatchSource
    from penstock.data.planning import ProgramPlanner
    from penstock.plans.plan import Plan

__all__ = ["Predicted", "predict_steps"]


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step, and of one micro-batch on each stage."""

    time_s: float
    """Median of the steps."""
    forward_s: tuple[float, ...]
    """Mean over the micro-batches of the replica that takes longest."""
    backward_s: tuple[float, ...]
    """The same, recomputation included."""
    source: str
    """Where the costs come from."""


def predict_steps(source: BatchSource, planner: ProgramPlanner, steps: range) -> Predicted:
    """What these steps of a run should take."""
    plan = planner.plan
    if not planner.model.seq_length or plan.num_groups != plan.num_stages or plan.schedule not in ("1f1b", "gpipe"):
        return _of_plan(plan)
    costs = planner.costs
    if costs is None:
        from penstock.batching.planner import costs_for

        costs = costs_for(plan, plan.seq_length, plan.dec_length)
    data, batches = source.open()
    times_s: list[float] = []
    passes: list[list[Floats]] = [[] for _ in range(plan.num_replicas)]
    for step in steps:
        slowest_s = 0.0
        for replica, own in enumerate(planner.batch_plan(data, batches[step]).replicas):
            work = batch_workload(costs, own.micro_batches, replica)
            slowest_s = max(slowest_s, execute(own.schedule, work).makespan_s)
            passes[replica].append(work.durations_s)
        times_s.append(slowest_s)
    means = np.stack([np.concatenate(own, axis=2).mean(axis=2) for own in passes]).max(axis=0)  # [kinds, stages]
    return Predicted(statistics.median(times_s), tuple(means[FORWARD].tolist()), tuple(means[BACKWARD].tolist()), costs.name)


def _of_plan(plan: Plan) -> Predicted:
    """What a step should take by the plan alone."""
    from penstock.costs.estimate import Estimator
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of

    cluster = cluster_of(plan)
    found = Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan)
    works = [stage.work for stage in found.stages]
    backward_s = tuple(work.backward_s + work.recompute_s for work in works)
    return Predicted(found.time_s, tuple(work.forward_s for work in works), backward_s, found.source)
