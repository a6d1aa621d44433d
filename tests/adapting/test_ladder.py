"""Kinds of steps: each where it helps, with what it costs, and refused where it cannot be done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slow_pipelines import FOUR, MODEL, ladder_of, plan_of

from penstock.adapting.ladder import Ladder, Remedy, Rung, _with_shares, rung_between
from penstock.adapting.moves import moves
from penstock.batching.misplanning import batch_s
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import costs_for, plan_batch
from penstock.costs.sources import open_costs
from penstock.costs.speeds import Speeds
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan


def options(plan: Plan, speeds: Speeds, known: tuple[Plan, ...] = ()) -> dict[Rung, Remedy]:
    found = ladder_of(str(plan.cluster)).options(plan, speeds, known)
    assert [option.rung for option in found] == sorted((option.rung for option in found), key=list(Rung).index)
    for option in found:
        if not option.refused:
            assert check_plan(option.plan) == [] and rung_between(plan, option.plan) is option.rung
            assert option.time_s == pytest.approx(ladder_of(str(plan.cluster)).time_s(option.plan, speeds))
    return {option.rung: option for option in found}


def test_a_slow_stage_is_relieved_of_ops() -> None:
    found = options(FOUR, Speeds.of({1: 1.8}))
    assert found[Rung.CUTS].time_s < 0.9 * found[Rung.NOTHING].time_s
    assert found[Rung.CUTS].moved_bytes > 0 and found[Rung.CUTS].pause_s > found[Rung.NOTHING].time_s
    assert Rung.SHARES not in found and Rung.ADDITION not in found


def test_a_very_slow_device_is_best_left_out() -> None:
    found = options(FOUR, Speeds.of({1: 40.0}))
    assert found[Rung.EVICTION].time_s == min(option.time_s for option in found.values())
    assert found[Rung.EVICTION].plan.ranks == (0, 2, 3)


def test_replicas_share_micro_batches_by_speed_and_nothing_moves() -> None:
    plan = plan_of([[(0,), (1,)], [(2,), (3,)]], "4xa100-80gb")
    found = options(plan, Speeds.of({3: 3.0}))
    shares = found[Rung.SHARES]
    counts = shares.plan.micro_batching.per_replica
    assert sum(counts) == 16 and counts[0] > counts[1] >= 1
    assert shares.time_s < found[Rung.NOTHING].time_s and (shares.moved_bytes, shares.pause_s) == (0, 0.0)
    assert found[Rung.EVICTION].plan.num_replicas == 1 and found[Rung.EVICTION].plan.ranks == (0, 2)
    assert found[Rung.CUTS].time_s < shares.time_s and found[Rung.CUTS].plan.micro_batching.per_replica  # both together are better still


def test_no_other_shares_would_be_done_sooner() -> None:
    """By the formula that they are dealt out by, of all ways to share sixteen micro-batches."""
    for slow in (1.2, 1.7, 3.0, 8.0):
        plan, speeds = plan_of([[(0,), (1,)], [(2,), (3,)]], "4xa100-80gb"), Speeds.of({3: slow})
        estimator = ladder_of("4xa100-80gb").estimator(speeds)
        times = {}
        for first in range(1, 16):
            shared = replace(plan, micro_batching=replace(plan.micro_batching, per_replica=(first, 16 - first)))
            times[first] = estimator.estimate(shared).pipeline_s
        (dealt,) = _with_shares(plan, estimator)
        assert times[dealt.micro_batching.per_replica[0]] == pytest.approx(min(times.values()))


def test_a_replica_that_is_left_out_takes_its_share_with_it() -> None:
    three = plan_of([[(0,), (1,), (2,)]], "4xa100-80gb")
    uneven = replace(three, micro_batching=replace(three.micro_batching, per_replica=(6, 6, 4)))
    evicted = options(uneven, Speeds.of({2: 20.0}))[Rung.EVICTION]
    assert evicted.plan.ranks == (0, 1) and not evicted.refused
    assert sum(evicted.plan.micro_batching.per_replica or (16,)) == 16


def test_dp_ranks_divide_micro_batches_by_speed() -> None:
    """A rank at half the speed gets a third; where its part is as small on a second stage, which nothing slows, that is still better."""
    two = plan_of([[(0, 1)], [(2, 3)]], "4xa100-80gb")
    stages = tuple(replace(stage, degrees=Degrees(1, 2)) for stage in two.stages)
    for plan in (replace(two, stages=stages), replace(two, stages=(replace(stages[0], last=stages[1].last),))):
        plan = replace(plan, global_batch=48, micro_batching=MicroBatching("padded", samples=6))
        found = options(plan, Speeds.of({1: 2.0}))
        shares = found[Rung.SHARES]
        assert shares.plan.micro_batching.slower == ((1, (2.0, 2.0, 2.0)),) and (shares.moved_bytes, shares.pause_s) == (0, 0.0)
        assert shares.time_s < (0.9 if len(plan.stages) > 1 else 0.75) * found[Rung.NOTHING].time_s
        again = options(shares.plan, Speeds())  # it is as fast as the other again
        assert again[Rung.SHARES].plan == plan and again[Rung.SHARES].time_s < 0.8 * again[Rung.NOTHING].time_s


def test_plans_with_dynamic_micro_batches_are_made_for_measured_speeds() -> None:
    """Whatever else changes, and without ranks that have no work any more."""
    plan = replace(plan_of([[(0,), (1,)], [(2,), (3,)]], "4xa100-80gb"), micro_batching=MicroBatching("padded", "dynamic"))
    found = options(plan, Speeds.of({3: 3.0}))
    assert found[Rung.SHARES].time_s < 0.8 * found[Rung.NOTHING].time_s
    made_for = {rung: option.plan.micro_batching.slower for rung, option in found.items() if rung is not Rung.NOTHING}
    assert made_for.pop(Rung.EVICTION) == () and set(made_for.values()) == {((3, (3.0, 3.0, 3.0)),)} and Rung.CUTS in made_for


def test_dynamic_micro_batches_are_made_for_measured_links() -> None:
    """By the simulator no other plan of the same samples takes as little time on the slow link, and the planner knows as much."""
    plan = replace(plan_of([[(0,), (1,)], [(2,), (3,)]], "4xa100-80gb"), micro_batching=MicroBatching("packed", "dynamic"), global_batch=48)
    found = options(plan, Speeds.of({}, {(1, 3): 20.0}))
    shares = found[Rung.SHARES]
    assert shares.plan.micro_batching.slower_links == ((1, 3, 20.0),) and (shares.moved_bytes, shares.pause_s) == (0, 0.0)
    assert shares.time_s < 0.95 * found[Rung.NOTHING].time_s
    samples = [SampleLengths(number, 96 + 37 * number % 900) for number in range(48)]
    usual, slow = (costs_for(own, 1024) for own in (plan, shares.plan))
    before, after = (plan_batch(samples, own, steps=1000) for own in (usual, slow))
    assert batch_s(after, slow) < 0.95 * batch_s(before, slow)
    tokens = [[sum(sum(one.lengths) for one in own.micro_batches) for own in made.replicas] for made in (before, after)]
    assert tokens[1][1] < tokens[0][1]  # less goes over the slow link
    again = options(shares.plan, Speeds())
    assert again[Rung.SHARES].plan == plan and again[Rung.SHARES].time_s < 0.97 * again[Rung.NOTHING].time_s


def test_a_free_device_takes_the_place_of_a_slow_one() -> None:
    plan = plan_of([[(0,)], [(1,)], [(2,)], [(3,)]])
    found = options(plan, Speeds.of({2: 2.0, 4: 2.0}))
    assert found[Rung.ADDITION].plan.stages[2].devices == ((5,),)  # rank 4 is free, but slow too
    assert found[Rung.ADDITION].time_s == pytest.approx(ladder_of().time_s(plan, Speeds()))


def test_a_free_device_of_the_same_node_is_taken_first() -> None:
    plan = plan_of([[(0,)], [(1,)], [(2,)], [(8,)]], "2xp4d.24xlarge")
    found = options(plan, Speeds.of({8: 2.0}))
    assert found[Rung.ADDITION].plan.stages[3].devices == ((9,),)


def test_a_plan_that_was_left_may_come_back() -> None:
    shorter = plan_of([[(0,)], [(1,)], [(3,)]], "4xa100-80gb")
    found = options(shorter, Speeds(), (FOUR,))
    assert found[Rung.ADDITION].plan == FOUR and found[Rung.ADDITION].time_s < found[Rung.NOTHING].time_s


def test_a_tensor_parallel_group_stays_together() -> None:
    plan = plan_of([[(0, 1)], [(2, 3)], [(4, 5)], [(6, 7)]])
    found = options(plan, Speeds.of({3: 2.0}))
    assert found[Rung.CUTS].time_s < 0.9 * found[Rung.NOTHING].time_s
    assert all(stage.devices == own.devices for stage, own in zip(found[Rung.CUTS].plan.stages, plan.stages, strict=True))


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    """Two devices of little memory: one alone cannot hold the model."""
    plan = plan_of([[(0,)], [(1,)]], "2xt4")
    large = replace(plan, model={**MODEL, "hidden": 2560, "layers": 12, "heads": 20}, precision="fp16")
    ops = model_of(large).num_ops
    large = replace(large, stages=(Stage(0, ops // 2, ((0,),)), Stage(ops // 2, ops, ((1,),))))
    cluster = cluster_of(large)
    ladder = Ladder(model_of(large), cluster, open_costs("roofline", cluster))
    found = {one.rung: one for one in ladder.options(large, Speeds.of({1: 50.0}))}
    assert "would hold" in found[Rung.EVICTION].refused and "GB" in found[Rung.EVICTION].refused


def test_a_faster_plan_that_does_not_fit_hides_none_that_does() -> None:
    plan = plan_of([[(0,)], [(1,)]], "2xt4")
    large = replace(plan, model={**MODEL, "hidden": 2560, "layers": 12, "heads": 20}, precision="fp16")
    ops = model_of(large).num_ops

    def cut(at: int) -> Plan:
        return replace(large, stages=(Stage(0, at, ((0,),)), Stage(at, ops, ((1,),))))

    cluster = cluster_of(large)
    ladder = Ladder(model_of(large), cluster, open_costs("roofline", cluster))
    speeds, known = Speeds.of({1: 9.0}), cut(ops - 2)
    found = {one.rung: one for one in ladder.options(cut(ops // 2), speeds, (known,))}
    assert ladder.time_s(known, speeds) < found[Rung.CUTS].time_s and not ladder.estimator(speeds).estimate(known).fits
    assert found[Rung.CUTS].plan != known and not found[Rung.CUTS].refused.startswith("stage")


def test_a_move_without_room_for_both_plans_is_refused() -> None:
    ladder = Ladder(model_of(FOUR), cluster_of(FOUR), open_costs("roofline", cluster_of(FOUR)))
    ladder.estimator(Speeds.of({1: 1.8}))  # to which both plans fit by themselves
    node = next(iter(ladder.cluster.nodes))
    ladder.cluster = ladder.cluster.with_nodes([replace(node, device=replace(node.device, memory_bytes=6 * 10**8))])
    found = {one.rung: one for one in ladder.options(FOUR, Speeds.of({1: 1.8}))}
    assert "of both plans" in found[Rung.CUTS].refused


def test_a_pause_is_no_longer_than_if_all_travelled_while_training_stands_still() -> None:
    found = options(FOUR, Speeds.of({1: 1.8}))[Rung.CUTS]
    ladder, speeds = ladder_of("4xa100-80gb"), Speeds.of({1: 1.8})
    whole_s = moves(FOUR, found.plan).time_s(ladder.estimator(speeds).cluster)
    step_s = ladder.time_s(FOUR, speeds)
    assert step_s < found.pause_s <= step_s + 1.5 * whole_s * (1 + 1e-9)


def test_free_devices_take_the_place_of_slow_ones_of_their_kind_each_once() -> None:
    plan = plan_of([[(0,)], [(1,)], [(2,)]], "4xa100-80gb")
    found = options(plan, Speeds.of({1: 2.0, 2: 2.0}))[Rung.ADDITION]
    assert not found.refused and len(set(found.plan.ranks)) == 3 and 3 in found.plan.ranks
    whole = plan_of([[(rank,)] for rank in range(8)], "1xp4d.24xlarge+1xg5.24xlarge")
    assert Rung.ADDITION not in options(whole, Speeds.of({2: 2.0}))  # what is free is no A100


def test_costs_of_speeds_long_ago_are_let_go() -> None:
    ladder = Ladder(model_of(FOUR), cluster_of(FOUR), open_costs("roofline", cluster_of(FOUR)))
    known = [ladder.estimator(Speeds.of({1: 1.5 + number / 10})) for number in range(20)]
    assert len(ladder._estimators) == 8 and ladder.estimator(Speeds.of({1: 1.5 + 19 / 10})) is known[-1]


def test_steps_are_told_apart() -> None:
    same, other = FOUR.stages, replace(FOUR.stages[0], recompute=(((0, 3),),))
    assert rung_between(FOUR, FOUR) is Rung.NOTHING
    assert rung_between(FOUR, replace(FOUR, stages=(other, *same[1:]))) is Rung.RECOMPUTATION
    swapped = (replace(same[0], devices=same[1].devices), replace(same[1], devices=same[0].devices), *same[2:])
    assert rung_between(FOUR, replace(FOUR, stages=swapped)) is Rung.ORDER
    moved = (replace(same[0], last=same[0].last - 1), replace(same[1], first=same[1].first - 1), *same[2:])
    assert rung_between(FOUR, replace(FOUR, stages=moved)) is Rung.CUTS
