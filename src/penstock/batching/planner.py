"""Plans one global batch: which samples run together, on which replica, in which order, recomputing what."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.batching.bounds.columns import KNOTS
from penstock.batching.bounds.lower_bound import lower_bound_s
from penstock.batching.chunks import run_interleaved
from penstock.batching.costs import PipelineCosts
from penstock.batching.fitting import Fitted, TooLong, fit_samples, positions
from penstock.batching.ordering import ORDERS
from penstock.batching.packing import packed_splits
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.result import finish
from penstock.batching.search import improve, start, usual_steps
from penstock.batching.split import best_splits
from penstock.errors import InputError, plural
from penstock.plans.plan import MicroBatching

if TYPE_CHECKING:
    from penstock.models.shapes import Layout
    from penstock.plans.plan import Plan

__all__ = ["batch_bound_s", "costs_for", "costs_of_batch", "cut_by_lengths", "plan_batch", "plan_with_orders"]


def plan_batch(
    samples: Sequence[SampleLengths],
    costs: PipelineCosts,
    *,
    steps: int = 0,
    seed: int = 0,
    too_long: TooLong = "refuse",
    bound: bool = False,
    order: str = "",
) -> BatchPlan:
    """The best plan found at once, improved by `steps` steps of search; the same arguments give the same plan.

    `order` names the one order (of `ordering.ORDERS`) in which samples are cut into padded micro-batches; packed ones are then not tried.

    `too_long` says what becomes of samples that fit no device: `refuse`, `drop` or `truncate`. With `bound` the lower bound is
    computed as well.
    """
    if not samples:
        raise InputError("the batch has no samples.")
    if steps < 0:
        raise InputError(f"steps is {steps}; 0 or more were expected.")
    fitted = fit_samples(samples, costs, too_long)
    if not fitted.samples:
        raise InputError(f"none of {plural(len(samples), 'sample')} fits; nothing is left of the batch.")
    if order and "padded" not in costs.layouts:
        raise InputError(f"the order '{order}' is one of padded micro-batches, which costs '{costs.name}' do not hold.")
    cuts = [partial(_planned, fitted, steps=count, seed=seed, order=order) for count in sorted({0, steps})]
    plan = cuts[-1](costs) if costs.chunks is None else replace(run_interleaved(cuts, costs), steps=steps)
    return replace(plan, bound_s=batch_bound_s(fitted.samples, costs)) if bound else plan


def _planned(fitted: Fitted, costs: PipelineCosts, steps: int, seed: int, order: str) -> BatchPlan:
    """Samples that fit, cut, dealt and ordered for one stage on each device group."""
    enc, dec = positions(fitted.samples, costs)
    orders = ORDERS[order](enc, dec, costs.round_to) if order else ()
    splits = best_splits(costs, enc, dec, orders=orders) if "padded" in costs.layouts else []
    if "packed" in costs.layouts and not order:
        splits += packed_splits(costs, enc)
    found = start(costs, enc, dec, splits)
    if steps:
        found = improve(costs, enc, dec, found, steps, seed)
    return finish(costs, fitted, found, 0.0, steps)


def batch_bound_s(samples: Sequence[SampleLengths], costs: PipelineCosts, knots: Sequence[int] = KNOTS) -> float:
    """What no plan of samples that fit takes less than; with `FEW_KNOTS` sooner, where many batches are bounded."""
    return lower_bound_s(costs, *positions(samples, costs), exact=True, knots=knots)


def costs_for(
    plan: Plan, longest: int, longest_dec: int = 0, costs: str = "", memory_limit_bytes: float = math.inf, layouts: Sequence[Layout] = ()
) -> PipelineCosts:
    """What micro-batches of samples up to these lengths cost under a plan; worth keeping, since many batches can be planned from it.

    `costs` names the source, the plan's own if empty. Ranks and links are as slow as the plan says
    (`micro_batching.slower`, `slower_links`). `layouts` are those that a batch of the plan may have unless given.
    """
    from penstock.batching.planned import planned_costs
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.validity import require_valid
    from penstock.timing.pipeline import at_plan_speeds

    model, cluster = model_of(plan), cluster_of(plan)
    require_valid(plan, model, cluster)
    source = at_plan_speeds(open_costs(costs or plan.costs, cluster), plan)
    return planned_costs(plan, model, cluster, source, longest, longest_dec, layouts=layouts, memory_limit_bytes=memory_limit_bytes)


def cut_by_lengths(plan: Plan) -> Plan:
    """The plan with micro-batches cut anew for each batch: neither the size of fixed ones nor how their rows are padded on for recordings
    says anything about those."""
    own = plan.micro_batching
    return plan if own.policy == "dynamic" else replace(plan, micro_batching=MicroBatching(own.layout, "dynamic"))


def costs_of_batch(plan: Plan, samples: Sequence[SampleLengths], costs: str = "", memory_limit_bytes: float = math.inf) -> PipelineCosts:
    """`costs_for` samples as long as the longest of a batch, which is cut by their lengths."""
    if not samples:
        raise InputError("the batch has no samples.")
    longest, longest_dec = max(sample.length for sample in samples), max(sample.dec_length for sample in samples)
    return costs_for(cut_by_lengths(plan), longest, longest_dec, costs, memory_limit_bytes)


def plan_with_orders(
    samples: Sequence[SampleLengths], costs: PipelineCosts, *, steps: int | None, seed: int = 0, too_long: TooLong = "refuse"
) -> BatchPlan:
    """`plan_batch` with the bound and with other orders of actions where these are better; `steps` None is what the batch suggests."""
    from penstock.batching.reorder import with_better_orders

    steps = usual_steps(costs, len(samples)) if steps is None else steps
    found = plan_batch(samples, costs, steps=steps, seed=seed, too_long=too_long, bound=True)
    return with_better_orders(found, costs, steps, seed) if steps else found
