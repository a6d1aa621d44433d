"""Aceso's tables: chains, arrays, lookups, and agreement with the independent judge."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from penstock.clusters import Cluster, resolve_cluster
from penstock.costs.table import CostTable
from penstock.errors import InputError, ProfileMissingError
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.systems.aceso.tables import AcesoTables

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
    assert (source.micro_batches(model), source.tps(model)) == ((1, 2), (1, 2))
    assert source.shapes(model) == (Shape.padded(1, 2048), Shape.padded(2, 2048))
    assert source.model("gpt", "1_3B", num_layers=1000).num_ops == 13003
    assert model.distinct_ops[0].parameters.at(Shape(1), 2) == 8 * MB / 2
    assert model.distinct_ops[0].splits[0].kept.at(Shape(3), 2) == 3 * 8 * MB


def test_resnet_chain_has_every_op(folder: Path) -> None:
    model = AcesoTables.open(folder).model("resnet", "500M")
    assert [placed.name for placed in model.ops] == [
        "conv1", "bn1", "block-0-0.conv1", "block-0-0.relu", "block-0-1.conv1", "block-0-1.relu", "fc",
    ]  # fmt: skip
    assert model.usual_shape(16) == Shape.images(16)
    assert model.ops[2].op.config["op"] == "block-0-0-conv1"


def test_table_is_in_seconds_and_bytes(folder: Path, two_nodes: Cluster) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    table = source.table(model, [Shape.padded(mbs, 2048) for mbs in (1, 2, 3)], (1, 2, 4), two_nodes)
    assert (table.devices, table.algos, len(table.chain)) == (("v100-32gb",), (0,), model.num_ops)
    assert table.forward_s[3, 1, 0, 0, 0] == pytest.approx(203e-6)
    assert table.backward_s[3, 1, 1, 0, 0] == pytest.approx(403e-6)
    assert np.isinf(table.forward_s[:, 2]).all()
    assert np.isinf(table.backward_s[:, :, 2]).all()
    assert table.parameters[0, :, 0].tolist() == [6 * MB, 4 * MB, 0]
    assert table.kept_bytes[5, :, :2, 0].tolist() == [[16 * MB, 8 * MB], [32 * MB, 16 * MB], [0, 0]]
    assert (table.workspace_bytes[5, 0, 0, 0], table.backward_workspace_bytes[5, 0, 0, 0]) == (MB, 2 * MB)
    assert (table.input_bytes[5, 1, 0, 0], table.output_bytes[5, 1, 0, 0]) == (16 * MB, 16 * MB)
    assert not table.forward_comm_s.any()


def test_sentinels_and_absent_ops_are_infinite_but_long_times_are_not(folder: Path) -> None:
    lines = op_table(1, 1, ["embedding", *LAYER, "final-norm", "gpt-post-process"]).splitlines()
    lines[1] = "embedding,1000000.000,1000000.000,1,1,1,1,1,1"
    lines[2] = "op-0,600000,1324627.284,1,1,1,1,1,1"
    (folder / "gpt_1_3B_mbs1_tp2_algo0.csv").write_text("\n".join(lines[:-1]))
    source = AcesoTables.open(folder)
    table = source.table(source.model("gpt", "1_3B"), [Shape.padded(1, 2048)], (2,))
    assert np.isinf(table.forward_s[[0, 15], 0, 0, 0, 0]).all()
    assert table.kept_bytes[[0, 15]].tolist() == [[[[0.0]]], [[[0.0]]]]
    assert table.backward_s[1, 0, 0, 0, 0] == pytest.approx(1.324627284)


def test_collectives_and_messages(folder: Path, two_nodes: Cluster) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    lookups = [source.exact_collective_ms("all_gather", 2, size, model) for size in (8.4, 8.6, 10.4, 16, 5)]
    assert lookups == [4.0, 4.0, None, 1e9, None]
    assert source.exact_collective_ms("all_to_all", 2, 8, model) is None
    gather = [source.collective_s("all_gather", 2 * local * MB, two_nodes, (0, 1)) for local in (1, 2, 4, 8, 32)]
    assert gather == pytest.approx([1e-3, 1e-3, 2e-3, 4e-3, 16e-3])
    assert source.collective_s("all_reduce", 8 * MB, two_nodes, (0, 1)) == pytest.approx(4e-3)
    assert source.collective_s("all_reduce", 8 * MB, two_nodes, (0,)) == 0.0
    # No table for three ranks: a ring whose messages of 2 MB go at 20 GB/s.
    assert source.collective_s("all_reduce", 6 * MB, two_nodes, (0, 1, 2)) == pytest.approx(2 * 2 / 3 * 6 / (20 * 1024))
    assert source.transfer_s(2 * MB, two_nodes, 0, 1) == source.transfer_s(2 * MB, two_nodes, 3, 4) == pytest.approx(2 / 20 / 1024)
    assert source.transfer_s(0, two_nodes, 0, 1) == 0.0
    assert (source.p2p_intra.exact_us(8), source.p2p_intra.exact_us(1)) == (8 / 0.04, 1 / 0.01)
    assert source.p2p_inter_gb_per_s.tolist() == source.p2p_intra_gb_per_s.tolist() == [10, 20, 40]
    assert source.optimizer_s(1e9, "v100-32gb") == 0.0


def test_wrong_requests_are_explained(folder: Path, two_nodes: Cluster) -> None:
    source = AcesoTables.open(folder)
    model = source.model("gpt", "1_3B")
    for family, size, layers, message in (
        ("gpt", "1_3b", 0, "no tables of gpt size '1_3b'. Did you mean '1_3B'"),
        ("gtp", "1_3B", 0, "no model family 'gtp'. Did you mean 'gpt'"),
        ("t5", "22B", 0, "It holds gpt_1_3B, resnet_500M"),
        ("resnet", "500M", 3, "cannot be changed"),
        ("gpt", "1_3B", -1, "give num_layers"),
    ):
        with pytest.raises(InputError, match=message):
            source.model(family, size, layers)
    with pytest.raises(ProfileMissingError, match="only padded samples of 2048 tokens"):
        source.table(model, [Shape.padded(1, 1024)], (1,))
    with pytest.raises(InputError, match="one device kind; the cluster has a100-40gb, a10g"):
        source.table(model, [Shape.padded(1, 2048)], (1,), resolve_cluster("1xp4d.24xlarge+1xg5.24xlarge"))
    with pytest.raises(InputError, match="is not an op chain of aceso"):
        source.table(Model("mine", "gpt", "fp16", ()), [Shape(1)], (1,))


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
        ("1,2\n", "has 1 rows, expected two"),
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


def stage_ms(
    source: AcesoTables, model: Model, table: CostTable, plan: dict[str, Any], stage: int, judge: ModuleType, per_node: int
) -> float:
    """A stage's time under Aceso's model, from our arrays and lookups; only the resharding rules are the judge's."""
    start = sum(plan["num_ops_in_each_stage"][:stage])
    count = plan["num_ops_in_each_stage"][stage]
    tp, dp = (plan[f"{kind}_parallel_size_of_each_op"][stage][0] for kind in ("model", "data"))
    algo = plan["algo_of_each_op"][stage]
    ops = table.chain[start : start + count]
    at = ops, table.shape_index(model.usual_shape(plan["micro_batch_size"] // dp)), table.tp_index(tp), algo
    flags = np.array(plan["recompute_ops"][stage])
    total = float((table.forward_s[at][:, 0] * (1 + flags) + table.backward_s[at][:, 0]).sum()) * 1e6
    first_gpu = sum(plan["num_gpus"][:stage])
    for amount, crosses in (
        (table.input_bytes[at][0], first_gpu > 0 and first_gpu % per_node == 0),
        (table.output_bytes[at][-1], (first_gpu + tp * dp) % per_node == 0),
    ):
        total += (source.p2p_inter if crosses else source.p2p_intra).exact_us(float(amount) / MB)
    if plan["model_name"] != "t5":
        specs = [judge.shardings(table.op_names[op], tp, dp, a) for op, a in zip(ops, algo, strict=True)]
        for j in range(1, count):
            step = judge.reshard(specs[j - 1][1], specs[j][0])
            for kind in (step.forward, step.backward) if step else ():
                if kind != "split":
                    size = float(table.input_bytes[at][j]) / MB
                    found = source.exact_collective_ms(kind, step.group, size, model)
                    total += 1000 * (1e5 if found is None else found)
    return total / 1000


@pytest.mark.parametrize(
    ("data", "family", "size", "micro", "nodes", "layout", "swap"),
    [
        ("eurosys", "gpt", "1_3B", 1, 1, [(1, 1)] * 4, False),
        ("eurosys", "gpt", "6_7B", 4, 2, [(2, 1), (1, 2), (2, 2), (4, 1), (2, 2)], True),
        ("eurosys", "t5", "770M", 4, 1, [(1, 2), (2, 2), (2, 1)], False),
        ("eurosys", "resnet", "6_8B", 32, 2, [(4, 1), (2, 2), (1, 2), (4, 1), (2, 1)], True),
        ("miniset", "gpt", "1_3B", 2, 1, [(1, 2), (2, 1)], True),
        ("miniset", "resnet", "1B", 32, 1, [(2, 1), (1, 2)], True),
    ],
)
def test_stage_times_equal_the_judge(
    published: Path, judge: Callable[[str], ModuleType], data: str, family: str, size: str, micro: int, nodes: int,
    layout: list[tuple[int, int]], swap: bool,
) -> None:  # fmt: skip
    scorer = judge("aceso")
    source = AcesoTables.open(published / "aceso" / data)
    model = source.model(family, size)
    table = source.table(model, source.shapes(model), (1, 2, 4, 8))
    per_node = sum(t * d for t, d in layout) // nodes
    rng = random.Random(size)
    for _ in range(5):
        plan = random_plan(model, rng, micro, layout, swap)
        score = scorer.evaluate(plan, str(published / "aceso" / data), nodes, per_node)
        assert not score.errors
        for stage, expected in enumerate(score.stages):
            got = stage_ms(source, model, table, plan, stage, scorer, per_node)
            assert got == pytest.approx(expected.micro_batch_ms, rel=1e-9)
            start = sum(plan["num_ops_in_each_stage"][:stage])
            ops = table.chain[start : start + plan["num_ops_in_each_stage"][stage]]
            weights = table.parameters[ops, table.tp_index(layout[stage][0]), plan["algo_of_each_op"][stage]].sum()
            assert weights * (4 if family == "resnet" else 2) / MB == pytest.approx(expected.memory["gradients"], rel=1e-9)


def test_published_models_have_their_parameters(published: Path) -> None:
    source = AcesoTables.open(published / "aceso" / "eurosys")
    for family, size, ops, billions in (
        ("gpt", "350M", 315, 0.36), ("gpt", "1_3B", 315, 1.32), ("gpt", "6_7B", 419, 6.66), ("t5", "770M", 821, 0.77),
        ("t5", "6B", 821, 5.70), ("resnet", "500M", 134, 0.50), ("resnet", "6_8B", 134, 6.73),
    ):  # fmt: skip
        model = source.model(family, size)
        assert (model.num_ops, round(model.num_parameters / 1e9, 2)) == (ops, billions)
        assert np.isfinite(source.table(model, source.shapes(model), source.tps(model)).forward_s).all()
