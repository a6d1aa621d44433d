"""Batches whose micro-batches run in another order than the planner's own, where memory is short."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planner import costs_for, costs_of_batch, plan_batch, plan_with_orders
from penstock.batching.reorder import with_better_orders
from penstock.batching.workloads import batch_workload
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.programs.check import require_safe
from penstock.programs.lower import lower
from penstock.programs.work import work_of
from penstock.schedules.actions import FORWARD
from penstock.timing.execution import execute

PLAN = replace(
    uniform_plan("gpt-1.3b", "8xa100-40gb", pp=8, global_batch=48, micro_batch=1), micro_batching=MicroBatching("padded", "dynamic")
)
LIMIT_BYTES = 6e9 + 2**30  # the last for what NCCL keeps


@pytest.fixture(scope="module")
def samples() -> list[SampleLengths]:
    numbers = np.random.default_rng(0)
    return [SampleLengths(k, int(min(2000, max(10, numbers.lognormal(5, 1.5))))) for k in range(48)]


@pytest.fixture(scope="module")
def costs(samples: list[SampleLengths]) -> PipelineCosts:
    return costs_for(PLAN, max(sample.length for sample in samples), memory_limit_bytes=LIMIT_BYTES)


def assert_holds(found: BatchPlan, costs: PipelineCosts, samples: list[SampleLengths]) -> None:
    """All samples, numbered as they enter, with the time and the memory that the event clock says."""
    own = found.replicas[0]
    assert sorted(k for one in own.micro_batches for k in one.samples) == [sample.id for sample in samples]
    assert [action.micro_batch for action in own.schedule[0] if action.kind == FORWARD] == list(range(len(own.micro_batches)))
    run = execute(own.schedule, batch_workload(costs, own.micro_batches, 0))
    assert run.violation is None and run.pipeline_s == pytest.approx(own.predicted_s) and run.peak_bytes == pytest.approx(own.peak_bytes)
    assert found.predicted_s == pytest.approx(own.predicted_s + costs.fixed_s)


def test_a_better_order_is_taken_where_memory_is_short(samples: list[SampleLengths], costs: PipelineCosts) -> None:
    planned = plan_batch(samples, costs, steps=1000)
    found = with_better_orders(planned, costs, 1000)
    assert found.predicted_s < 0.9 * planned.predicted_s and found.replicas[0].order != "planned"
    assert_holds(found, costs, samples)
    assert with_better_orders(planned, costs, 1000) == found


def test_what_is_best_already_is_kept(samples: list[SampleLengths]) -> None:
    """With room for all, what the planner searched is the best that is known."""
    costs = costs_for(PLAN, max(sample.length for sample in samples))
    planned = plan_batch(samples[:12], costs, steps=20_000)
    found = with_better_orders(planned, costs, 100)
    assert found.predicted_s <= planned.predicted_s
    if found.replicas[0].order == "planned":
        assert found == planned


def test_the_batch_lowers_to_safe_programs_and_round_trips(samples: list[SampleLengths]) -> None:
    costs = costs_of_batch(PLAN, samples, memory_limit_bytes=LIMIT_BYTES)
    found = plan_with_orders(samples, costs, steps=1000)
    assert found.replicas[0].order != "planned" and BatchPlan.from_dict(found.to_dict()) == found
    model = model_of(PLAN)
    require_safe(lower(PLAN, model, work_of(found, PLAN)), PLAN, model)
    assert plan_with_orders(samples, costs, steps=0).replicas[0].order == "planned"
