"""What a run is compared with: the micro-batches that it had, not samples of the plan's full length."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
from penstock.runtime.telemetry.predicting import predict_steps
from penstock.timing.estimate import Estimator

STEPS = range(2, 5)


def plan_of(layout: str = "packed", **degrees: int) -> Plan:
    return uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout=layout, **degrees)  # type: ignore[arg-type]


def estimate(plan: Plan) -> float:
    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan).time_s


def test_dynamic_micro_batches_are_predicted_as_their_planner_does(data: str) -> None:
    plan = replace(plan_of(pp=2, replicas=2), micro_batching=MicroBatching("packed", "dynamic"))
    source, planner = run_inputs(TrainRequest(plan, data, 5, "run"))
    found = predict_steps(source, planner, STEPS)
    opened, batches = source.open()
    times = [planner.batch_plan(opened, batches[step]).predicted_s for step in STEPS]
    assert found.time_s == pytest.approx(np.median(times)) and len(found.forward_s) == len(found.backward_s) == 2
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
