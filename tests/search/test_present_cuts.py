"""Cuts for a placement that stays: the dynamic programmes against all cuts there are, and on plans with slow devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from penstock.costs.sources import open_costs
from penstock.costs.speeds import SlowedCosts, Speeds
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.search.present_cuts import _best_cuts, _between, _Chain, recomputed_ops, with_cuts, with_present_cuts
from penstock.timing.estimate import Estimator
from penstock.timing.planned import clocked

MODEL = {"family": "gpt", "layers": 3, "hidden": 1024, "heads": 16, "seq_length": 1024, "vocab": 1024}


def random_chain(generator: np.random.Generator, groups: int, ops: int) -> _Chain:
    speeds = generator.uniform(0.5, 2.0, groups)
    base, held = generator.uniform(0.1, 2.0, ops), generator.uniform(0.1, 2.0, ops)
    messages = generator.uniform(0.0, 0.5, (groups, ops + 1))
    messages[0] = 0.0
    return _Chain(np.stack([_between(base * speed) for speed in speeds]), np.stack([_between(held)] * groups), messages)


def all_cuts(ops: int, groups: int) -> list[list[int]]:
    return [[0, *inner, ops] for inner in combinations(range(1, ops), groups - 1)]


@pytest.mark.parametrize("seed", range(30))
def test_the_slowest_group_is_as_fast_as_any_cuts_make_it(seed: int) -> None:
    generator = np.random.default_rng(seed)
    groups, ops = int(generator.integers(2, 5)), int(generator.integers(5, 10))
    chain = random_chain(generator, groups, ops)
    limits = np.full(groups, generator.uniform(3, 12))

    def slowest(cuts: list[int]) -> float:
        if any(chain.held_bytes[g, cuts[g], cuts[g + 1]] > limits[g] for g in range(groups)):
            return np.inf
        return max(max(chain.passes_s[g, cuts[g], cuts[g + 1]], chain.messages_s[g, cuts[g]]) for g in range(groups))

    def way(cuts: list[int]) -> float:
        return sum(chain.passes_s[g, cuts[g], cuts[g + 1]] + chain.messages_s[g, cuts[g]] for g in range(groups))

    best = min(map(slowest, all_cuts(ops, groups)))
    found = list(_best_cuts(chain, limits))
    if not np.isfinite(best):
        assert found == []
        return
    assert slowest(found[0]) == pytest.approx(best)
    for cuts, slack in zip(found, (1.0, 1.005, 1.02, 1.05), strict=True):
        near = [one for one in all_cuts(ops, groups) if slowest(one) <= slack * best * (1 + 1e-9)]
        assert way(cuts) == pytest.approx(min(map(way, near)))


def plan_of(num_stages: int = 4, **more: object) -> Plan:
    plan = Plan(MODEL, "8xa100-80gb", 16, (), MicroBatching("padded", samples=1), seq_length=1024)
    ops = model_of(plan).num_ops
    cuts = [ops * at // num_stages for at in range(num_stages + 1)]
    return replace(plan, stages=tuple(Stage(cuts[at], cuts[at + 1], ((at,),), **more) for at in range(num_stages)))  # type: ignore[arg-type]


def estimator_of(plan: Plan, speeds: Speeds) -> Estimator:
    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, SlowedCosts(open_costs("roofline", cluster), speeds))


def test_a_slow_group_gets_fewer_ops_and_the_pipeline_is_faster() -> None:
    plan = plan_of()
    estimator = estimator_of(plan, Speeds.of({2: 2.0}))

    def time_s(one: Plan) -> float:
        return clocked(one, estimator.estimate(one)).time_s

    best = min(with_present_cuts(plan, estimator.estimate(plan), estimator), key=time_s)
    cuts = [stage.first for stage in best.stages]
    shifts = product((-1, 0, 1), repeat=3)
    near = [[0, *(cut + by for cut, by in zip(cuts[1:], shift, strict=True)), best.stages[-1].last] for shift in shifts]
    assert time_s(best) <= 1.01 * min(time_s(with_cuts(plan, one, ())) for one in near) and time_s(best) < 0.85 * time_s(plan)
    sizes = [stage.last - stage.first for stage in best.stages]
    assert sizes[2] < min(sizes[0], sizes[1], sizes[3]) and best.stages[2].devices == ((2,),)


def test_ops_stay_recomputed_wherever_they_go() -> None:
    plan = with_cuts(plan_of(), [stage.first for stage in plan_of().stages] + [plan_of().stages[-1].last], {3, 4, 5, 20})
    assert recomputed_ops(plan) == {3, 4, 5, 20}
    estimator = estimator_of(plan, Speeds.of({0: 2.0}))
    for one in with_present_cuts(plan, estimator.estimate(plan), estimator):
        assert recomputed_ops(one) == {3, 4, 5, 20}
    for one in with_present_cuts(plan, estimator.estimate(plan), estimator, range(0)):
        assert recomputed_ops(one) == set()


def test_a_pattern_joins_neighbours() -> None:
    plan = with_cuts(plan_of(2), [0, 10, model_of(plan_of()).num_ops], {2, 3, 4, 8, 9, 10, 12})
    assert [stage.recompute for stage in plan.stages] == [(((2, 5), (8, 10)),), (((10, 11), (12, 13)),)]


def test_plans_whose_stages_cannot_be_cut_anew_are_left_alone() -> None:
    mixed = plan_of()
    first = replace(mixed.stages[0], devices=((0, 4),), degrees=Degrees(2), runs=(OpRun(0, 2, 1, 2),))
    mixed = replace(mixed, stages=(first, *mixed.stages[1:]))
    for plan in (plan_of(1), mixed):
        estimator = estimator_of(plan, Speeds())
        assert with_present_cuts(plan, estimator.estimate(plan), estimator) == []
