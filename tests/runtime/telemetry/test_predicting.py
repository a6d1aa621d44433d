"""What a run is compared with: the micro-batches that it had, not samples of the plan's full length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.batching.planner import costs_for
from penstock.costs.sources import open_costs
from penstock.data.images import prepare_images
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.references import cluster_of, model_of
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import _parts, predict_peaks, predict_steps
from penstock.timing.estimate import Estimator

STEPS = range(2, 5)


def plan_of(layout: str = "packed", **degrees: Any) -> Plan:
    return uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout=layout, **degrees)  # type: ignore[arg-type]


def estimate(plan: Plan) -> float:
    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan).time_s


@pytest.mark.parametrize("more", [{}, {"chunks": 2, "schedule": "interleaved"}], ids=["1f1b", "interleaved"])
def test_dynamic_micro_batches_are_predicted_as_their_planner_does(data: str, more: dict[str, Any]) -> None:
    plan = replace(plan_of(pp=2, replicas=2, **more), micro_batching=MicroBatching("packed", "dynamic"))
    source, planner = run_inputs(TrainRequest(plan, data, 5, "run"))
    found = predict_steps(source, planner, STEPS)
    opened, batches = source.open()
    times = [planner.batch_plan(opened, batches[step]).predicted_s for step in STEPS]
    assert found.time_s == pytest.approx(np.median(times)) and len(found.forward_s) == len(found.backward_s) == plan.num_stages
    assert all(0 < forward < backward for forward, backward in zip(found.forward_s, found.backward_s, strict=True))


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_fixed_micro_batches_of_real_samples_take_less_than_full_ones(data: str, layout: str) -> None:
    plan = plan_of(layout, pp=2)
    source, planner = run_inputs(TrainRequest(plan, data, 5, "run"))
    found = predict_steps(source, planner, STEPS)
    assert 0.05 * estimate(plan) < found.time_s < estimate(plan)
    # One stage alone: the step is its passes one after the other, and what follows them.
    alone = plan_of(layout)
    source, planner = run_inputs(TrainRequest(alone, data, 5, "run"))
    one = predict_steps(source, planner, range(2, 3))
    fixed_s = costs_for(alone, alone.seq_length).fixed_s
    assert one.time_s == pytest.approx(4 * (one.forward_s[0] + one.backward_s[0]) + fixed_s)


@pytest.mark.parametrize("changes", [{"pp": 2, "replicas": 2}, {"pp": 2, "schedule": "zero-bubble"}, {}], ids=str)
def test_the_parts_of_each_rank_add_up_to_the_step(data: str, changes: dict[str, Any]) -> None:
    plan = plan_of(**changes)
    inputs = run_inputs(TrainRequest(plan, data, 5, "run"))
    found = predict_steps(*inputs, range(3, 4))
    assert sorted(found.parts) == list(plan.ranks)
    for own in found.parts.values():
        assert own.total_s == pytest.approx(found.time_s) and min(own.forward_s, own.backward_s, own.update_s) > 0
    for stage, forward_s in zip(plan.stages, found.forward_s, strict=True):  # of the replica that takes longest
        slowest_s = max(found.parts[rank].forward_s for ranks in stage.devices for rank in ranks)
        assert slowest_s == pytest.approx(4 / plan.num_replicas * forward_s)
    assert (found.parts[plan.ranks[0]].transfers_s > 0) == (len(plan.ranks) > 1)


def test_a_device_alone_waits_for_nobody() -> None:
    """Rounding is no transfer: 0.1 + 0.2 + 0.3 is more than 0.6."""
    found = SimpleNamespace(stages=[SimpleNamespace(optimizer_s=0.3)])
    for step_s, transfers_s in ((0.1 + 0.2 + 0.3, 0.0), (0.6 + 1e-6, pytest.approx(1e-6))):
        parts = _parts(plan_of(), step_s, np.array([[0.1]]), np.array([[0.2]]), found)  # type: ignore[arg-type]
        assert parts[0].transfers_s == transfers_s


def test_peaks_are_those_of_the_samples_there_are(data: str) -> None:
    plan = plan_of(pp=2)
    inputs = run_inputs(TrainRequest(plan, data, 5, "run"))
    found = predict_peaks(*inputs, STEPS)
    cluster = cluster_of(plan)
    stages = Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan).stages
    for rank, stage in enumerate(stages):
        assert stage.memory.state_bytes < found[rank] <= stage.memory.total_bytes
    long = replace(plan, seq_length=32)
    assert predict_peaks(*run_inputs(TrainRequest(long, data, 5, "run")), STEPS)[0] < found[0]


def test_peaks_are_those_of_the_step_with_the_most_tokens(data: str) -> None:
    source, planner = run_inputs(TrainRequest(plan_of(pp=2), data, 8, "run"))
    _, batches = source.open()
    fullest = max(range(8), key=lambda step: batches[step].num_tokens)
    assert predict_peaks(source, planner, range(8)) == predict_peaks(source, planner, range(fullest, fullest + 1))
    assert len({batches[step].num_tokens for step in range(8)}) > 1


def test_updates_of_all_stages_of_a_rank_are_its_own(data: str) -> None:
    """Of an interleaved pipeline a rank has several, and updates one after the other."""
    plan = plan_of(pp=2, chunks=2, schedule="interleaved")
    cluster = cluster_of(plan)
    stages = Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan).stages
    parts = predict_steps(*run_inputs(TrainRequest(plan, data, 5, "run")), STEPS).parts
    expected = [stages[rank].optimizer_s + stages[rank + 2].optimizer_s for rank in (0, 1)]
    assert [parts[rank].update_s for rank in (0, 1)] == pytest.approx(expected)


def test_images_and_other_schedules_are_predicted_as_the_plan_is(data: str, tmp_path: Path) -> None:
    records = np.zeros((20, 3073), np.uint8)
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    prepare_images([tmp_path / "data_batch_1.bin"], tmp_path / "images", (1.0, 0.0, 0.0))
    model = {"base": "resnet-tiny", "image_size": 32, "num_classes": 10}
    images = replace(uniform_plan("resnet-tiny", "2xcpu", global_batch=8, micro_batch=4), model=model)
    split = uniform_plan("gpt-tiny", "2xcpu", global_batch=16, micro_batch=4, pp=2, schedule="zero-bubble")
    for plan, folder in ((images, str(tmp_path / "images")), (split, data)):
        found = predict_steps(*run_inputs(TrainRequest(plan, folder, 5, "run")), STEPS)
        assert found.time_s == estimate(plan) and len(found.forward_s) == plan.num_stages
