"""Plans as workloads: times and bytes are those of the estimate, and the simulation agrees with its formulas where it should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.costs.roofline import Roofline
from penstock.costs.sources import open_costs
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import read_plan
from penstock.timing.execution import Execution, execute
from penstock.timing.order_memory import in_flight
from penstock.timing.planned import PlannedPipeline, clocked, planned_pipeline, simulated

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.json"))


def run(plan: Plan, costs: str = "roofline") -> tuple[PlannedPipeline, Execution]:
    cluster = cluster_of(plan)
    pipeline = planned_pipeline(plan, model_of(plan), cluster, open_costs(costs, cluster))
    return pipeline, execute(pipeline.schedule, pipeline.workload)


def gpt(**more: Any) -> Plan:
    return uniform_plan("gpt-1.3b", "4xa100-80gb", **{"global_batch": 32, "micro_batch": 2, "pp": 4, **more})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_take_no_longer_than_estimated(path: Path) -> None:
    """The formulas hide no message behind compute; the simulation does."""
    pipeline, found = run(read_plan(path))
    slowest = max(stage.work.total_s - stage.work.transfer_in_s - stage.work.transfer_out_s for stage in pipeline.estimate.stages)
    assert slowest * pipeline.workload.num_micro_batches <= found.makespan_s <= pipeline.estimate.time_s * (1 + 1e-9)
    assert found.violation is None


@pytest.mark.parametrize("gradients", ["", "fp32"])
@pytest.mark.parametrize("more", [{}, {"recompute": "full"}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"schedule": "gpipe"},
                                  {"seq_length": 8}], ids=str)  # fmt: skip
def test_times_and_memory_are_those_of_the_estimate(more: dict[str, Any], gradients: str) -> None:
    """With wider gradients a cast, and with short samples the optimizer's step, is the fullest moment of some stages."""
    pipeline, found = run(replace(gpt(**more), gradients=gradients))
    for index, stage in enumerate(pipeline.estimate.stages):
        compute_s = stage.work.total_s - stage.work.transfer_in_s - stage.work.transfer_out_s
        assert pipeline.workload.durations_s[:, index].sum(axis=0) == pytest.approx(compute_s)
        assert found.peak_bytes[index] == pytest.approx(stage.memory.total_bytes)


@pytest.mark.parametrize("chunks", [2, 3])
def test_a_rank_of_several_chunks_steps_once_after_all_of_its_passes(chunks: int) -> None:
    """The program has one step at its end: no chunk's weights are updated beside the passes of another."""
    pipeline, found = run(gpt(schedule="interleaved", chunks=chunks, global_batch=8))
    steps_s = [sum(stage.optimizer_s for stage in pipeline.estimate.stages if stage.group == group) for group in range(4)]
    last_s = found.end_s.max(axis=-1).max(axis=0)
    ends_s = [max(last_s[stage] for stage in range(4 * chunks) if stage % 4 == group) + steps_s[group] for group in range(4)]
    assert found.makespan_s >= max(ends_s) * (1 - 1e-9)


def test_interleaved_chunks_share_devices_and_take_the_memory_of_their_schedule() -> None:
    pipeline, found = run(gpt(schedule="interleaved", chunks=2))
    assert pipeline.workload.devices == (0, 1, 2, 3, 0, 1, 2, 3) and len(pipeline.schedule) == 4
    held, work = in_flight(pipeline.schedule).by_device, pipeline.workload
    for device in range(3):  # whose two chunks are equal
        activations = held[device] * work.stored_bytes[device, 0] + work.workspace_bytes[1, device, 0]
        assert found.peak_bytes[device] == pytest.approx(work.base_bytes[device] + activations)
    # chunks are fullest at different moments, so that the estimate, which adds their maxima, is more
    assert all(found.peak_bytes <= [stage.memory.total_bytes for stage in pipeline.estimate.stages[:4]])


