"""Exact plans for own models: valid, fitting, at least as fast as the grid, and faster where uneven stages help."""

from __future__ import annotations

import math

import pytest

from penstock.errors import InfeasibleError
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan
from penstock.search.best import search_plans
from penstock.search.exact import exact_plans
from penstock.search.grid import Request, best_plans


def exact(model_ref: str, cluster_ref: str, batch: int, limit: float = math.inf, known: float = math.inf) -> list:
    return list(exact_plans(Request.of(model_ref, cluster_ref, batch, "roofline", None, (), limit), known))


def test_plans_are_valid_fit_and_get_faster() -> None:
    found = exact("gpt-350m", "4xa100-40gb", 32)
    assert found
    for plan, estimate in found:
        assert not check_plan(plan, model_of(plan), cluster_of(plan))
        assert estimate.fits
        assert plan.stages[0].first == 0 and plan.stages[-1].last == model_of(plan).num_ops
    times = [estimate.time_s for _, estimate in found]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("model", "cluster", "batch"), [("gpt-350m", "4xa100-40gb", 32), ("gpt-13b", "2xp4d.24xlarge", 128)])
def test_never_slower_than_the_grid(model: str, cluster: str, batch: int) -> None:
    grid = best_plans(model, cluster, batch, top=1)[0].estimate.time_s
    assert min((estimate.time_s for _, estimate in exact(model, cluster, batch)), default=math.inf) <= 1.001 * grid


def test_uneven_stages_win_where_a_pipeline_is_needed() -> None:
    grid = best_plans("gpt-13b", "2xp4d.24xlarge", 128, top=1)[0].estimate.time_s
    assert exact("gpt-13b", "2xp4d.24xlarge", 128, known=grid)[-1][1].time_s < 0.99 * grid


def test_little_memory_is_met_by_recomputing_some_ops() -> None:
    roomy = exact("gpt-350m", "2xa100-40gb", 16)[-1][1]
    tight = exact("gpt-350m", "2xa100-40gb", 16, limit=0.6 * roomy.peak_bytes)
    assert tight
    plan, estimate = tight[-1]
    assert estimate.peak_bytes <= 0.6 * roomy.peak_bytes
    assert estimate.time_s >= roomy.time_s
    assert any(stage.recomputed() for stage in plan.stages) or plan.micro_batching.samples < 16


def test_mixed_clusters_are_left_to_others() -> None:
    assert exact("gpt-350m", "4xa100-40gb+4xa10g", 32) == []


def test_the_search_shows_both_kinds_best_first() -> None:
    found = search_plans("gpt-13b", "2xp4d.24xlarge", 128, top=4)
    assert [choice.estimate.time_s for choice in found] == sorted(choice.estimate.time_s for choice in found)
    assert found[0].kind == "exact" and {choice.kind for choice in found} == {"exact", "grid"}
    assert all(choice.plan.predicted is not None and choice.plan.predicted.time_s == choice.estimate.time_s for choice in found)


def test_what_no_uniform_plan_can_do_may_still_be_possible() -> None:
    """The grid needs every layer recomputed or none; the exact search recomputes what it must."""
    with pytest.raises(InfeasibleError):
        search_plans("gpt-175b", "8xa100-40gb", 64)
