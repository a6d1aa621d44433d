from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.costs.sources import open_costs
from penstock.models.shapes import Shape
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.timing.estimate import Estimator
from penstock.timing.recorded import can_be_recorded, is_recorded, recorded_length, recorded_rows

SMALL = {"family": "gpt", "layers": 2, "hidden": 64, "heads": 4, "seq_length": 32, "vocab": 64}


def _plan(stage: dict[str, Any] | None = None, **changes: Any) -> Plan:
    plan = Plan(SMALL, "2xh200", 8, (), MicroBatching("padded", "fixed", 2), seq_length=32, precision="bf16")
    whole = {"first": 0, "last": model_of(plan).num_ops, "devices": ((0,),)}
    return replace(plan, **{"stages": (Stage(**whole | (stage or {})),)} | changes)


@pytest.mark.parametrize(
    ("plan", "can", "does"),
    [
        (_plan(), True, True),
        (_plan(micro_batching=MicroBatching("padded", "dynamic")), True, False),
        (_plan(micro_batching=MicroBatching("packed", "fixed", 2)), True, False),
        (_plan(model=SMALL | {"dropout": 0.1}), False, False),
        (_plan(schedule="zero-bubble"), False, False),
        (_plan(schedule="pipedream"), False, False),
        (_plan({"devices": ((0, 1),), "degrees": Degrees(2, 1)}), False, False),
        (_plan({"devices": ((0, 1),), "degrees": Degrees(1, 2)}), True, True),
        (_plan({"devices": ((0, 1),), "degrees": Degrees(1, 2), "zero": 1}), True, True),
        (_plan({"devices": ((0, 1),), "degrees": Degrees(1, 2), "zero": 2}), False, False),
        (_plan({"devices": ((0, 1),), "degrees": Degrees(1, 2), "runs": (OpRun(2, 4, 2, 1),)}), False, False),
    ],
)
def test_what_is_the_same_work_every_time_can_be_recorded(plan: Plan, can: bool, does: bool) -> None:
    model, stage = model_of(plan), plan.stages[0]
    assert (can_be_recorded(plan, stage, model), is_recorded(plan, stage, model, ragged=True)) == (can, does)


def test_stages_of_a_pipeline_see_too_many_shapes_of_ragged_samples() -> None:
    plan = _plan()
    halves = replace(plan, stages=(replace(plan.stages[0], last=5), replace(plan.stages[0], first=5, devices=((1,),))))
    assert [is_recorded(halves, halves.stages[0], model_of(plan), ragged=ragged) for ragged in (True, False)] == [False, True]


def test_rows_have_few_lengths() -> None:
    for has_decoder, most, dearest in ((False, 8, 1.125), (True, 4, 1.25)):
        lengths = {length: recorded_length(length, has_decoder=has_decoder) for length in range(1, 4096)}
        assert all(length <= own <= max(length + 7, dearest * length) and own % 8 == 0 for length, own in lengths.items())
        assert len({own for length, own in lengths.items() if 256 <= length < 512}) <= most + 1


def test_rows_are_padded_no_further_than_the_plans_own() -> None:
    """And never cut, where a sample is longer."""
    assert [recorded_rows(100, 0, (most, 0)) for most in (512, 102, 90)] == [(104, 0), (102, 0), (100, 0)]
    assert recorded_rows(100, 50, (512, 52)) == (112, 52)


def test_a_recorded_stage_waits_for_no_host() -> None:
    """One row of 96 tokens: a GPU is done before the next kernel is issued."""
    plan = Plan("gpt-1.3b", "1xh200", 8, (), MicroBatching("padded", "fixed", 1), seq_length=96, precision="bf16")
    plan = replace(plan, stages=(Stage(0, model_of(plan).num_ops, ((0,),)),))
    estimator = Estimator(model_of(plan), cluster_of(plan), open_costs("profile:h200-141gb"), shapes=[Shape.padded(1, 96)])
    fixed = estimator.estimate(plan)
    dynamic = estimator.estimate(replace(plan, micro_batching=MicroBatching("padded", "dynamic", 1)))
    (recorded,), (issued,) = fixed.stages, dynamic.stages
    assert recorded.work.waiting_s == 0 < issued.work.waiting_s and np.isclose(recorded.work.forward_s, issued.work.forward_s)
    assert fixed.time_s < 0.95 * dynamic.time_s
