"""Exact plans for own models: valid, fitting, at least as fast as the grid, and faster where uneven stages help."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from penstock.errors import InfeasibleError
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan
from penstock.search import Outcome, Request, search, search_plans
from penstock.search.bounds.by_ops import family_bound
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.space.families import families
from penstock.search.uniform import best_plans


@cache
def exact(model_ref: str, cluster_ref: str, batch: int, limit: float = math.inf, known: float = math.inf) -> tuple:
    """Each family's best plan in order of the bounds, where it is better than those before."""
    request = Request.of(model_ref, cluster_ref, batch, "roofline", None, (), limit, ("1f1b",), gradients="bf16")
    found = []
    for family in sorted(families(request), key=lambda family: family_bound(family).time_s):
        plan = best_pipeline(family, known)
        if plan is not None:
            found.append((plan.plan, plan.estimate))
            known = plan.estimate.time_s
    return tuple(found)


@pytest.mark.parametrize(
    ("model", "cluster", "batch", "limit_gb", "most_s"),
    [("vgg16", "1xg5.12xlarge+1xp3.8xlarge", 2, 2.2, 0.02), ("gpt2", "2xp3.2xlarge+2xg6.xlarge", 32, 2.9, 2.0)],
)
def test_what_devices_need_to_talk_is_left_free(model: str, cluster: str, batch: int, limit_gb: float, most_s: float) -> None:
    """Under a limit of which NCCL takes a third, plans that leave room for it are found at once, not those that the estimate refuses."""
    best = search_plans(model, cluster, batch, memory_limit_bytes=limit_gb * 1e9, gradients="fp32", top=1).choices[0]
    assert best.estimate.fits and best.estimate.time_s < most_s


def test_one_device_of_several_has_the_memory_that_talking_would_take() -> None:
    """Where a plan for one device fits on a cluster of one, it fits on any larger one."""
    for cluster in ("1xg5.xlarge", "2xg5.xlarge", "5xg5.xlarge", "1xg5.xlarge+1xg6.xlarge"):
        best = search_plans("vgg16", cluster, 8, memory_limit_bytes=3.5e9, top=1).choices[0]
        assert best.estimate.fits and best.estimate.time_s < 0.11


@pytest.mark.parametrize("limit_gb", [5.0, 4.5])
def test_over_several_kinds_a_block_may_be_divided_from_the_start(limit_gb: float, tmp_path: Path) -> None:
    """The stages between whole blocks do not fit into 5 GB; others do. Into less none does, which is not because of the batch."""
    model = tmp_path / "wide.yaml"
    model.write_text("base: gpt-13b\nlayers: 1\n")
    cluster, limits = "1xg5.12xlarge+1xg6.xlarge", {"memory_limit_bytes": limit_gb * 1e9, "gradients": "bf16", "schedules": ("1f1b",)}
    if limit_gb < 5:
        with pytest.raises(InfeasibleError, match=r"no plan of wide fits on .* with a global batch of 4"):
            search_plans(str(model), cluster, 4, seq_length=64, **limits)
        with pytest.raises(InfeasibleError, match="no uniform plan divides a global batch of 4 into micro-batches of 3 over"):
            search_plans(str(model), cluster, 4, seq_length=64, micro_batches=(3,), **limits)
        return
    best = search_plans(str(model), cluster, 4, seq_length=64, top=1, **limits).choices[0]
    own = cluster_of(best.plan)
    assert best.estimate.fits and check_plan(best.plan, model_of(best.plan), own) == []
    assert any(1 < stage.first < 9 for stage in best.plan.stages) and len({own.device(rank).name for rank in best.plan.ranks}) == 2


@cache
def large() -> Outcome:
    return search_plans("gpt-13b", "2xp4d.24xlarge", 128, top=10, gradients="bf16")


