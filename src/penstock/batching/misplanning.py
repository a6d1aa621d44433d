"""What it costs to choose micro-batches for other links than there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planned import planned_costs, planned_hops
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_workload
from penstock.timing.execution import execute

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["batch_s", "misplanned"]

_SAMPLES, _STEPS = 64, 1000
"""A batch of so many samples tells; so many steps of search for its micro-batches do."""
_LENGTHS = (1.0, 0.25, 0.5, 0.125)
"""Of its samples, over the longest: nobody knows those to come."""


def misplanned(plan: Plan, model: Model, cluster: Cluster, source: CostSource, believed: CostSource) -> float:
    """How many times as long as it could a batch takes by `source`, with micro-batches chosen for the links of `believed`."""
    costs = planned_costs(plan, model, cluster, source, plan.seq_length, plan.dec_length)
    hops = planned_hops(plan, model, cluster, believed)
    wrong = replace(costs, hops=hops) if costs.chunks is None else replace(costs, chunks=replace(costs.chunks, hops=hops))
    samples = _usual_samples(plan)
    knowing, not_knowing = (batch_s(plan_batch(samples, own, steps=_STEPS, too_long="drop"), costs) for own in (costs, wrong))
    return max(1.0, not_knowing / knowing)


def batch_s(made: BatchPlan, costs: PipelineCosts) -> float:
    """What a batch takes at these costs, whatever it was planned with."""
    times = [execute(own.schedule, batch_workload(costs, own.micro_batches, at)).makespan_s for at, own in enumerate(made.replicas)
             if own.micro_batches]  # fmt: skip
    return max(times)


def _usual_samples(plan: Plan) -> Sequence[SampleLengths]:
    shares = [_LENGTHS[number % len(_LENGTHS)] for number in range(min(plan.global_batch, _SAMPLES))]
    return [SampleLengths(at, max(1, int(own * plan.seq_length)), int(own * plan.dec_length)) for at, own in enumerate(shares)]
