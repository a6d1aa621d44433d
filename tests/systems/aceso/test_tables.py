"""Aceso's tables: chains, rows, lookups; stage times of published ones agree with an independent judge."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.costs.table import Floats
from penstock.errors import InputError
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.systems.aceso.files import AcesoPlan
from penstock.systems.aceso.scoring import score_plan
from penstock.systems.aceso.tables import AcesoTables
from penstock.systems.tables import validated

MB = 2**20
HEADER = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"
LAYER = [f"op-{i}" for i in range(13)]


def op_table(mbs: int, tp: int, names: list[str]) -> str:
    rows = [f"{name},{100 * mbs + i},{200 * mbs + i},{8 * mbs},{8 * mbs},{4 + 8 / tp},{16 * mbs / tp},1,2" for i, name in enumerate(names)]
    return "\n".join([HEADER, *rows]) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT of two micro-batch sizes and two degrees, a ResNet of two blocks."""
    gpt = ["embedding", *LAYER, "final-norm", "gpt-post-process"]
    for mbs in (1, 2):
        for tp in (1, 2):
            (tmp_path / f"gpt_1_3B_mbs{mbs}_tp{tp}_algo0.csv").write_text(op_table(mbs, tp, gpt))
    resnet = ["conv1", "bn1", *[f"block-0-{i}-{name}" for i in (0, 1) for name in ("conv1", "relu")], "fc"]
    (tmp_path / "resnet_500M_mbs16_tp1_algo0.csv").write_text(op_table(16, 1, resnet))
    (tmp_path / "p2p_intra_node.csv").write_text("1,2,4\n10, 20, 40\n")
    (tmp_path / "prim_gpt_1_3B_all_gather_2gpus.csv").write_text("data_size(MB),time(ms)\n8,4.0\n2,1.0\n16,1000000000.000\n")
    (tmp_path / "prim_gpt_1_3B_all_reduce_2gpus.csv").write_text("data_size(MB),time(ms)\n8,4.0\n")
    return tmp_path


def test_gpt_chain_repeats_the_layer(folder: Path) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    assert source.name == f"aceso:{folder}"
    assert source.models == (("gpt", "1_3B"), ("resnet", "500M"))
    assert (model.num_ops, len(model.distinct_ops), [copies for _, copies in model.runs]) == (13 * 24 + 3, 16, [1, 24, 1])
    assert model.ops[14].op.config == {"table": "gpt_1_3B", "op": "op-0"}
    assert source.micro_batches(model) == (1, 2)
    assert source.model("gpt", "1_3B", num_layers=1000).num_ops == 13003
    assert model.distinct_ops[0].parameters.at(Shape(1), 2) == 8 * MB / 2
    assert model.distinct_ops[0].splits[0].kept.at(Shape(3), 2) == 3 * 8 * MB


def test_resnet_chain_has_every_op(folder: Path) -> None:
    model = AcesoTables.open(folder).model("resnet", "500M")
    assert [placed.name for placed in model.ops] == [
        "conv1", "bn1", "block-0-0.conv1", "block-0-0.relu", "block-0-1.conv1", "block-0-1.relu", "fc",
    ]  # fmt: skip
    assert model.usual_shape(16) == Shape.images(16)
    kept = model.distinct_ops[0].splits[0].kept  # profiled with 16 images at least
    assert kept.at(Shape.images(16)) == 16 * 16 * MB and kept.at(Shape.images(3)) == 3 * 16 * MB
    assert model.ops[2].op.config["op"] == "block-0-0-conv1"


def test_rows_of_the_chain_are_in_the_units_of_the_file(folder: Path) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    rows = source.op_rows(model, 2, 2)
    assert rows is not None and rows.shape == (model.num_ops, 8)
    assert rows[3].tolist() == rows[16].tolist() == [203, 403, 16, 16, 8, 16, 1, 2]
    assert source.op_rows(model, 3, 1) is None and source.op_rows(model, 1, 4) is None


