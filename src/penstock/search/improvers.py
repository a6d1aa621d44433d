"""What is tried on plans that were found: the simulator's opinion, another schedule, other shares of the replicas."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from penstock.plans.validity import check_plan
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, unchunked
from penstock.search.assemble import estimated
from penstock.search.progress import Progress
from penstock.search.refine import refined
from penstock.search.replicas.shares import rebalanced
from penstock.search.space.request import Request

__all__ = ["other_schedules", "rebalanced_shares", "refined_by_simulator"]

_NEARLY = 1.01
"""Plans this near to the best are refined as well: the formulas cannot tell them apart,"""
_REFINED = 2
"""so many of them,"""
_MAX_OPS = 2000
"""in chains up to this length."""


def refined_by_simulator(request: Request, progress: Progress, max_hops: int) -> None:
    """The best 1F1B plans, changed around their bottleneck, by the simulator."""
    plain = [choice for choice in progress.fastest(len(progress.choices)) if choice.plan.schedule == DEFAULT_SCHEDULE]
    for choice in [c for c in plain if c.estimate.time_s <= _NEARLY * progress.best_s][:_REFINED]:
        if not progress.out_of_time() and max_hops and request.model.num_ops <= _MAX_OPS:
            progress.tell("refining")
            better = refined(request, choice, max_hops, progress.out_of_time)
            progress.add(better if better is not choice else None)


def other_schedules(request: Request, progress: Progress) -> None:
    """The best 1F1B plans under schedules that split backward passes, which neither recompute nor divide single ops."""
    split = [name for name in unchunked(request.schedules) if SCHEDULES[name].splits_backward]
    _plain_schedules(request, progress)
    for choice, schedule in product(progress.fastest(3), split):
        plain = not any(stage.runs or stage.recompute for stage in choice.plan.stages)
        if choice.plan.num_stages > 1 and choice.plan.schedule == DEFAULT_SCHEDULE and plain:
            plan = replace(choice.plan, schedule=schedule)
            if progress.out_of_time():
                return
            if not check_plan(plan, request.model, request.cluster):
                found = estimated(request, plan, choice.kind)
                progress.add(found if found.estimate.fits else None)


def _plain_schedules(request: Request, progress: Progress) -> None:
    """The best plans whose backward passes are split under 1F1B, which holds no more: simpler, and often about as fast."""
    for choice in progress.fastest(3):
        if SCHEDULES[choice.plan.schedule].splits_backward and not progress.out_of_time():
            found = estimated(request, replace(choice.plan, schedule=DEFAULT_SCHEDULE), choice.kind)
            progress.add(found if found.estimate.fits else None)


def rebalanced_shares(request: Request, progress: Progress) -> None:
    """The best plans with numbers of micro-batches that suit the speeds of their replicas."""
    for choice in progress.fastest(5):
        plan = rebalanced(request.estimator, choice.plan)
        if plan.micro_batching != choice.plan.micro_batching:
            found = estimated(request, plan, choice.kind)
            progress.add(found if found.estimate.fits else None)
