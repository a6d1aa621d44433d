from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.costs.sources import open_costs
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Shape
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.timing.estimate import Estimator
from penstock.timing.recorded import FewShapes, can_be_recorded, is_recorded, recorded_length

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
        (_plan(micro_batching=MicroBatching("packed", "fixed", 2)), True, True),
        (_plan(micro_batching=MicroBatching("packed", "dynamic")), True, True),
        (_plan(micro_batching=MicroBatching("packed", "fixed", 2), model=SMALL | {"heads": 2, "hidden": 48}), True, False),
        (_plan(micro_batching=MicroBatching("packed", "fixed", 2), precision="fp32"), True, False),
        (_plan(micro_batching=MicroBatching("packed", "fixed", 2), model=SMALL | {"fused_attention": False}), True, False),
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
    packed = replace(halves, micro_batching=MicroBatching("packed", "fixed", 2))
    assert [is_recorded(halves, halves.stages[0], model_of(plan), ragged=ragged) for ragged in (True, False)] == [False, True]
    assert not any(is_recorded(packed, halves.stages[0], model_of(plan), ragged=ragged) for ragged in (True, False))


@pytest.mark.parametrize(("bits", "dearest"), [(2, 1.25), (3, 1.125), (4, 1.0625)])
def test_what_is_recorded_has_few_lengths(bits: int, dearest: float) -> None:
    lengths = {length: recorded_length(length, bits) for length in range(1, 4096)}
    assert all(length <= own <= max(length + 7, dearest * length) and own % 8 == 0 for length, own in lengths.items())
    assert len({own for length, own in lengths.items() if 256 <= length < 512}) <= 2**bits + 1


def _shapes(plan: Plan) -> FewShapes:
    return FewShapes.of(model_of(plan).ops, plan, plan.stages[0])


def _rows(length: int, dec_length: int = 0) -> MicroBatch:
    return MicroBatch(0, (0, 1), "padded", (length, 1), (dec_length, 1) if dec_length else (), length, dec_length)


def test_rows_are_padded_no_further_than_the_plans_own() -> None:
    """And never cut, where a sample is longer."""

    def shapes(*lengths: int) -> FewShapes:
        return replace(_shapes(_plan()), row_lengths=lengths)

    assert [shapes(most, 0).brought(_rows(100)).row_length for most in (512, 102, 90)] == [104, 102, 100]
    both = shapes(512, 52).brought(_rows(100, 50))
    assert (both.row_length, both.dec_row_length) == (112, 52)


def test_each_rank_has_filler_behind_its_own_samples() -> None:
    shapes = _shapes(_plan({"devices": ((0, 1),), "degrees": Degrees(1, 2)}))
    micro = MicroBatch(0, (3, 4, 5), "packed", (100, 30, 45), bounds={2: (0, 1, 3)})
    assert [shapes.brought(micro, index).row_length for index in range(2)] == [104, 80]
    assert shapes.num_tokens(micro.shape()) == 2 * 88


def test_what_keeps_a_gpu_busy_stays_as_it_is() -> None:
    """GPT 1.3B is busy from some 4,000 tokens on; on four ranks that share them, from four times as many, and where everything is
    recomputed, which takes the host longer than the device, from twice as many."""
    plan = Plan("gpt-1.3b", "1xh200", 8, (), MicroBatching("packed", "dynamic"))
    num_ops = model_of(plan).num_ops
    whole = Stage(0, num_ops, ((0,),))
    micro = MicroBatch(0, (0,), "packed", (4_333,), bounds={4: (0, 1, 1, 1, 1)})
    stages = whole, replace(whole, devices=((0, 1, 2, 3),), degrees=Degrees(1, 4)), replace(whole, recompute=((), ((0, num_ops),)))
    alone, four, again = (_shapes(replace(plan, stages=(stage,))) for stage in stages)
    assert not again.keeps_busy(Shape.packed((100,) * 73)) and again.keeps_busy(Shape.packed((100,) * 76))
    assert alone.brought(micro) == micro and alone.num_tokens(micro.shape()) == 4_333
    assert four.brought(micro).row_length == 4_352 and four.num_tokens(micro.shape()) == 4 * 1_088
    assert not alone.keeps_busy(Shape.packed((100,) * 36))


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


@pytest.mark.parametrize(
    ("batch", "devices", "waits"), [(2, ((0,),), 0.0), (2, ((0,), (1,)), 1.0), (4, ((0,), (1,)), 0.5), (8, ((0, 1),), 0.25)]
)
def test_passes_during_which_gradients_are_summed_are_not_recorded(batch: int, devices: Any, waits: float) -> None:
    """Those of one micro-batch of each replica."""
    batching = MicroBatching("packed", "fixed", 1 if len(devices) > 1 else 2)
    plan = Plan("gpt-1.3b", "2xh200", batch, (), batching, len(devices), seq_length=96, precision="bf16")
    degrees = Degrees(1, len(devices[0]))
    plan = replace(plan, stages=(Stage(0, model_of(plan).num_ops, devices, degrees),))
    one_by_one = replace(plan, micro_batching=replace(plan.micro_batching, layout="padded", policy="dynamic"))
    estimator = Estimator(model_of(plan), cluster_of(plan), open_costs("profile:h200-141gb"))
    (stage,), (issued,) = (estimator.estimate(own).stages for own in (plan, one_by_one))
    assert stage.work.waiting_s == pytest.approx(waits * issued.work.waiting_s, rel=0.05) and issued.work.waiting_s > 0