def test_plans_are_valid_fit_and_get_faster() -> None:
    found = exact("gpt-350m", "4xa100-40gb", 32)
    assert found
    for plan, estimate in found:
        assert not check_plan(plan, model_of(plan), cluster_of(plan))
        assert estimate.fits
        assert plan.stages[0].first == 0 and plan.stages[-1].last == model_of(plan).num_ops
    times = [estimate.time_s for _, estimate in found]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(("model", "cluster", "batch"), [("gpt-350m", "4xa100-40gb", 32), ("gpt-2.6b", "8xa100-40gb", 64)])
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
    again = sum(len(stage.recomputed()) for stage in plan.stages)
    assert 0 < again < model_of(plan).num_ops  # some ops, neither none nor all


def test_mixed_clusters_use_what_helps() -> None:
    fast = exact("gpt-350m", "4xa100-40gb", 32)[-1][1].time_s
    plan, estimate = exact("gpt-350m", "4xa100-40gb+4xa10g", 32)[-1]
    assert estimate.time_s <= fast * 1.001
    assert not check_plan(plan, model_of(plan), cluster_of(plan))


def test_three_kinds_and_unequal_nodes() -> None:
    outcome = search_plans("gpt-350m", "1xp3.8xlarge+1xg5.12xlarge+2xg5.xlarge+1xg6.xlarge", 64, top=1, micro_batches=[8])
    assert outcome.choices[0].estimate.fits and outcome.bound_s <= outcome.choices[0].estimate.time_s


def test_the_search_shows_the_best_first() -> None:
    found = large().choices
    assert [choice.estimate.time_s for choice in found] == sorted(choice.estimate.time_s for choice in found)
    assert found[0].kind == "exact" and len({choice.plan.stages for choice in found}) > 1
    assert all(choice.plan.predicted is not None and choice.plan.predicted.time_s == choice.estimate.time_s for choice in found)


def test_the_bound_is_below_every_plan_and_near_the_best() -> None:
    outcome = large()
    assert outcome.bound_s <= outcome.choices[0].estimate.time_s and outcome.gap < 0.05
    assert outcome.choices[0].plan.predicted.lower_bound_s == outcome.bound_s
    assert all(line.bound_s >= outcome.bound_s for line in outcome.proof)


def test_a_time_budget_ends_the_search_with_what_was_found() -> None:
    outcome = search_plans("gpt-13b", "2xp4d.24xlarge", 128, time_budget_s=0.0)
    assert outcome.stopped == "time budget" and outcome.choices[0].estimate.fits
    assert outcome.bound_s <= outcome.choices[0].estimate.time_s


def test_ctrl_c_returns_the_best_so_far() -> None:
    def interrupt(text: str, best_s: float, bound_s: float) -> None:
        if best_s < math.inf:
            raise KeyboardInterrupt

    outcome = search_plans("gpt-350m", "4xa100-40gb", 32, watch=interrupt)
    assert outcome.stopped == "interrupted" and outcome.choices[0].estimate.fits


def test_the_same_request_gives_the_same_plan() -> None:
    first, second = (search_plans("gpt-350m", "4xa100-40gb", 32) for _ in range(2))
    assert first == second


def test_what_no_uniform_plan_can_do_may_still_be_possible() -> None:
    """Half of the model does not fit on the smaller device, which gets less than half; too large for both is refused."""
    with pytest.raises(InfeasibleError):
        best_plans("gpt-2.6b", "1xa100-40gb+1xt4", 8, micro_batches=[1])
    best = search_plans("gpt-2.6b", "1xa100-40gb+1xt4", 8, micro_batches=[1], top=1).choices[0]
    assert best.estimate.fits and best.plan.num_stages == 2
    with pytest.raises(InfeasibleError):
        search_plans("gpt-175b", "8xa100-40gb", 64)


def test_more_devices_than_work_are_told_apart_from_too_few() -> None:
    """Those without work idle; where none may, that is what is wrong, and not that nothing fits."""
    some = search_plans("gpt-6.7b", "4096xh100", 2, top=1).choices[0]
    assert 2 < len(some.plan.ranks) <= 256 and some.estimate.fits
    request = Request.of("gpt-6.7b", "4096xh100", 2, "roofline", None, (), math.inf)
    every_node = r"no plan gives 4096 devices .* work on a global batch of 2: .* Use at most 256 devices"
    with pytest.raises(InfeasibleError, match=every_node):
        search(request.on_all_of(request.cluster))