def test_sentinels_and_absent_ops_are_infinite_but_long_times_are_not(folder: Path) -> None:
    lines = op_table(1, 1, ["embedding", *LAYER, "final-norm", "gpt-post-process"]).splitlines()
    lines[1] = "embedding,1000000.000,1000000.000,1,1,1,1,1,1"
    lines[2] = "op-0,600000,1324627.284,1,1,1,1,1,1"
    (folder / "gpt_1_3B_mbs1_tp2_algo0.csv").write_text("\n".join(lines[:-1]))
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    rows = source.op_rows(model, 1, 2, partial=True)
    assert rows is not None and source.op_rows(model, 1, 2) is None
    assert np.isinf(rows[[0, -1], :2]).all() and not rows[[0, -1], 2:].any()
    assert rows[1, 1] == 1324627.284


def test_one_missing_pass_is_enough_and_no_op_has_the_times_of_another(folder: Path) -> None:
    lines = op_table(1, 1, ["embedding", *LAYER, "final-norm", "gpt-post-process"]).splitlines()
    lines[2] = "op-0,100,1000000000.000,1,1,1,1,1,1"  # its backward pass did not fit
    (folder / "gpt_1_3B_mbs1_tp2_algo0.csv").write_text("\n".join(lines[:-1]))
    source = AcesoTables.open(folder)
    rows = source.op_rows(source.model("gpt", "1_3B"), 1, 2, partial=True)
    assert rows is not None and rows[0, 0] == 100 and rows[2, 0] == 102
    for op in (1, -1):
        assert np.isinf(rows[op, :2]).all() and not rows[op, 2:].any()


def test_collectives_and_messages(folder: Path) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    lookups = [source.exact_collective_ms("all_gather", 2, size, model) for size in (8.4, 8.6, 10.4, 16, 5)]
    assert lookups == [4.0, 4.0, None, 1e9, None]
    assert source.exact_collective_ms("all_to_all", 2, 8, model) is None
    assert (source.p2p_intra.exact_us(8), source.p2p_intra.exact_us(1)) == (8 / 0.04, 1 / 0.01)
    assert source.p2p_inter is source.p2p_intra


def test_wrong_requests_are_explained(folder: Path) -> None:
    source = AcesoTables.open(folder)
    for family, size, layers, message in (
        ("gpt", "1_3b", 0, "no tables of gpt size '1_3b'. Did you mean '1_3B'"),
        ("gtp", "1_3B", 0, "no model family 'gtp'. Did you mean 'gpt'"),
        ("t5", "22B", 0, "It holds gpt_1_3B, resnet_500M"),
        ("resnet", "500M", 3, "cannot be changed"),
        ("gpt", "1_3B", -1, "give num_layers"),
    ):
        with pytest.raises(InputError, match=message):
            source.model(family, size, layers)
    with pytest.raises(InputError, match="is not an op chain of aceso"):
        source.op_rows(Model("mine", "gpt", "fp16", ()), 1, 1)


