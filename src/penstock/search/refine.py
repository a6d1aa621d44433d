"""Bottleneck alleviation on a plan that was found: small changes around its slowest stage, judged by the schedule simulator.

The formulas that the exact search minimises take every message for work of its stage. The simulator lets messages overlap and follows
forward and backward passes one by one, so plans that the formulas call equal differ under it. A hop applies one change: ops move over
an edge of the bottleneck, or an edge of its recomputed ops is kept instead. Hops that do not help may be followed by ones that do; no
plan is looked at twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.plans.plan import OpRange, Plan, Stage
from penstock.plans.validity import check_plan
from penstock.schedules.rules import DEFAULT_SCHEDULE
from penstock.search.choice import Choice
from penstock.search.space.request import Request

if TYPE_CHECKING:
    from penstock.timing.iteration_estimate import Estimate

__all__ = ["MAX_HOPS", "refined", "simulated_s"]

MAX_HOPS = 7
"""Changes in a row by which a plan is refined, unless told otherwise."""
MAX_ACTIONS = 100_000
"""Actions of a schedule up to which a plan is simulated."""
MAX_MOVED = 3
"""Ops that may move over an edge at once."""
PATIENCE = 2
"""Hops in a row that may not help."""


def simulated_s(plan: Plan, estimate: Estimate) -> float:
    """One iteration by the simulator, gradient sync and optimizer step included."""
    from penstock.timing.planned import simulated

    return simulated(plan, estimate).makespan_s


def refined(request: Request, choice: Choice, max_hops: int, out_of_time: Callable[[], bool] = lambda: False) -> Choice:
    """The best plan within so many hops of a 1F1B plan, by simulated time; the plan itself if none is better."""
    plan, estimate = choice.plan, choice.estimate
    if plan.schedule != DEFAULT_SCHEDULE or plan.num_stages < 2 or 2 * plan.num_stages * estimate.num_micro_batches > MAX_ACTIONS:
        return choice
    best, best_s = choice, simulated_s(plan, estimate)
    at, at_s, patience, seen = choice, best_s, PATIENCE, {plan.stages}
    for _ in range(max_hops):
        found: tuple[float, Choice] | None = None
        for changed in _neighbours(at.plan, at.estimate.bottleneck):
            if changed.stages in seen or out_of_time() or check_plan(changed, request.model, request.cluster):
                continue
            seen.add(changed.stages)
            there = request.estimator.estimate(changed)
            if there.fits:
                time_s = simulated_s(changed, there)
                if found is None or time_s < found[0]:
                    found = time_s, Choice.of(changed, there, choice.kind)
        if found is None:
            break
        patience = PATIENCE if found[0] < at_s else patience - 1
        at_s, at = found
        if at_s < best_s:
            best, best_s = at, at_s
        if patience < 0:
            break
    return best


def _neighbours(plan: Plan, bottleneck: int) -> Iterator[Plan]:
    for count in range(1, MAX_MOVED + 1):
        if bottleneck > 0:
            yield from _moved(plan, bottleneck - 1, count)
        if bottleneck < plan.num_stages - 1:
            yield from _moved(plan, bottleneck, -count)
    for shorter in _kept_more(plan.stages[bottleneck]):
        yield _with(plan, {bottleneck: shorter})


def _moved(plan: Plan, cut: int, count: int) -> Iterator[Plan]:
    """The cut after stage `cut` moved by some ops; those that change sides are not recomputed."""
    before, after = plan.stages[cut], plan.stages[cut + 1]
    edge = before.last + count
    if before.first < edge < after.last:
        yield _with(plan, {cut: _cropped(before, before.first, edge), cut + 1: _cropped(after, edge, after.last)})


def _cropped(stage: Stage, first: int, last: int) -> Stage:
    patterns = []
    for pattern in stage.recompute:
        cropped = tuple((max(a, first), min(b, last)) for a, b in pattern if a < last and b > first)
        patterns += [cropped] if cropped else []
    return replace(stage, first=first, last=last, recompute=tuple(patterns))


def _kept_more(stage: Stage) -> Iterator[Stage]:
    """The stage with the first or the last range of its recomputed ops kept instead."""
    ranges: tuple[OpRange, ...] = stage.pattern()
    for left in {ranges[1:], ranges[:-1]} if ranges else ():
        yield replace(stage, recompute=(left,) if left else ())


def _with(plan: Plan, stages: dict[int, Stage]) -> Plan:
    return replace(plan, stages=tuple(stages.get(index, stage) for index, stage in enumerate(plan.stages)), predicted=None)
