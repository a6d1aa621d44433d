"""DynPipe's files as plans and back: round trips, the published plans, everything one side cannot say, and a plan that trains."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models.catalog import model_from_mapping, resolve_model
from penstock.models.ops import Model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.validity import check_plan
from penstock.systems.dynpipe.blocks import block_ends, num_module_ops, pieces
from penstock.systems.dynpipe.files import DynPipePartition, Topology, read_files, write_files
from penstock.systems.dynpipe.plans import _ratio, from_plan, to_plan

VGG = resolve_model("vgg16")


def imported(
    topology: Topology, partition: DynPipePartition | None = None, model: str | Model = VGG, cluster: str = "8xv100-16gb", **more: Any
) -> Plan:
    """The plan of a model of the catalogue on a cluster given by its shorthand."""
    found = resolve_model(model) if isinstance(model, str) else model
    fields: dict[str, Any] = {"model_ref": found.name, "cluster_ref": cluster, "global_batch": 7200, **more}
    return to_plan(topology, partition, found, resolve_cluster(cluster), **fields)


def side_by_side(widths: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """So many ranks for each stage, counted through."""
    return tuple(tuple(range(*bounds)) for bounds in pairwise([0, *accumulate(widths)]))


def files(
    counts: tuple[int, ...], widths: tuple[int, ...], batch: int, ratios: tuple[float, ...] = ()
) -> tuple[Topology, DynPipePartition]:
    """Two files in the form in which they are written."""
    stages = len(counts)
    topology = Topology((*range(stages), stages - 1), side_by_side(widths), tuple(range(stages - 1, -1, -1)))
    return topology, DynPipePartition(counts, ratios or (0,) * stages, (batch,), tuple(batch // width for width in widths))


@st.composite
def expressible(draw: st.DrawFn) -> Plan:
    """A plan of one replica with cuts between blocks, any dp, and recomputation of the end of each stage."""
    model = resolve_model(draw(st.sampled_from(["vgg-tiny", "vgg16", "resnet-tiny", "resnet-50", "bert-tiny", "gpt-tiny", "t5-tiny"])))
    ops = list(block_ends(model).values())
    cuts = sorted(draw(st.sets(st.sampled_from(ops[1:-1]), max_size=min(4, len(ops) - 2))))
    order = draw(st.permutations(range(16)))
    stages, used = [], 0
    widths = [draw(st.sampled_from([1, 2, 3])) for _ in range(len(cuts) + 1)]
    ranks = [rank for rank in order if rank < sum(widths)]
    for (first, last), width in zip(pairwise([0, *cuts, model.num_ops]), widths, strict=True):
        starts = [piece.first for piece in pieces(model) if first <= piece.first < last]
        start = draw(st.none() | st.sampled_from(starts))
        again = () if start is None else (((start, min(last, num_module_ops(model))),),)
        stages.append(Stage(first, last, (tuple(ranks[used : used + width]),), Degrees(dp=width), recompute=again))
        used += width
    samples = draw(st.sampled_from([6, 12, 48]))
    return Plan(
        model.name, "16xv100-16gb", samples * draw(st.integers(1, 9)), tuple(stages), MicroBatching("padded", "fixed", samples),
        schedule="pipedream", seq_length=model.seq_length, dec_length=model.dec_length, precision="fp32",
        optimizer="sgd" if model.family in ("vgg", "resnet") else "adamw",
    )  # fmt: skip


@given(expressible())
@settings(max_examples=50, deadline=None)
def test_plan_files_plan(tmp_path_factory: pytest.TempPathFactory, plan: Plan) -> None:
    folder = tmp_path_factory.mktemp("dynpipe")
    assert check_plan(plan) == []
    write_files(folder, *from_plan(plan))
    found = imported(*read_files(folder), model=str(plan.model), cluster="16xv100-16gb", global_batch=plan.global_batch)
    assert found == plan and check_plan(found) == []
    assert from_plan(found) == read_files(folder)


PUBLISHED = [
    ("vgg16", (8, 30), (1, 1), 48),
    ("vgg16", (15, 23), (3, 1), 72),
    ("vgg16", (20, 18), (5, 1), 70),
    ("vgg16", (15, 5, 18), (6, 1, 1), 72),
    ("resnet-50", (66, 110), (1, 1), 48),
    ("resnet-50", (93, 44, 39), (4, 1, 1), 72),
    ("resnet-50", (71, 50, 23, 32), (4, 2, 1, 1), 72),
    ("bert-large", (12, 13, 13, 11), (1,) * 4, 16),
    ("bert-48", (11, 11, 12, 12, 13, 13, 14, 11), (1,) * 8, 8),
    ("bert-48", (11, 12, 13, 13, 13, 13, 12, 10), (1,) * 8, 8),
    ("bert-48", (12, 12, 13, 13, 13, 13, 12, 9), (1,) * 8, 8),
]


@pytest.mark.parametrize(("name", "counts", "widths", "batch"), PUBLISHED)
@pytest.mark.parametrize("ratio", [0, 1])
def test_published_plans(name: str, counts: tuple[int, ...], widths: tuple[int, ...], batch: int, ratio: int) -> None:
    """Files → plan → files; the plan has what the files say."""
    ref: dict[str, Any] | str = {"base": "bert-large", "layers": 48} if name == "bert-48" else name
    model = resolve_model(ref) if isinstance(ref, str) else model_from_mapping(ref, "test", "bert")
    topology, partition = files(counts, widths, batch, (ratio,) * len(counts))
    plan = imported(topology, partition, model, model_ref=ref, global_batch=batch * 50)
    assert check_plan(plan) == [] and plan.schedule == "pipedream" and plan.precision == "fp32"
    assert plan.num_micro_batches == 50 and plan.micro_batching.samples == batch
    assert [stage.degrees.dp for stage in plan.stages] == list(widths)
    assert all(bool(stage.recompute) == bool(ratio) for stage in plan.stages)
    assert from_plan(plan) == (topology, partition)
    usual = imported(replace(topology, stage_to_depth_map=None), partition, model, model_ref=ref, global_batch=batch * 50)
    assert replace(usual, notes=()) == plan
    assert bool(usual.notes) == (widths in ((6, 1, 1), (4, 1, 1), (4, 2, 1, 1)))


def test_a_published_cut_that_is_none_here() -> None:
    """Between a batch norm and its ReLU."""
    with pytest.raises(
        InputError, match=r"stage 0 ends after block 115 .* ops 87:88, from 'stage2.block.2.bn2'. End it after block 114 or 116"
    ):
        imported(*files((115, 61), (3, 1), 72), model="resnet-50")


def test_dynpipe_would_run_less_far_ahead() -> None:
    topology, partition = files((15, 5, 18), (6, 1, 1), 72)
    plan = imported(replace(topology, stage_to_depth_map=None), partition)
    assert plan.notes == ("DynPipe would run [1, 1, 0] mini-batches ahead; the stages of this plan run [2, 1, 0].",)


def test_a_topology_of_blocks_is_enough() -> None:
    counts, widths = (15, 23), (3, 1)
    topology, partition = files(counts, widths, 72)
    blocks = replace(topology, module_to_stage_map=(*[0] * 15, *[1] * 24))
    plan = imported(blocks, mini_batch=72)
    assert plan == imported(topology, partition) == imported(blocks, partition)


@pytest.mark.parametrize("modules", [1, 4, 38])
def test_a_topology_of_one_stage_is_enough(modules: int) -> None:
    plan = imported(Topology((0,) * (modules + 1), ((0, 1, 2, 3),)), mini_batch=72)
    assert plan.stages == (Stage(0, 36, ((0, 1, 2, 3),), Degrees(dp=4)),) and plan.micro_batching.samples == 72


def test_other_topologies_are_not() -> None:
    topology, _ = files((15, 23), (3, 1), 72)
    with pytest.raises(
        InputError, match=r"has 2 modules, but model 'vgg16' has 38 blocks: .* where the 2 stages are cut. Give the partition"
    ):
        imported(topology, mini_batch=72)
    with pytest.raises(InputError, match=r"a DynPipe topology has no batch size. Give the mini-batch"):
        imported(topology)


@pytest.mark.parametrize(
    ("topology", "partition", "more", "told"),
    [
        ({}, {"partition": (15, 22)}, {}, r"partition is \[15, 22\], 37 blocks, but model 'vgg16' has 38 there"),
        ({}, {"partition": (31, 7)}, {"model": "bert-large"}, "model 'bert-large' has 49 there"),
        ({}, {"partition": (32, 6)}, {}, "stage 0 ends after block 32 .* ops 31:33, from 'head.avgpool'. End it after block 31 or 34"),
        ({}, {"recompute_ratio": (0, 0.1)}, {}, r"recompute_ratio.1 is 0.1: the last 2 of the stage's 25 .* 'head.fc2'. Use 0.04 or 0.16"),
        ({}, {"batch_size_all": (24,)}, {}, "batch_size 24 × 3 ranks is 72, but batch_size_all is 24"),
        ({}, {}, {"mini_batch": 24}, "the mini-batch is given as 24, but batch_size_all of the DynPipe partition is 72"),
        ({}, {}, {"global_batch": 100}, "global_batch is 100, not a multiple of 1 replica × 72 samples"),
        ({}, {}, {"global_batch": 0}, "global_batch"),
        ({}, {}, {"cluster": "2xv100-16gb"}, "stages.0.devices has rank 2, but the cluster .* has 2 devices"),
        (
            {"module_to_stage_map": (0, 0, 1, 1, 1)},
            {},
            {},
            r"has \[2, 2\] modules on the stages; one each, or one .* \[15, 23\] was expected",
        ),
        ({"stage_to_rank_map": ((0, 1, 2), (4,))}, {}, {}, "cannot express ranks 0-2,4: 4 of them are numbered 0-3"),
        ({"stage_to_depth_map": (2, 0)}, {}, {}, r"stage_to_depth_map is \[2, 0\], but stages of a plan run \[1, 0\] mini-batches ahead"),
        (
            {"stage_to_rank_map": ((0,),), "module_to_stage_map": (0, 0), "stage_to_depth_map": None},
            {},
            {},
            "has 1 stage, the partition 2",
        ),
    ],
)
def test_files_that_are_no_plan(topology: dict[str, Any], partition: dict[str, Any], more: dict[str, Any], told: str) -> None:
    good = files((15, 23), (3, 1), 72)
    with pytest.raises(InputError, match=told):
        imported(replace(good[0], **topology), replace(good[1], **partition), **more)


def changed(**fields: Any) -> Plan:
    """A good plan of a pipeline of two stages, but for some fields; those of stage 1 are given as `stage`."""
    stage = fields.pop("stage", {})
    plan = uniform_plan("vgg16", "4xv100-16gb", pp=2, dp=2, global_batch=96, micro_batch=8, schedule="pipedream")
    return replace(plan, **fields, stages=(plan.stages[0], replace(plan.stages[1], **stage)))


def test_the_good_plan_itself() -> None:
    topology, partition = from_plan(changed())
    assert topology == Topology((0, 1, 1), ((0, 1), (2, 3)), (1, 0))
    assert partition == DynPipePartition((10, 28), (0, 0), (8,), (4, 4))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"schedule": "1f1b"}, "cannot express the schedule '1f1b': it updates after every mini-batch"),
        ({"schedule": "gpipe"}, "cannot express the schedule 'gpipe'"),
        ({"schedule": "zero-bubble"}, "cannot express the schedule 'zero-bubble'"),
        ({"micro_batching": MicroBatching("padded", "dynamic", 8)}, "cannot express micro-batches that differ"),
        ({"precision": "bf16"}, "cannot express precision bf16: it trains in fp32"),
        ({"stage": {"degrees": Degrees(2, 1)}}, "stage 1: tp is 2; it divides samples alone. Use dp"),
        ({"stage": {"runs": (OpRun(17, 19, 2, 1),)}}, "stage 1: ops 17:19 have degrees or a split of their own"),
        ({"stage": {"zero": 1}}, "stage 1: zero is 1"),
        ({"stage": {"recompute": ((), ((17, 20),))}}, "stage 1: it has 2 recomputation patterns"),
        ({"stage": {"recompute": (((17, 20),),)}}, "stage 1: it recomputes ops 17:20; .* Recompute 17:35, or nothing"),
        ({"stage": {"recompute": (((20, 22), (24, 35)),)}}, "stage 1: it recomputes ops 20:22,24:35; .* Recompute 20:35, or nothing"),
        ({"stage": {"recompute": (((20, 36),),)}}, "stage 1: it recomputes ops 20:36; .* without the loss. Recompute 20:35"),
        ({"stage": {"recompute": (((35, 36),),)}}, "stage 1: it recomputes ops 35:36; .* Recompute 34:35"),
        ({"stage": {"recompute": (((32, 35),),)}}, "stage 1: it recomputes ops 32:35; .* Recompute 31:35"),
        ({"stage": {"devices": ((1, 3),)}}, "rank 1"),
    ],
)
def test_plans_that_are_no_files(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        from_plan(changed(**fields))


def test_more_plans_that_are_no_files() -> None:
    plan = changed()
    inside = (replace(plan.stages[0], last=32), replace(plan.stages[1], first=32))
    with pytest.raises(InputError, match=r"stage 1: it starts at op 32 'head.fc1', inside a block. Cut between blocks, at op 31 or 33"):
        from_plan(replace(plan, stages=inside))
    gap = replace(plan, cluster="8xv100-16gb", stages=(plan.stages[0], replace(plan.stages[1], devices=((4, 5),))))
    with pytest.raises(InputError, match="cannot express ranks 0-1,4-5: 4 of them are numbered 0-3"):
        from_plan(gap)
    chunks = uniform_plan("vgg16", "2xv100-16gb", pp=2, chunks=2, global_batch=96, micro_batch=8, schedule="interleaved")
    with pytest.raises(InputError, match="cannot express the schedule 'interleaved'"):
        from_plan(chunks)
    packed = uniform_plan("gpt-tiny", "2xv100-16gb", pp=2, global_batch=96, micro_batch=8, layout="packed", schedule="pipedream")
    with pytest.raises(InputError, match="cannot express packed micro-batches"):
        from_plan(packed)
    two = uniform_plan("vgg16", "4xv100-16gb", pp=2, replicas=2, global_batch=96, micro_batch=8, schedule="pipedream")
    with pytest.raises(InputError, match="cannot express replicas with unequal numbers"):
        from_plan(replace(two, micro_batching=replace(two.micro_batching, per_replica=(8, 4))))


def test_replicas_become_ranks() -> None:
    plan = uniform_plan("vgg16", "8xv100-16gb", pp=2, dp=2, replicas=2, global_batch=96, micro_batch=8, schedule="pipedream")
    topology, partition = from_plan(plan)
    assert topology.stage_to_rank_map == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert partition.batch_size_all == (16,) and partition.batch_size == (4, 4)


def test_the_precision_is_that_of_the_files() -> None:
    plan = imported(*files((12, 13, 13, 11), (1,) * 4, 16), model="bert-large")
    assert plan.precision == "fp32" and plan.optimizer == "adamw" and plan.seq_length == 512


@given(st.integers(1, 3000).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_ratios_are_cut_off_as_dynpipe_does(counts: tuple[int, int]) -> None:
    recomputed, total = counts
    ratio = _ratio(recomputed, total)
    assert 0 <= ratio <= 1 and int(ratio * total) == recomputed
    assert recomputed in (0, total) or len(str(ratio)) <= 2 + len(str(total)) + 1


@pytest.mark.parametrize(
    ("recomputed", "total", "ratio"), [(0, 7, 0), (7, 7, 1), (3, 10, 0.3), (5, 10, 0.5), (29, 100, 0.291), (1, 49, 0.03)]
)
def test_ratios_are_short(recomputed: int, total: int, ratio: float) -> None:
    assert _ratio(recomputed, total) == ratio


def test_an_imported_plan_trains(tmp_path: Path) -> None:
    """Two stages of a small VGG in two processes, against a plain emulation of the same delays."""
    from oracles.pipedream import emulate
    from runtime_cases import MODELS, Case, largest_difference, make_works
    from training_jobs import train_programs

    from penstock.plans.capabilities import unsupported
    from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
    from penstock.runtime.workers import WorkerPool

    write_files(tmp_path, *files((4, 9), (1, 1), 4, (0.5, 0)))
    model = model_from_mapping(MODELS["vgg"], "test", "vgg")
    plan = imported(*read_files(tmp_path), model, "2xcpu", model_ref=MODELS["vgg"], global_batch=16)
    assert unsupported(plan, model) == [] and plan.stages[0].recompute == (((2, 4),),)
    works = tuple(make_works(plan, model, random.Random(seed)) for seed in range(2))
    programs = Case(plan, model, works).programs()
    sgd = TrainingSettings(LearningRate(0.05), OptimizerSettings(plan.optimizer), clip_norm=None)
    with WorkerPool(2, timeout_s=250) as pool:
        outcomes = pool.run(train_programs, plan, programs, sgd)
    losses, weights = emulate(model, plan.stages, [one[0] for one in programs], sgd)
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-6)
    assert largest_difference(Case(plan, model, works), outcomes, weights)[0] <= 1e-6
