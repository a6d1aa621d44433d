"""Lowering with what passes really take: transfers stand where they will be ready."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from oracles.clock import makespan_s

from penstock.batching.example import small_costs
from penstock.batching.workloads import batch_durations_s, batch_workload
from penstock.costs.sources import open_costs
from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.programs.check import check_programs
from penstock.programs.durations import StageWeights, durations_of, priced_weights, stage_weights
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.schedules.rules import schedule_of
from penstock.timing.estimate import Estimator

MIXED = "1xa100-40gb+1xv100-32gb+1xt4+1xa100-40gb"


def priced(plan: Plan) -> list[StageWeights]:
    cluster = cluster_of(plan)
    return priced_weights(model_of(plan), plan, cluster, open_costs("roofline", cluster))


def micro_batches(plan: Plan, generator: np.random.Generator, count: int = 8) -> tuple[MicroBatch, ...]:
    """Of random lengths."""
    size, lengths = 4, generator.integers(16, plan.seq_length, count).tolist()
    return tuple(MicroBatch(k, tuple(range(size * k, size * k + size)), "padded", (n,) * size, (), n) for k, n in enumerate(lengths))


def ratio(plan: Plan, model: Model, micros: tuple[MicroBatch, ...], weights: StageWeights) -> float:
    """Time of programs ordered by arithmetic over that of programs ordered by the times themselves."""
    times = durations_of(weights, micros)
    work = ReplicaWork(micros, schedule_of(plan.schedule, plan.num_stages, len(micros)))
    spans = []
    for durations in (None, times):
        programs = lower(plan, model, [replace(work, durations_s=durations)])
        assert check_programs(programs, plan, model) == []
        spans.append(makespan_s(programs, times, 0.05 * float(np.mean(times[0]))))
    return spans[0] / spans[1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_real_times_serve_stages_of_unequal_speed(schedule: str) -> None:
    """Arithmetic does not see that a stage's device is slow; micro-batches then arrive before their receive stands."""
    plan = uniform_plan("gpt-350m", MIXED, pp=4, global_batch=32, micro_batch=4, schedule=schedule, precision="fp16")
    model, generator, [weights] = model_of(plan), np.random.default_rng(0), priced(plan)
    found = [ratio(plan, model, micro_batches(plan, generator), weights) for _ in range(8)]
    assert min(found) > 0.995
    if schedule == "gpipe":
        assert np.mean(found) > 1.01


def test_seconds_are_those_of_the_estimate() -> None:
    plan = uniform_plan("gpt-350m", MIXED, pp=2, replicas=2, global_batch=32, micro_batch=4, recompute="full")
    cluster = cluster_of(plan)
    usual = MicroBatch(0, tuple(range(4)), "padded", (plan.seq_length,) * 4, (), plan.seq_length)
    paces = Estimator(model_of(plan), cluster, open_costs("roofline", cluster)).paces(plan)
    assert len(paces) == 2
    for pace, weights in zip(paces, priced(plan), strict=True):
        forward, backward, inputs, weight = ([own for (own,) in kind] for kind in durations_of(weights, [usual]))
        assert forward == pytest.approx([work.forward_pass_s for work in pace.work])
        assert backward == pytest.approx([work.backward_pass_s for work in pace.work])
        assert weight == pytest.approx([work.weight_s for work in pace.work]) and min(weight) > 0
        assert inputs == pytest.approx([work.backward_pass_s - work.weight_s for work in pace.work])


def test_a_planned_batch_has_the_durations_that_it_was_planned_with() -> None:
    costs = small_costs(2, 1)
    batches = [MicroBatch(0, (0, 1), "padded", (5, 7), (), 7), MicroBatch(1, (2,), "padded", (9,), (), 9)]
    found, workload = batch_durations_s(costs, batches, 0), batch_workload(costs, batches, 0)
    assert found is not None
    np.testing.assert_allclose(found[:2], workload.durations_s[:2])
    np.testing.assert_allclose(np.sum(found[2:], axis=0), found[1])
    assert batch_durations_s(costs, [], 0) is None


def test_a_micro_batch_without_a_price_is_left_to_arithmetic() -> None:
    costs = small_costs(2, 1)
    huge = MicroBatch(0, tuple(range(64)), "padded", (10**6,) * 64, (), 10**6)
    values = costs.layouts["padded"].values.copy()
    values[-1] = np.inf
    unpriced = replace(costs, layouts={"padded": replace(costs.layouts["padded"], values=values)})
    assert batch_durations_s(unpriced, [huge], 0) is None


def test_arithmetic_of_a_stage_is_that_of_its_ops() -> None:
    """Of both stages, with one operation more for each op; halves of a backward pass add up to it."""
    plan = uniform_plan("gpt-tiny", "4xcpu", pp=2, tp=2, global_batch=8, micro_batch=4)
    model, shape = model_of(plan), Shape.padded(4, 16)
    micro = MicroBatch(0, (0, 1, 2, 3), "padded", (16,) * 4, (), 16)
    kinds = durations_of(stage_weights(model, plan), [micro])
    for number, stage in enumerate(plan.stages):
        ops = [place.op for place in model.ops[stage.first : stage.last]]
        forward, backward, input_half, weight_half = (kind[number][0] for kind in kinds)
        assert forward == pytest.approx(sum(op.flops.at(shape, 2) for op in ops) + len(ops))
        assert backward == pytest.approx(sum(op.backward_flops.at(shape, 2) for op in ops) + len(ops))
        assert input_half + weight_half == pytest.approx(backward) and 0 < weight_half < backward / 2
