"""Slowed devices and links: estimator, simulator and batch planner take the same factors, and nothing else changes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.batching.planned import planned_costs
from penstock.costs.sources import open_costs
from penstock.costs.speeds import OpClass, SlowedCosts, Speeds, class_of
from penstock.errors import InputError
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.timing.estimate import Estimator
from penstock.timing.iteration_estimate import Estimate
from penstock.timing.planned import clocked, planned_pipeline


def plan_of(devices: list[list[tuple[int, ...]]], tp: int = 1, cluster: str = "4xa100-80gb+4xa100-80gb") -> Plan:
    plan = Plan("gpt-350m", cluster, 32, (), MicroBatching("padded", samples=2), len(devices[0]), seq_length=1024)
    ops = model_of(plan).num_ops
    cuts = [ops * at // len(devices) for at in range(len(devices) + 1)]
    stages = tuple(Stage(cuts[at], cuts[at + 1], tuple(own), Degrees(tp, len(own[0]) // tp)) for at, own in enumerate(devices))
    return replace(plan, stages=stages)


PIPELINE = plan_of([[(0,)], [(1,)], [(4,)], [(5,)]])


def estimate(plan: Plan, speeds: Speeds | None = None) -> Estimate:
    cluster = cluster_of(plan)
    source = open_costs("roofline", cluster)
    return Estimator(model_of(plan), cluster, source if speeds is None else SlowedCosts(source, speeds)).estimate(plan)


def test_no_slow_down_changes_nothing() -> None:
    assert estimate(PIPELINE, Speeds()) == estimate(PIPELINE) == estimate(PIPELINE, Speeds.of({2: 1.0}, {(0, 1): 1.0}))


def test_the_passes_of_a_slowed_rank_take_longer_and_no_other() -> None:
    usual, slowed = estimate(PIPELINE), estimate(PIPELINE, Speeds.of({1: 1.5}))
    for before, after in zip(usual.stages, slowed.stages, strict=True):
        factor = 1.5 if before.index == 1 else 1.0
        assert after.work.forward_pass_s == pytest.approx(factor * before.work.forward_pass_s)
        assert after.work.backward_pass_s == pytest.approx(factor * before.work.backward_pass_s)
        assert after.optimizer_s == pytest.approx(factor * before.optimizer_s)
        assert (after.memory, after.limit_bytes, after.work.transfer_in_s) == (before.memory, before.limit_bytes, before.work.transfer_in_s)
    assert slowed.time_s > usual.time_s and slowed.mfu < usual.mfu


def test_classes_of_ops_are_slowed_apart() -> None:
    model = model_of(PIPELINE)
    both = estimate(PIPELINE, Speeds({0: {OpClass.MEMORY: 2.0}})).stages[0].work.forward_s
    usual = estimate(PIPELINE).stages[0].work.forward_s
    all_slow = estimate(PIPELINE, Speeds.of({0: 2.0})).stages[0].work.forward_s
    assert usual < both < all_slow
    kinds = {place.op.kind: class_of(place.op) for place in model.ops}
    assert kinds["linear"] is OpClass.MATMUL and kinds["norm"] is kinds["embedding"] is OpClass.MEMORY
    assert kinds["attention"] is OpClass.ATTENTION


def test_an_update_is_as_slow_as_what_memory_bounds_and_a_link_both_ways() -> None:
    cluster = cluster_of(PIPELINE)
    source = open_costs("roofline", cluster)
    speeds = Speeds({4: {OpClass.MATMUL: 1.0, OpClass.ATTENTION: 1.0, OpClass.MEMORY: 3.0}}, {(1, 4): 2.0})
    slowed = SlowedCosts(source, speeds)
    for rank, factor in ((1, 1.0), (4, 3.0)):
        device = slowed.links_of(cluster).device(rank).name
        assert slowed.optimizer_s(1e8, device) == pytest.approx(factor * source.optimizer_s(1e8, "a100-80gb"))
    assert [speeds.link_factor(*pair) for pair in ((1, 4), (4, 1), (1, 5))] == [2.0, 2.0, 1.0]


def test_measured_costs_are_slowed_like_modelled_ones() -> None:
    """A profile has times of the host, which are no slower."""
    plan = replace(plan_of([[(0,)], [(1,)]], cluster="2xh200-141gb"), costs="profile:h200-141gb")
    cluster, model = cluster_of(plan), model_of(plan)
    source = open_costs(plan.costs, cluster)
    usual, slowed = (Estimator(model, cluster, own).estimate(plan) for own in (source, SlowedCosts(source, Speeds.of({1: 1.5}))))
    assert slowed.stages[1].work.forward_s == pytest.approx(1.5 * usual.stages[1].work.forward_s)
    assert slowed.stages[0].work == usual.stages[0].work and slowed.source == usual.source


def test_a_tensor_parallel_group_is_as_slow_as_its_slowest() -> None:
    """And stays valid: the slowed device is of the others' kind."""
    plan = plan_of([[(0, 1), (2, 3)], [(4, 5), (6, 7)]], tp=2)
    usual, slowed = estimate(plan), estimate(plan, Speeds.of({3: 2.0}))
    assert slowed.replica == 1
    assert slowed.stages[0].work.forward_s == pytest.approx(2 * usual.stages[0].work.forward_s)
    assert slowed.stages[0].work.forward_tp_s == pytest.approx(usual.stages[0].work.forward_tp_s)
    assert slowed.stages[1].work == usual.stages[1].work