def test_wrong_folders_and_files_are_explained(folder: Path) -> None:
    database = folder / "above" / "eurosys"
    database.mkdir(parents=True)
    (database / "gpt_1_3B_mbs1_tp1_algo0.csv").touch()
    with pytest.raises(InputError, match=r"holds no Aceso op tables .*\. Those below it do: eurosys\."):
        AcesoTables.open(folder / "above")
    path = folder / "gpt_1_3B_mbs1_tp1_algo0.csv"
    text = path.read_text()
    path.write_text(text.replace("op-3,104", "op-3,fast"))
    with pytest.raises(InputError, match=r"mbs1_tp1_algo0.csv', row 6, column 'forward-compute': expected a number, got 'fast'"):
        AcesoTables.open(folder).model("gpt", "1_3B")
    path.write_text("\n".join(text.splitlines()[:10]))
    with pytest.raises(InputError, match="has 9 ops; expected 14 for the layers"):
        AcesoTables.open(folder).model("gpt", "1_3B")
    path.unlink()
    (folder / "gpt_1_3B_mbs2_tp1_algo0.csv").unlink()
    with pytest.raises(InputError, match="no file for tp 1 and algo 0"):
        AcesoTables.open(folder).model("gpt", "1_3B")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2\n", "has 1 row, expected two"),
        ("1,2\n3\n", "2 sizes in row 1 but 1 bandwidths in row 2"),
        ("1,2\n3,x\n", "row 2, column 2: expected a number above 0, got 'x'"),
        ("2,1\n3,4\n", "sizes must rise"),
    ],
)
def test_wrong_message_tables_are_explained(folder: Path, text: str, message: str) -> None:
    (folder / "p2p_inter_node.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        AcesoTables.open(folder)


def random_plan(model: Model, rng: random.Random, micro: int, layout: list[tuple[int, int]], swap: bool) -> dict[str, Any]:
    """Stages of (tp, dp) cut at random places, random recomputation; with `swap` also the other split of some GEMMs."""
    cuts = sorted(rng.sample(range(1, model.num_ops), len(layout) - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, model.num_ops], strict=True)]
    return {
        "model_name": model.config["family"], "model_size": model.config["size"], "num_layers": model.config["num_layers"],
        "global_batch_size": 64 * micro, "micro_batch_size": micro, "num_stages": len(layout), "num_gpus": [t * d for t, d in layout],
        "num_ops_in_each_stage": counts,
        "model_parallel_size_of_each_op": [[t] * n for (t, _), n in zip(layout, counts, strict=True)],
        "data_parallel_size_of_each_op": [[d] * n for (_, d), n in zip(layout, counts, strict=True)],
        "recompute_ops": [[rng.randint(0, 1) for _ in range(n)] for n in counts],
        "algo_of_each_op": [[rng.randint(0, 1) if swap else 0 for _ in range(n)] for n in counts],
    }  # fmt: skip


