"""Costs of plans: they agree with the estimator at single shapes, and batches planned from them fit."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import SampleLengths
from penstock.batching.planned import planned_costs, with_recompute_choices
from penstock.batching.planner import costs_for, costs_of_batch, plan_batch, plan_with_orders
from penstock.batching.workloads import batch_durations_s, batch_workload
from penstock.clusters import resolve_cluster
from penstock.costs.sources import open_costs
from penstock.errors import InputError
from penstock.models import resolve_model
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Layout
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.timing.estimate import Estimator
from penstock.timing.execution import execute
from penstock.timing.recorded import recorded_length


def prepared(model: str, cluster: str, source: str, layout: str = "padded", **degrees: int) -> tuple[Plan, PipelineCosts]:
    described, devices = resolve_model(model), resolve_cluster(cluster)
    plan: Any = uniform_plan(model, cluster, global_batch=64, micro_batch=4, layout=layout, **degrees)
    plan = dataclasses.replace(with_recompute_choices(plan, described), micro_batching=MicroBatching(layout, "dynamic"))
    return plan, planned_costs(plan, described, devices, open_costs(source, devices), 2048, 512 if described.dec_length else 0)


@pytest.mark.parametrize(
    ("model", "cluster", "source", "degrees"),
    [
        ("gpt-1.3b", "8xa100-40gb", "roofline", {"pp": 4, "replicas": 2}),
        ("gpt-1.3b", "4xh200-141gb", "profile:h200-141gb", {"pp": 2, "tp": 2}),
        ("t5-770m", "4xa100-40gb", "roofline", {"pp": 2, "dp": 2}),
    ],
)
def test_stage_times_and_memory_are_the_estimators(model: str, cluster: str, source: str, degrees: dict[str, int]) -> None:
    plan, costs = prepared(model, cluster, source, **degrees)
    described, devices = resolve_model(model), resolve_cluster(cluster)
    for rows, length, dec_length, mode in ((4, 1024, 256, 0), (8, 600, 100, 2), (2, 2000, 500, 1)):
        dec_length = dec_length if described.dec_length else 0
        fixed = dataclasses.replace(
            plan, global_batch=rows * plan.num_replicas, micro_batching=MicroBatching("padded", "fixed", rows), seq_length=length,
            dec_length=dec_length,
            stages=tuple(dataclasses.replace(stage, recompute=(stage.recompute[mode],)) for stage in plan.stages),
        )  # fmt: skip
        found = Estimator(described, devices, open_costs(source, devices)).estimate(fixed)
        own = costs.layouts["padded"].at(rows, length, dec_length)
        for s, stage in enumerate(found.stages):
            cost = own[costs.stage_class[0, s], mode]
            work = stage.work
            expected = work.total_s - work.transfer_in_s - work.transfer_out_s
            assert cost[:2].sum() == pytest.approx(expected, rel=0.03)
            peak = costs.state_bytes[0, s] + max(cost[3:6])
            assert peak == pytest.approx(stage.memory.total_bytes, rel=0.05)
            assert costs.limit_bytes[0, s] == stage.limit_bytes
        transfers = [(found.stages[s + 1].work.transfer_in_s, found.stages[s].work.transfer_out_s) for s in range(plan.num_stages - 1)]
        lines = costs.hops[0] @ np.array([1.0, rows * length, rows * dec_length])
        assert np.allclose(lines.T, transfers, rtol=1e-6, atol=1e-12)
        assert costs.fixed_s == pytest.approx(found.time_s - found.pipeline_s, rel=1e-6)


@pytest.mark.parametrize("gradients", ["fp32", ""])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_a_batch_of_equal_samples_is_promised_no_less_memory_than_the_estimator_has(pp: int, gradients: str) -> None:
    plan = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=64, micro_batch=1, pp=pp, gradients=gradients)
    costs, estimator = costs_for(plan, 2048), Estimator(resolve_model("gpt-1.3b"), resolve_cluster("4xa100-80gb"), open_costs("roofline"))
    for rows, length in ((1, 8), (2, 512), (4, 2048)):
        fixed = dataclasses.replace(plan, micro_batching=MicroBatching("padded", "fixed", rows), seq_length=length)
        own = costs.layouts["padded"].at(rows, length, 0)[:, 0]
        for s, stage in enumerate(estimator.estimate(fixed).stages):
            _, _, stored, *peaks = own[costs.stage_class[0, s]]
            promised = costs.state_bytes[0, s] + (pp - 1 - s) * stored + max(peaks)
            assert 1 - 1e-6 <= promised / stage.memory.total_bytes < 1.02


def test_packed_costs_follow_tokens_and_squares() -> None:
    _, costs = prepared("gpt-1.3b", "2xa100-40gb", "roofline", "packed", pp=2)
    grid = costs.layouts["packed"]
    one, four = grid.at(8000, 2000, 0)[0, 0, :2].sum(), grid.at(8000, 500, 0)[0, 0, :2].sum()
    assert one > four
    padded = costs.layouts["padded"].at(4, 2000, 0)[0, 0, :2].sum()
    assert one == pytest.approx(padded, rel=0.25)


def test_the_mask_of_a_window_takes_memory_of_padded_rows_alone(tmp_path: Path) -> None:
    def held_bytes(window: int, layout: Layout, length: int) -> float:
        path = tmp_path / f"{window}.yaml"
        path.write_text(json.dumps({"base": "llama-1b", "window": window}))
        plan = uniform_plan(str(path), "1xa100-80gb", global_batch=4, micro_batch=1, layout="packed")
        found = costs_for(plan, 4096).layouts[layout].at(1 if layout == "padded" else length, length, 0)
        return float(found[0, 0, 2])

    masks = 1.02 * resolve_model("llama-1b").config["layers"] * 2 * 4096**2
    # At least what they take; between the lengths that are replayed, lines lie above squares.
    assert masks <= held_bytes(512, "padded", 4096) - held_bytes(0, "padded", 4096) < 2 * masks
    assert held_bytes(512, "padded", 256) == pytest.approx(held_bytes(0, "padded", 256))
    assert held_bytes(512, "packed", 4096) == pytest.approx(held_bytes(0, "packed", 4096))


def test_packing_wins_where_lengths_differ() -> None:
    _, costs = prepared("gpt-1.3b", "8xa100-40gb", "roofline", "packed", pp=4, replicas=2)
    numbers = np.random.default_rng(1)
    samples = [SampleLengths(i, int(n)) for i, n in enumerate(np.clip(np.exp(numbers.normal(4.8, 1.1, 200)), 4, 2000))]
    padded = dataclasses.replace(costs, layouts={"padded": costs.layouts["padded"]})
    mixed, rows = plan_batch(samples, costs, steps=6000, bound=True), plan_batch(samples, padded, steps=6000)
    assert mixed.predicted_s < rows.predicted_s
    assert mixed.padding_share < rows.padding_share
    assert mixed.bound_s <= mixed.predicted_s
    assert any(one.layout == "packed" for replica in mixed.replicas for one in replica.micro_batches)


def test_tight_memory_makes_stages_recompute() -> None:
    plan, costs = prepared("gpt-1.3b", "4xa100-40gb", "roofline", pp=4)
    tight = dataclasses.replace(costs, limit_bytes=costs.state_bytes + 2.5e9)
    samples = [SampleLengths(i, 1500) for i in range(40)]
    batch = plan_batch(samples, tight, steps=3000)
    used = np.array([one.recompute for replica in batch.replicas for one in replica.micro_batches])
    assert used[:, 0].max() > 0
    assert (np.array(batch.replicas[0].peak_bytes) <= tight.limit_bytes[0]).all()
    assert used.max() < len(plan.stages[0].recompute)


def test_a_plan_file_is_enough() -> None:
    plan = dataclasses.replace(
        uniform_plan("gpt-1.3b", "4xa100-40gb", global_batch=8, micro_batch=1, pp=4), micro_batching=MicroBatching("padded", "dynamic", 2)
    )
    samples = [SampleLengths(i, 100 + i) for i in range(8)]
    batch = plan_with_orders(samples, costs_of_batch(plan, samples), steps=100)
    assert max(len(one.samples) for replica in batch.replicas for one in replica.micro_batches) <= 2
    assert 0 < batch.bound_s <= batch.predicted_s
    assert batch.costs == "roofline"


def test_a_plan_of_fixed_sizes_cuts_batches_as_one_by_lengths_does() -> None:
    """What recordings pad on to fixed rows is not padded on here: a full batch was planned to the limit, and then did not fit."""
    fixed = dataclasses.replace(uniform_plan("gpt-350m", "1xa10g", global_batch=8, micro_batch=8), seq_length=512)
    by_lengths = dataclasses.replace(fixed, micro_batching=MicroBatching("padded", "dynamic"))
    numbers = random.Random(5)
    samples = [SampleLengths(index, numbers.randint(60, 512)) for index in range(400)]
    found, other = (plan_batch(samples, costs_of_batch(plan, samples)) for plan in (fixed, by_lengths))
    assert found.to_dict() == other.to_dict()
    (replica,), costs = found.replicas, costs_of_batch(fixed, samples)
    again = execute(replica.schedule, batch_workload(costs, replica.micro_batches, 0))
    assert again.pipeline_s == pytest.approx(replica.predicted_s) and again.peak_bytes[0] == pytest.approx(replica.peak_bytes[0])
    assert replica.peak_bytes[0] <= costs.limit_bytes[0, 0]


def test_what_has_no_lengths_is_refused() -> None:
    with pytest.raises(InputError, match="images"):
        costs_for(uniform_plan("resnet-50", "1xa100-40gb", global_batch=8, micro_batch=8), 8)


def test_rows_take_as_long_as_those_of_the_recording_that_they_are_padded_on_for() -> None:
    plan = dataclasses.replace(uniform_plan("gpt-1.3b", "1xh200", global_batch=16, micro_batch=4), seq_length=136)

    def times_s(plan: Plan, row_length: int) -> list[float]:
        micro = MicroBatch(0, (0, 1, 2, 3), "padded", (9,) * 4, (), row_length)
        return (batch_durations_s(costs_for(plan, 136), [micro], 0) or [[[]]])[0][0]

    assert recorded_length(120, 3) == 120 and recorded_length(130, 3) == 144
    assert times_s(plan, 120) < times_s(plan, 130) == times_s(plan, 136)  # never longer than the plan's own
    dynamic = dataclasses.replace(plan, micro_batching=MicroBatching("padded", "dynamic"))
    assert times_s(dynamic, 130) < times_s(dynamic, 136)  # played by none
