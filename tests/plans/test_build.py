"""Uniform plans: where the cuts fall, which ranks go where, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.models import resolve_model
from penstock.plans.build import join_ranges, uniform_cuts, uniform_plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import read_plan, write_plan
from penstock.plans.validity import check_plan


def test_ranges_are_joined_where_they_touch_alone() -> None:
    assert join_ranges([(0, 2), (2, 3), (4, 6), (6, 7), (9, 10)]) == ((0, 3), (4, 7), (9, 10))


def test_cuts_fall_between_layers() -> None:
    assert uniform_cuts(resolve_model("gpt-1.3b"), 4) == [(0, 49), (49, 97), (97, 145), (145, 196)]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "bert-large", "t5-tiny", "resnet-50", "vgg16"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_cuts_cover_every_model(name: str, num_stages: int) -> None:
    model = resolve_model(name)
    cuts = uniform_cuts(model, num_stages)
    assert [first for first, _ in cuts] == [0, *(last for _, last in cuts[:-1])]
    assert cuts[-1][1] == model.num_ops and all(first < last for first, last in cuts)


def test_ranks_are_tp_fastest_then_replicas_then_stages() -> None:
    plan = uniform_plan("gpt-tiny", "8xa100-40gb", pp=2, tp=2, replicas=2, global_batch=16, micro_batch=2)
    assert [stage.devices for stage in plan.stages] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert (plan.num_micro_batches, plan.num_groups, plan.num_chunks, plan.ranks) == (4, 2, 1, tuple(range(8)))
    assert list(plan.stages[0].tp_groups()) == [(0, 1), (2, 3)]


def test_interleaved_stages_share_devices() -> None:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, schedule="interleaved", global_batch=8, micro_batch=1)
    assert [stage.devices for stage in plan.stages] == [((0,),), ((1,),), ((0,),), ((1,),)]
    assert (plan.num_stages, plan.num_groups, plan.num_chunks) == (4, 2, 2)


def test_full_recompute_is_all_but_embedding_and_head() -> None:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, recompute="full", global_batch=8, micro_batch=1)
    assert [stage.pattern() for stage in plan.stages] == [((1, 17),), ((17, 33),)]
    assert plan.stages[1].recomputed() == frozenset(range(16))


def test_precision_rebuilds_the_model() -> None:
    plan = uniform_plan("gpt-tiny", "1xa100-40gb", global_batch=8, micro_batch=1, precision="bf16")
    assert (plan.precision, model_of(plan).dtype, resolve_model("gpt-tiny").dtype) == ("bf16", "bf16", "fp32")


def test_files_are_put_into_the_plan(tmp_path: Path) -> None:
    model, cluster = tmp_path / "mine.yaml", tmp_path / "cluster.yaml"
    model.write_text("base: gpt-tiny\nlayers: 6\n", encoding="utf-8")
    cluster.write_text("nodes: [{device: a100-40gb, gpus: 2}]\n", encoding="utf-8")
    plan = uniform_plan(str(model), str(cluster), pp=2, global_batch=8, micro_batch=1)
    write_plan(tmp_path / "plan.json", plan)
    model.unlink()
    cluster.unlink()
    again = read_plan(tmp_path / "plan.json")
    assert again == plan and check_plan(again) == []
    assert model_of(again).config["layers"] == 6 and cluster_of(again).num_devices == 2


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"pp": 8}, ["pp 8 × tp 1 × dp 1 × replicas 1 = 8 devices", "has 4"]),
        ({"pp": 4, "chunks": 2}, ["4 blocks", "8 stages"]),
        ({"pp": 0}, ["pp is 0"]),
        ({"micro_batch": 3}, ["global_batch is 8", "3 samples"]),
        ({"micro_batch": 0}, ["micro_batching.samples"]),
        ({"tp": 3}, ["tp=3"]),
        ({"pp": 2, "zero": 2}, ["ZeRO-2/3 only without a pipeline"]),
        ({"schedule": "dapple"}, ["schedule", "'dapple'"]),
        ({"precision": "fp8"}, ["fp8"]),
    ],
)
def test_impossible_plans_are_refused(given: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        uniform_plan("gpt-tiny", "4xa100-40gb", **{"global_batch": 8, "micro_batch": 1, **given})  # type: ignore[arg-type]
    assert all(part in str(caught.value) for part in parts), str(caught.value)