def test_zero_bubble_splits_the_backward_pass_and_is_shorter() -> None:
    pipeline, found = run(gpt(schedule="zero-bubble"))
    plain, whole = run(gpt())
    assert pipeline.workload.durations_s[:2] == pytest.approx(plain.workload.durations_s)
    assert pipeline.workload.durations_s[2:].sum(axis=0) == pytest.approx(pipeline.workload.durations_s[1])
    assert 0.2 < (pipeline.workload.durations_s[3] / pipeline.workload.durations_s[1]).mean() <= 0.5
    assert found.makespan_s < whole.makespan_s
    assert found.makespan_s == pytest.approx(pipeline.estimate.time_s, rel=0.05)


def test_a_measured_profile_serves_as_well() -> None:
    plan = uniform_plan("gpt-1.3b", "4xh200-141gb", global_batch=16, micro_batch=2, pp=4)
    pipeline, found = run(plan, "profile:h200-141gb")
    for index, stage in enumerate(pipeline.estimate.stages):
        assert found.peak_bytes[index] == pytest.approx(stage.memory.total_bytes)


def test_one_stage_is_busy_all_the_time() -> None:
    pipeline, found = run(gpt(pp=1, replicas=4))
    assert found.device_busy_s()[0] == pytest.approx(float(found.end_s.max())) and found.makespan_s == pytest.approx(
        pipeline.estimate.time_s
    )
    assert found.makespan_s > float(found.end_s.max())  # gradients of four replicas, and the optimizer


def test_durations_are_the_passes_of_the_estimate() -> None:
    pipeline, _ = run(gpt(pp=2, tp=2, schedule="zero-bubble"))
    for stage in pipeline.estimate.stages:
        forward, backward, inputs, weights = pipeline.workload.durations_s[:, stage.index, 0]
        work = stage.work
        assert (forward, backward) == (work.forward_pass_s, work.backward_pass_s) and weights == work.weight_s > 0
        assert inputs == pytest.approx(backward - weights) and work.forward_tp_s > 0


def test_the_search_judges_by_what_simulate_shows() -> None:
    pipeline, found = run(gpt(pp=2, tp=2))
    plan = gpt(pp=2, tp=2)
    again = simulated(plan, pipeline.estimate)
    assert again.makespan_s == found.makespan_s and np.array_equal(again.end_s, found.end_s)
    assert again.pipeline_s == found.end_s.max() < again.makespan_s


def test_the_roofline_is_a_source_like_any() -> None:
    plan = gpt()
    same = planned_pipeline(plan, model_of(plan), cluster_of(plan), Roofline())
    assert np.array_equal(same.workload.durations_s, run(plan)[0].workload.durations_s)


@pytest.mark.parametrize("count", [1, 2, 8, 32])
@pytest.mark.parametrize("more", [{}, {"schedule": "zero-bubble"}, {"schedule": "interleaved", "chunks": 3}, {"schedule": "gpipe"}])
def test_what_is_shown_is_what_the_simulator_says(more: dict[str, Any], count: int) -> None:
    """Formulas are near it as well; chunks are only shorter steps to fill where micro-batches come in whole rounds."""
    plan = gpt(global_batch=count, micro_batch=1, **more)
    pipeline, found = run(plan)
    shown = clocked(plan, pipeline.estimate)
    assert (shown.time_s, shown.pipeline_s) == pytest.approx((found.makespan_s, found.pipeline_s), rel=1e-12)
    assert sum(time_s for _, time_s in shown.shares()) == pytest.approx(shown.time_s)
    assert shown.tokens_per_s == pytest.approx(count * plan.seq_length / shown.time_s)
    assert clocked(plan, shown) == shown and shown.formula_s == pipeline.estimate.time_s
    assert 0.9 * shown.formula_s < shown.time_s and (shown.time_s <= shown.formula_s * 1.01 or (plan.num_chunks > 1 and count < 4))
