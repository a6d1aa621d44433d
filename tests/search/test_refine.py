"""Refinement: never worse by the simulator, always valid and fitting, and it mends a plan that was made uneven."""

from __future__ import annotations

import math
from dataclasses import replace

from penstock.plans.plan import Stage
from penstock.plans.validity import check_plan
from penstock.search import Choice, Request
from penstock.search.refine import _cropped, refined, simulated_s
from penstock.search.uniform import plans_of_grid


def pipeline(shift: int) -> tuple[Request, Choice]:
    """A uniform pipeline of four stages with its middle cut moved."""
    request = Request.of("gpt-350m", "4xa100-40gb", 32, "roofline", None, (2,), math.inf)
    plan = next(plan for plan in plans_of_grid(request) if plan.num_stages == 4)
    before, after = plan.stages[1], plan.stages[2]
    stages = (plan.stages[0], replace(before, last=before.last + shift), replace(after, first=after.first + shift), plan.stages[3])
    plan = replace(plan, stages=stages)
    return request, Choice.of(plan, request.estimator.estimate(plan))


def test_a_moved_cut_comes_back() -> None:
    request, choice = pipeline(6)
    better = refined(request, choice, max_hops=10)
    assert not check_plan(better.plan, request.model, request.cluster) and better.estimate.fits
    start_s = simulated_s(choice.plan, choice.estimate)
    assert simulated_s(better.plan, better.estimate) < 0.97 * start_s
    assert better.plan.predicted is not None and better.plan.predicted.time_s == better.estimate.time_s


def test_no_hops_change_nothing_and_more_never_hurt() -> None:
    request, choice = pipeline(3)
    assert refined(request, choice, max_hops=0) is choice
    times = [simulated_s(better.plan, better.estimate) for better in (refined(request, choice, hops) for hops in (0, 1, 3, 6))]
    assert times == sorted(times, reverse=True)


def test_the_simulator_never_takes_longer_than_the_formula() -> None:
    choice = pipeline(0)[1]
    assert simulated_s(choice.plan, choice.estimate) <= choice.estimate.time_s * (1 + 1e-9)


def test_hops_that_help_are_followed_by_more() -> None:
    """A cut that is far off is made up for three ops at a time."""
    request, choice = pipeline(15)
    few, many = (refined(request, choice, hops) for hops in (3, 7))
    assert simulated_s(many.plan, many.estimate) < 0.99 * simulated_s(few.plan, few.estimate)


def test_what_changes_sides_is_not_recomputed_and_what_stays_is() -> None:
    stage = Stage(10, 30, ((0,),), recompute=(((12, 16), (20, 28)), ((10, 11),)))
    assert _cropped(stage, 14, 24) == Stage(14, 24, ((0,),), recompute=(((14, 16), (20, 24)),))
    assert _cropped(stage, 10, 12).recompute == (((10, 11),),)
    assert _cropped(stage, 10, 30) == stage
