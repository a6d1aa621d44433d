"""Batches of interleaved plans: groups cost what their chunks do, orders are interleaved, memory holds, and nothing is below the bound."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import costs_for, plan_batch, plan_with_orders
from penstock.batching.ways import BatchWays
from penstock.batching.workloads import batch_workload
from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import execute


def plan_of(chunks: int, model: str = "gpt-1.3b") -> Plan:
    more = {"chunks": chunks, "schedule": "interleaved"} if chunks > 1 else {}
    plan = uniform_plan(model, "8xa100-40gb", global_batch=48, micro_batch=1, pp=4, replicas=2, **more)  # type: ignore[arg-type]
    stages = tuple(replace(stage, recompute=((), ((stage.first, stage.last),))) for stage in plan.stages)
    return replace(plan, stages=stages, micro_batching=MicroBatching("padded", "dynamic"))


def samples_of(count: int) -> list[SampleLengths]:
    source = random.Random(2)
    return [SampleLengths(i, source.randint(8, 900)) for i in range(count)]


@pytest.fixture(scope="module")
def costs() -> PipelineCosts:
    return costs_for(plan_of(2), 900)


def test_a_group_costs_what_its_chunks_do(costs: PipelineCosts) -> None:
    assert costs.chunks is not None and (costs.num_stages, costs.num_chunks) == (4, 2)
    alone = costs_for(plan_of(1), 900)
    points = np.array([2.0, 8.0]), np.array([64.0, 512.0]), np.zeros(2)
    whole, own = (one.layouts["padded"].at(*points) for one in (costs, alone))
    for group in range(4):
        of_group, of_stage = whole[:, costs.stage_class[0, group], 1], own[:, alone.stage_class[0, group], 1]
        assert of_group[:, :3].sum() == pytest.approx(of_stage[:, :3].sum(), rel=0.35)  # as much of the model, at other layers
        chunks = [costs.chunks.layouts["padded"].at(*points)[:, costs.chunks.stage_class[0, s], 1] for s in (group, group + 4)]
        assert np.allclose(of_group[:, :3], chunks[0][:, :3] + chunks[1][:, :3])
        assert np.allclose(of_group[:, 3], np.maximum(chunks[0][:, 3], chunks[0][:, 2] + chunks[1][:, 3]))
    assert costs.state_bytes.sum() == pytest.approx(alone.state_bytes.sum(), rel=0.01), "what a device has once is counted once"


@pytest.mark.parametrize("steps", [0, 400])
def test_batches_run_in_the_interleaved_order(costs: PipelineCosts, steps: int) -> None:
    samples = samples_of(48)
    plan = plan_batch(samples, costs, steps=steps, bound=True)
    assert sorted(i for replica in plan.replicas for one in replica.micro_batches for i in one.samples) == list(range(48))
    for index, replica in enumerate(plan.replicas):
        assert replica.schedule == schedule_of("interleaved", 8, len(replica.micro_batches), 2)
        assert [one.index for one in replica.micro_batches] == list(range(len(replica.micro_batches)))
        run = execute(replica.schedule, batch_workload(costs, replica.micro_batches, index))
        assert run.violation is None and run.pipeline_s == replica.predicted_s and tuple(run.peak_bytes) == replica.peak_bytes
        assert all(len(one.recompute) == 8 for one in replica.micro_batches)
    assert plan.bound_s <= plan.predicted_s
    assert plan_with_orders(samples, costs, steps=steps).predicted_s <= plan.predicted_s * (1 + 1e-9)


def test_what_does_not_fit_is_recomputed_or_cut_smaller(costs: PipelineCosts) -> None:
    samples, times = samples_of(48), []
    least = float(costs.state_bytes.max())
    for room in (30e9, 3e9, 1e9):
        tight = replace(costs, limit_bytes=np.full_like(costs.limit_bytes, least + room))
        plan = plan_batch(samples, tight)
        assert plan.peak_bytes <= least + room
        times.append(plan.predicted_s)
    assert times == sorted(times) and times[0] < times[-1]
    with pytest.raises(InfeasibleError):
        plan_batch(samples, replace(costs, limit_bytes=np.full_like(costs.limit_bytes, least + 1e6)))


def test_ways_and_two_lengths(costs: PipelineCosts) -> None:
    samples, free = samples_of(48), plan_batch(samples_of(48), costs).predicted_s
    for ways in (BatchWays(split="budget"), BatchWays(schedule="interleaved"), BatchWays(recompute="pattern 1")):
        found = ways.planned(samples, ways.limited(costs))
        assert all(len(one.recompute) == 8 for replica in found.replicas for one in replica.micro_batches)
        assert found.predicted_s >= 0.98 * free
    with pytest.raises(InputError, match="pipelines with one on each device group, this one has 2 stages"):
        BatchWays(schedule="1f1b").planned(samples, costs)
    pairs = costs_for(plan_of(2, "t5-large"), 64, 32)
    found = plan_batch([SampleLengths(i, 1 + 5 * i, 32 - i) for i in range(12)], pairs, bound=True)
    assert 0 < found.bound_s <= found.predicted_s