def test_collectives_between_nodes_keep_their_price_beside_a_slowed_device() -> None:
    plan = plan_of([[(3, 4)], [(1, 2)]], tp=2)
    usual, slowed = estimate(plan), estimate(plan, Speeds.of({4: 2.0}))
    assert slowed.stages[0].work.forward_tp_s == pytest.approx(usual.stages[0].work.forward_tp_s)


@pytest.mark.parametrize(("pair", "cut"), [((0, 1), 0), ((1, 4), 1)])
def test_messages_over_a_slowed_link_take_longer(pair: tuple[int, int], cut: int) -> None:
    usual, slowed = estimate(PIPELINE), estimate(PIPELINE, Speeds.of({}, {pair: 4.0}))
    for before, after in zip(usual.stages, slowed.stages, strict=True):
        assert after.work.transfer_in_s == pytest.approx((4 if before.index == cut + 1 else 1) * before.work.transfer_in_s)
        assert after.work.transfer_out_s == pytest.approx((4 if before.index == cut else 1) * before.work.transfer_out_s)
        assert after.work.forward_s == before.work.forward_s


def test_links_are_slowed_once_whoever_asks() -> None:
    """The batch planner hands its estimator a cluster that it has asked the source for."""
    source = SlowedCosts(open_costs("roofline", cluster_of(PIPELINE)), Speeds.of({}, {(1, 4): 2.0}))
    slowed = source.links_of(cluster_of(PIPELINE))
    assert source.links_of(slowed) == slowed


def test_the_simulator_and_the_batch_planner_agree_with_the_estimate() -> None:
    speeds, cluster, model = Speeds.of({4: 1.7}, {(1, 4): 2.0}), cluster_of(PIPELINE), model_of(PIPELINE)
    source = open_costs("roofline", cluster)
    found = planned_pipeline(PIPELINE, model, cluster, SlowedCosts(source, speeds))
    assert found.estimate == estimate(PIPELINE, speeds)
    assert found.workload.durations_s[0, :, 0].tolist() == [stage.work.forward_pass_s for stage in found.estimate.stages]
    assert clocked(PIPELINE, found.estimate).time_s > clocked(PIPELINE, estimate(PIPELINE)).time_s
    grids = [planned_costs(PIPELINE, model, cluster, own, 1024) for own in (source, SlowedCosts(source, speeds))]
    forward = [[grid.layouts["padded"].at(2, 1024, 0)[grid.stage_class[0, stage], 0, 0] for stage in range(4)] for grid in grids]
    assert np.array(forward[1]) / forward[0] == pytest.approx([1, 1, 1.7, 1])
    assert grids[1].hops[0, 0, 1] == pytest.approx(2 * grids[0].hops[0, 0, 1])


@pytest.mark.parametrize(
    ("ranks", "links", "told"),
    [
        ({0: 0.0}, {}, "rank 0, matmul: the factor is 0.0"),
        ({0: math.inf}, {}, "rank 0, matmul: the factor is inf"),
        ({}, {(0, 1): -1.0}, "link 0-1: the factor is -1.0"),
        ({}, {(1, 0): 2.0}, "link 1-0: two ranks were expected"),
        ({9: 2.0}, {}, "rank 9 is slowed, but the cluster has ranks 0 to 7"),
    ],
)
def test_senseless_speeds_are_refused(ranks: dict[int, float], links: dict[tuple[int, int], float], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Speeds.of(ranks, links).on(cluster_of(PIPELINE))