def stage_rows(source: AcesoTables, model: Model, plan: dict[str, Any], stage: int) -> Floats:
    """The rows of a stage's ops, each from the file of its own split."""
    start, count = sum(plan["num_ops_in_each_stage"][:stage]), plan["num_ops_in_each_stage"][stage]
    tp, dp = (plan[f"{kind}_parallel_size_of_each_op"][stage][0] for kind in ("model", "data"))
    files = [source.op_rows(model, plan["micro_batch_size"] // dp, tp, algo, partial=True) for algo in (0, 1)]
    picked = [files[algo] for algo in plan["algo_of_each_op"][stage]]
    return np.array([rows[start + i] for i, rows in zip(range(count), picked, strict=True) if rows is not None])


def stage_ms(source: AcesoTables, model: Model, rows: Floats, plan: dict[str, Any], stage: int, judge: ModuleType, per_node: int) -> float:
    """A stage's time under Aceso's model, from our rows and lookups; only the resharding rules are the judge's."""
    start = sum(plan["num_ops_in_each_stage"][:stage])
    tp, dp = (plan[f"{kind}_parallel_size_of_each_op"][stage][0] for kind in ("model", "data"))
    total = float((rows[:, 0] * (1 + np.array(plan["recompute_ops"][stage])) + rows[:, 1]).sum())
    first_gpu = sum(plan["num_gpus"][:stage])
    for size, crosses in ((rows[0, 2], first_gpu > 0 and first_gpu % per_node == 0), (rows[-1, 3], (first_gpu + tp * dp) % per_node == 0)):
        total += (source.p2p_inter if crosses else source.p2p_intra).exact_us(float(size))
    if plan["model_name"] != "t5":
        names = [placed.op.config["op"] for placed in model.ops[start : start + len(rows)]]
        specs = [judge.shardings(name, tp, dp, algo) for name, algo in zip(names, plan["algo_of_each_op"][stage], strict=True)]
        for j in range(1, len(rows)):
            step = judge.reshard(specs[j - 1][1], specs[j][0])
            for kind in (step.forward, step.backward) if step else ():
                if kind != "split":
                    found = source.exact_collective_ms(kind, step.group, float(rows[j, 2]), model)
                    total += 1000 * (1e5 if found is None else found)
    return total / 1000


PUBLISHED = [
    ("eurosys", "gpt", "1_3B", 1, 1, [(1, 1)] * 4, False), ("eurosys", "gpt", "6_7B", 4, 2, [(2, 1), (1, 2), (2, 2), (4, 1), (2, 2)], True),
    ("eurosys", "t5", "770M", 4, 1, [(1, 2), (2, 2), (2, 1)], False),
    ("eurosys", "resnet", "6_8B", 32, 2, [(4, 1), (2, 2), (1, 2), (4, 1), (2, 1)], True),
    ("miniset", "gpt", "1_3B", 2, 1, [(1, 2), (2, 1)], True), ("miniset", "resnet", "1B", 32, 1, [(2, 1), (1, 2)], True),
]  # fmt: skip


def test_stage_times_of_published_tables_equal_the_judge(published: Path, judge: Callable[[str], ModuleType]) -> None:
    scorer = judge("aceso")
    for data, family, size, micro, nodes, layout, swap in PUBLISHED:
        source = AcesoTables.open(published / "aceso" / data)
        model, rng = source.model(family, size), random.Random(size)
        per_node = sum(t * d for t, d in layout) // nodes
        for plan in (random_plan(model, rng, micro, layout, swap) for _ in range(5)):
            score = scorer.evaluate(plan, str(published / "aceso" / data), nodes, per_node)
            assert not score.errors
            for stage, expected in enumerate(score.stages):
                rows = stage_rows(source, model, plan, stage)
                got = stage_ms(source, model, rows, plan, stage, scorer, per_node)
                assert got == pytest.approx(expected.micro_batch_ms, rel=1e-9)
                assert rows[:, 4].sum() == pytest.approx(expected.memory["gradients"], rel=1e-9)
    source = AcesoTables.open(published / "aceso" / "eurosys")
    for family, size, ops, billions in (
        ("gpt", "350M", 315, 0.36), ("gpt", "1_3B", 315, 1.32), ("gpt", "6_7B", 419, 6.66), ("t5", "770M", 821, 0.77),
        ("t5", "6B", 821, 5.70), ("resnet", "500M", 134, 0.50), ("resnet", "6_8B", 134, 6.73),
    ):  # fmt: skip
        model = source.model(family, size)
        assert (model.num_ops, round(model.num_parameters / 1e9, 2)) == (ops, billions)
        assert all(source.op_rows(model, micro, 1) is not None for micro in source.micro_batches(model))


@pytest.mark.parametrize(("family", "size", "ops"), [("gpt", "350M", 315), ("t5", "770M", 821), ("resnet", "500M", 134)])
def test_a_folder_of_every_family(small_tables: Path, family: str, size: str, ops: int) -> None:
    """Chains have as many ops as Aceso's, each with times at every size, and a stage is what its rows and one message each way take."""
    source = AcesoTables.open(small_tables / "aceso")
    model = source.model(family, size)
    assert model.num_ops == ops and source.models == (("gpt", "350M"), ("resnet", "500M"), ("t5", "770M"))
    assert all(source.op_rows(model, micro, tp) is not None for micro in source.micro_batches(model) for tp in (1, 2, 4))
    micro = max(source.micro_batches(model))
    read = read_aceso_plan_of(random_plan(model, random.Random(size), micro, [(1, 1), (2, 1)], False))
    for index, score in enumerate(score_plan(read, source, 4).stages):
        rows = stage_rows(source, model, asdict(read), index)
        flags = np.array(read.recompute_ops[index])
        assert score.compute_s == pytest.approx(rows[:, :2].sum() / 1e6, rel=1e-9)
        assert score.recompute_s == pytest.approx((rows[:, 0] * flags).sum() / 1e6, rel=1e-9)
        ends_us = source.p2p_intra.exact_us(float(rows[0, 2])) + source.p2p_intra.exact_us(float(rows[-1, 3]))
        assert score.messages_s >= ends_us / 1e6 * (1 - 1e-9)


def read_aceso_plan_of(plan: dict[str, Any]) -> AcesoPlan:
    counts = len(plan["num_gpus"])
    plan["num_layers"] = plan["num_layers"] or [3, 4, 6, 3]
    return validated(AcesoPlan, plan | {"checkpoint_activations": [True] * counts, "resharding_stages": [False] * counts}, "plan")
