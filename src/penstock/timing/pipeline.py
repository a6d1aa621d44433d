"""The micro-batches that run through the pipelines of a plan: how many, of how many samples, of what shape on each rank."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING

from penstock.costs.speeds import OpClass, SlowedCosts, Speeds
from penstock.models.micro_batch import row_bounds
from penstock.models.shapes import Shape

if TYPE_CHECKING:
    from penstock.costs.source import CostSource
    from penstock.plans.plan import Plan

__all__ = ["at_plan_speeds", "dp_shares", "micro_batches", "share_rows", "share_shape"]


def micro_batches(plan: Plan) -> tuple[int, tuple[int, ...]]:
    """(samples of a micro-batch, micro-batches of each replica in one iteration).

    With the policy `dynamic` each batch decides; what is estimated are as many samples of the plan's length as may come together.
    """
    batching, share = plan.micro_batching, -(-plan.global_batch // plan.num_replicas)
    counts = plan.micro_batches_per_replica
    if counts is not None and batching.samples:
        return batching.samples, counts
    length = plan.seq_length + plan.dec_length
    limits = [share, *([batching.samples] if batching.samples else [])]
    if batching.max_tokens and length:
        limits.append(max(1, batching.max_tokens // length))
    samples = min(limits) if len(limits) > 1 else 1
    return samples, _shared_out(plan, -(-share // samples))


def _shared_out(plan: Plan, count: int) -> tuple[int, ...]:
    """The micro-batches of each replica: equally many, or fewer for a replica with a slow rank and more for the others."""
    if not plan.micro_batching.slower:
        return (count,) * plan.num_replicas
    slower = [max(_slower(plan, rank) for stage in plan.stages for rank in stage.devices[own]) for own in range(plan.num_replicas)]
    counts = [1] * plan.num_replicas
    for _ in range((count - 1) * plan.num_replicas):
        counts[min(range(plan.num_replicas), key=lambda own: (counts[own] + 1) * slower[own])] += 1
    return tuple(counts)


def _slower(plan: Plan, rank: int) -> float:
    """How many times longer than the costs say a rank takes, all classes of ops alike."""
    return next((fmean(factors) for one, factors in plan.micro_batching.slower if one == rank), 1.0)


def at_plan_speeds(source: CostSource, plan: Plan) -> CostSource:
    """The costs by which the micro-batches of a plan are chosen."""
    slower = {rank: dict(zip(OpClass, factors, strict=True)) for rank, factors in plan.micro_batching.slower}
    links = {(one, other): factor for one, other, factor in plan.micro_batching.slower_links}
    return SlowedCosts(source, Speeds(slower, links)) if slower or links else source


def dp_shares(plan: Plan, replica: int, dp: int) -> tuple[float, ...]:
    """What part of each micro-batch's samples each of the `dp` ranks of a stage gets; none: equal parts.

    Stages of one dp divide samples alike, so that a rank of one stage sends what the same rank of the next one needs: a part is as small as
    the slowest rank wants that has it on any stage.
    """
    if not plan.micro_batching.slower or any(stage.runs for stage in plan.stages):
        return ()
    slowest = [1.0] * dp
    for stage in plan.stages:
        if stage.degrees.dp == dp:
            for at, rank in enumerate(stage.devices[replica]):
                slowest[at // stage.degrees.tp] = max(slowest[at // stage.degrees.tp], _slower(plan, rank))
    return tuple(1.0 / factor for factor in slowest) if len(set(slowest)) > 1 else ()


def share_rows(plan: Plan, samples: int, replica: int, dp: int) -> tuple[int, ...]:
    """How many samples of a micro-batch each of `dp` ranks works on, at most."""
    shares = dp_shares(plan, replica, dp)
    if not shares:
        return (-(-samples // dp),) * dp
    bounds = row_bounds(samples, dp, shares)
    return tuple(max(1, last - first) for first, last in pairwise(bounds))


def share_shape(plan: Plan, samples: int, dp: int = 1, rows: int = 0) -> Shape:
    """The part of a micro-batch that one of `dp` ranks works on, of so many rows; the largest where they are not equal."""
    if not rows:
        replicas = range(plan.num_replicas if plan.micro_batching.slower and dp > 1 else 1)
        rows = max(max(share_rows(plan, samples, replica, dp)) for replica in replicas)
    if not plan.seq_length:
        return Shape.images(rows)
    if plan.micro_batching.layout == "packed":
        return Shape.packed([plan.seq_length] * rows, [plan.dec_length] * rows if plan.dec_length else ())
    return Shape.padded(rows, plan.seq_length, plan.dec_length)
