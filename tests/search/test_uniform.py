"""The grid of uniform plans: what is in it, which are best, and why there may be none."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from counted_work import counted_calls

from penstock.clusters import resolve_cluster
from penstock.costs.roofline import Roofline
from penstock.errors import InfeasibleError, InputError
from penstock.models import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan
from penstock.search import Choice, Request, best_plans
from penstock.search.uniform import plans_of_grid, uniform_choices
from penstock.timing.estimate import estimate


def grid(model: str, cluster: str, global_batch: int, micro_batches: Sequence[int] = ()) -> list[Plan]:
    """All uniform plans."""
    return list(plans_of_grid(Request.of(model, cluster, global_batch, "roofline", None, micro_batches, math.inf)))


def kinds(choices: list[Choice]) -> list[tuple[int, int, int]]:
    return [(choice.plan.num_stages, choice.tp, choice.plan.num_replicas) for choice in choices]


def test_the_grid_of_four_devices() -> None:
    plans = grid("gpt-tiny", "4xa100-40gb", 8, micro_batches=(2,))
    found = {(p.num_stages, p.stages[0].degrees.tp, p.num_replicas, p.stages[0].zero, bool(p.stages[0].recompute)) for p in plans}
    degrees = [(pp, tp, 4 // pp // tp) for tp in (1, 2, 4) for pp in (1, 2, 4) if 4 % (pp * tp) == 0]
    levels = {d: (0,) if d[2] == 1 else (1,) if d[0] > 1 else (1, 2, 3) for d in degrees}
    assert found == {(*d, zero, again) for d in degrees for zero in levels[d] for again in (False, True)}
    by_rows = [p for p in plans if p.stages[0].sequence_parallel]
    assert all(p.stages[0].degrees.tp > 1 for p in by_rows) and len(by_rows) == sum(p.stages[0].degrees.tp > 1 for p in plans) / 2
    assert len(found) == len(plans) - len(by_rows)


@pytest.mark.parametrize("cluster", ["4xa100-40gb", "2xp4d.24xlarge+1xg5.24xlarge", "3xcpu"])
def test_every_plan_is_valid_and_uses_every_device(cluster: str) -> None:
    model, found = resolve_model("gpt-tiny"), resolve_cluster(cluster)
    plans = grid("gpt-tiny", cluster, 60, micro_batches=(1,))
    assert plans
    for plan in plans:
        assert check_plan(plan, model, found) == [] and plan.ranks == tuple(range(found.num_devices))


def test_plans_are_those_that_uniform_plan_builds() -> None:
    for plan in grid("gpt-tiny", "4xa100-40gb", 8, micro_batches=(2,)):
        stage = plan.stages[0]
        assert plan == uniform_plan(
            "gpt-tiny", "4xa100-40gb", global_batch=8, micro_batch=2, pp=plan.num_stages, tp=stage.degrees.tp, replicas=plan.num_replicas,
            recompute="full" if stage.recompute else "none", zero=stage.zero, sequence_parallel=stage.sequence_parallel,
            gradients="fp32",
        )  # fmt: skip


def test_tensor_parallel_stays_inside_a_node_and_within_the_model() -> None:
    def degrees(model: str, cluster: str) -> set[int]:
        return {plan.stages[0].degrees.tp for plan in grid(model, cluster, 64, micro_batches=(1,))}

    assert degrees("gpt-tiny", "16xa100-40gb") == {1, 2, 4}  # four heads
    assert degrees("gpt-1.3b", "8xa100-40gb+4xt4") == {1, 2, 4}
    assert degrees("vgg16", "2xa100-40gb") <= {1, 2}


def test_micro_batches_are_all_that_divide_the_batch_unless_given() -> None:
    def sizes(**more: list[int]) -> set[int | None]:
        return {plan.micro_batching.samples for plan in grid("gpt-tiny", "1xcpu", 12, **more)}  # type: ignore[arg-type]

    assert sizes() == {1, 2, 3, 4, 6, 12} and sizes(micro_batches=[3, 5, 12]) == {3, 12}


def test_best_plans_are_sorted_fit_and_carry_their_prediction() -> None:
    choices = best_plans("gpt-1.3b", "4xa100-40gb", 64, top=8)
    times = [choice.estimate.time_s for choice in choices]
    assert len(choices) == 8 and times == sorted(times)
    for choice in choices:
        again = estimate(choice.plan, model_of(choice.plan), cluster_of(choice.plan), Roofline())
        assert choice.plan.predicted is not None and again.time_s == choice.plan.predicted.time_s == choice.estimate.time_s
        assert choice.estimate.fits and choice.estimate.peak_bytes <= 40 * 2**30


def test_the_best_is_the_best_of_all() -> None:
    """Plans left out since a smaller micro-batch did not fit would not have fitted either, and ones left out since the same fits with
    less recomputation or ZeRO would not have been faster."""
    model, cluster, source = resolve_model("gpt-1.3b"), resolve_cluster("2xa100-40gb"), Roofline()
    fitting: dict[tuple[object, ...], dict[tuple[bool, int], float]] = {}
    for plan in grid("gpt-1.3b", "2xa100-40gb", 32):
        stage, found = plan.stages[0], estimate(plan, model, cluster, source)
        if found.fits:
            way = (plan.num_stages, stage.degrees.tp, stage.sequence_parallel, plan.micro_batching.samples)
            fitting.setdefault(way, {})[bool(stage.recompute), stage.zero] = found.time_s
    needed, all_s = [], [time_s for alike in fitting.values() for time_s in alike.values()]
    for alike in fitting.values():
        for (again, zero), time_s in alike.items():
            lighter = [s for (less, lower), s in alike.items() if less <= again and lower <= zero and (less, lower) != (again, zero)]
            assert all(other_s <= time_s for other_s in lighter)
            needed += [] if lighter else [time_s]
    choices = best_plans("gpt-1.3b", "2xa100-40gb", 32, top=10_000)
    assert sorted(choice.estimate.formula_s for choice in choices) == sorted(needed) and len(needed) < len(all_s)
    assert [choice.estimate.time_s for choice in choices] == sorted(choice.estimate.time_s for choice in choices)


def test_more_memory_is_never_worse() -> None:
    times = [best_plans("gpt-1.3b", "4xa100-40gb", 64, memory_limit_bytes=limit, top=1)[0] for limit in (8e9, 12e9, 20e9, 40e9, math.inf)]
    assert [choice.estimate.time_s for choice in times] == sorted((choice.estimate.time_s for choice in times), reverse=True)
    assert times[0].estimate.time_s > times[-1].estimate.time_s and times[0].estimate.peak_bytes <= 8e9


def test_memory_too_small_says_how_much_is_needed() -> None:
    with pytest.raises(InfeasibleError, match=r"gpt-13b fits on 1 × a100-40gb: .* needs is 2\d\d\.\d GB .*moments.* a100-40gb has 42.9 GB"):
        best_plans("gpt-13b", "1xa100-40gb", 8)
    with pytest.raises(InfeasibleError, match=r"--memory-limit allows 1.0 GB.* Use a higher limit"):
        best_plans("gpt-1.3b", "4xa100-40gb", 8, memory_limit_bytes=1e9)


def test_a_batch_that_nothing_divides_is_infeasible() -> None:
    with pytest.raises(InfeasibleError, match=r"global batch of 7 into micro-batches of 2 over the 3 devices"):
        best_plans("gpt-tiny", "3xcpu", 7, micro_batches=(2,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_ref": "gpt-1.4b"}, "unknown model 'gpt-1.4b'"),
        ({"cluster_ref": "4xa1000"}, "a1000"),
        ({"global_batch": 0}, "global_batch"),
        ({"global_batch": 10**9}, "global_batch"),
        ({"seq_length": 4096}, "seq_length is 4096, but model 'gpt-1.3b' has 2048 positions"),
        ({"micro_batches": (0,)}, "micro_batches has 0"),
        ({"top": 0}, "top is 0"),
        ({"memory_limit_bytes": -1.0}, "memory limit is -1"),
        ({"memory_limit_bytes": math.nan}, "memory limit is nan"),
        ({"costs": "profile:h200-141gb"}, "measured on h200-141gb, but the cluster has 'a100-40gb'"),
        ({"costs": "nothing"}, "costs 'nothing' is not known"),
    ],
)
def test_wrong_requests_name_the_field(changes: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"model_ref": "gpt-1.3b", "cluster_ref": "4xa100-40gb", "global_batch": 8, **changes}
    with pytest.raises(InputError, match=message):
        best_plans(**request)  # type: ignore[arg-type]


def test_the_grid_of_sixteen_devices_takes_a_second_or_two() -> None:
    """Counted in calls, of which an idle core makes about four million a second."""
    best_plans("gpt-tiny", "2xcpu", 4)  # imports
    assert counted_calls(lambda: best_plans("gpt-1.3b", "16xa100-40gb", 256)) < 8e6


def test_a_cluster_too_large_to_search_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"999,999,999 devices .* up to 100000"):
        best_plans("gpt-1.3b", "999999999xa100-40gb", 64)


def test_given_micro_batches_that_divide_nothing_name_a_batch_that_works() -> None:
    with pytest.raises(InfeasibleError, match="multiple of 12"):
        best_plans("gpt-350m", "4xa100-40gb", 64, micro_batches=[3])
    assert best_plans("gpt-350m", "4xa100-40gb", 12, micro_batches=[3], top=1)


def test_no_family_uses_more_than_its_devices_can_do() -> None:
    for name in ("vgg16", "resnet-50", "bert-large", "t5-base", "llama-1b"):
        assert best_plans(name, "4xa100-80gb", 256, top=1)[0].estimate.mfu < 0.8


def test_the_order_of_nodes_makes_no_difference() -> None:
    """Stages may lie the other way round: the head of a model is not as long as its first half."""
    times = []
    for cluster in ("1xp3.8xlarge+1xg6.12xlarge", "1xg6.12xlarge+1xp3.8xlarge"):
        request = Request.of("llama-tiny", cluster, 16, "roofline", None, (1,), math.inf)
        pipelines = [choice for choice in uniform_choices(request, 1000, lambda: None) if choice.plan.num_stages == 2]
        times.append(pipelines[0].estimate.time_s)
    assert times[0] == pytest.approx(times[1])
