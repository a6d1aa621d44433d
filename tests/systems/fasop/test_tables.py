"""FASOP's inputs: chains, arrays, node kinds, and agreement with the independent judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from penstock.clusters import Cluster, Link, Node, NodeRun, resolve_cluster, resolve_device
from penstock.errors import InputError, ProfileMissingError
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.systems.fasop.tables import FasopTables

LAYERS = ["embedding_layer", "block", "block", "block", "post_process"]
TINY = {
    "hidden_size": 8, "sequence_length": 4, "vocab_size": 100, "num_attention_heads": 2, "global_batch_size": 16, "layer_types": LAYERS,
}  # fmt: skip
KIND = {
    "instance": "p4d", "gpu": "A100", "gpus_per_node": 4, "intra_bits_per_s": 8e9, "inter_bits_per_s": 4e9,
    "usable_mem_gib": 2, "usd_per_hour": 3.5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model whose last block is slower than the two before it."""
    (tmp_path / "models.json").write_text(json.dumps({"tiny": TINY}))
    (tmp_path / "node_types.json").write_text(json.dumps({"default": {"A": KIND}}))
    (tmp_path / "settings.json").write_text(
        json.dumps({"tiny-homo": {"model": "tiny", "node_table": "default", "nodes": "AA", "total_steps": 10}})
    )
    lines = ["model,gpu,tp,mbs,layer_index,layer_type,fwdbwd_seconds"]
    for gpu, speed in (("A100", 1), ("A10", 2)):
        for tp in (1, 2):
            for mbs in (1, 2):
                times = [0.3, 3.0, 3.0, 3.3, 0.6]
                lines += [f"tiny,{gpu},{tp},{mbs},{i},{LAYERS[i]},{t * speed * mbs / tp}" for i, t in enumerate(times)]
    (tmp_path / "layer_fwdbwd_cost.csv").write_text("\n".join(lines))
    (tmp_path / "layer_fwd_cost_mbs1.csv").write_text(
        "model,gpu,tp,layer_index,layer_type,fwd_seconds\ntiny,A100,1,0,embedding_layer,0.1\n"
    )
    return tmp_path


def test_chain_groups_layers_of_equal_times(folder: Path) -> None:
    source = FasopTables.open(folder)
    model = source.model("tiny")
    assert [(block.name, copies) for block, copies in model.runs] == [
        ("embedding_layer", 1), ("block", 2), ("block-3", 1), ("post_process", 1),
    ]  # fmt: skip
    assert [placed.name for placed in model.ops] == ["embedding_layer", "block.0.layer", "block.1.layer", "block-3.layer", "post_process"]
    assert model.num_parameters == 800 + 3 * (12 * 64 + 20800)
    assert (source.micro_batches(model), source.tps(model), model.max_tp()) == ((1, 2), (1, 2), 2)
    assert source.shapes(model) == (Shape.padded(1, 4), Shape.padded(2, 4))


def test_table_splits_times_into_thirds(folder: Path) -> None:
    source = FasopTables.open(folder)
    table = source.table(source.model("tiny"), [Shape.padded(mbs, 4) for mbs in (1, 2, 4)], (1, 2, 4))
    assert (table.devices, table.chain.tolist()) == (("a100", "a10"), [0, 1, 1, 2, 3])
    assert table.forward_s[1, 0, 0, 0].tolist() == [1.0, 2.0]
    assert table.backward_s[2, 1, 1, 0].tolist() == pytest.approx([2.2, 4.4])
    assert np.isinf(table.forward_s[:, 2]).all()
    assert np.isinf(table.forward_s[:, :, 2]).all()
    assert table.input_bytes[:, 1, 0, 0].tolist() == [0, 128, 128, 128]
    assert table.output_bytes[:, 1, 0, 0].tolist() == [128, 128, 128, 0]
    assert table.parameters[:, 1, 0].tolist() == [400, 10784, 10784, 400]
    assert table.kept_bytes[:, 1, 1, 0].tolist() == [32, 2 * (10 * 32 + (24 * 32 + 5 * 2 * 16) / 2), 2 * (320 + 464), 2 * 4 * 4 * 108 / 2]


def test_cluster_devices_are_matched_by_name(folder: Path) -> None:
    source = FasopTables.open(folder)
    model = source.model("tiny")
    mixed = resolve_cluster("1xg5.24xlarge+1xp4d.24xlarge")
    table = source.table(model, [Shape.padded(1, 4)], (1,), mixed)
    assert table.devices == tuple(device.name for device, _ in mixed.kinds)
    assert table.forward_s[1, 0, 0, 0].tolist() == [2.0, 1.0]
    with pytest.raises(ProfileMissingError, match="holds GPUs A100, A10; the cluster has 'h100"):
        source.table(model, [Shape.padded(1, 4)], (1,), resolve_cluster("1xp5.48xlarge"))


def test_links_node_kinds_and_settings(folder: Path, two_nodes: Cluster) -> None:
    source = FasopTables.open(folder)
    assert source.transfer_s(15e9, two_nodes, 0, 1) == pytest.approx(0.35)
    assert source.transfer_s(1e9, two_nodes, 3, 4) == pytest.approx(0.105)
    assert source.collective_s("all_reduce", 1e9, two_nodes, range(8)) == pytest.approx(2 * 7 / 8 * 0.1)
    assert source.collective_s("all_reduce", 1e9, two_nodes, [3]) == 0.0
    assert source.optimizer_s(1e9, "a100") == 0.0
    kind = source.node_kinds()["A"]
    assert (kind.device, kind.gpus_per_node, kind.intra_bandwidth_bytes_per_s, kind.inter_bandwidth_bytes_per_s) == ("a100", 4, 1e9, 5e8)
    assert (kind.memory_bytes, kind.price_usd_per_h) == (2 * 2**30, 3.5)
    assert source.settings()["tiny-homo"].nodes == "AA"
    assert source.profiled_forward_s["tiny", "A100", 1, 0] == 0.1
    with pytest.raises(InputError, match=r"no node table 'defualt'. Did you mean 'default'"):
        source.node_kinds("defualt")


def test_wrong_input_is_explained(folder: Path) -> None:
    source = FasopTables.open(folder)
    with pytest.raises(InputError, match=r"no model 'tyny'. Did you mean 'tiny'"):
        source.model("tyny")
    with pytest.raises(ProfileMissingError, match="only padded samples of 4 tokens"):
        source.table(source.model("tiny"), [Shape.padded(1, 8)], (1,))
    with pytest.raises(InputError, match="is not a chain of fasop"):
        source.table(Model("mine", "gpt", "fp16", ()), [Shape(1)], (1,))
    times = folder / "layer_fwdbwd_cost.csv"
    text = times.read_text()
    times.write_text(text.replace("tiny,A100,1,1,2,", "tiny,A100,1,1,7,"))
    with pytest.raises(InputError, match=r"row 4, column 'layer_index': expected 0 to 4, the layers of tiny, got '7'"):
        FasopTables.open(folder).model("tiny")
    times.write_text(text.replace("tiny,A10,", "huge,A10,"))
    with pytest.raises(InputError, match=r"column 'model': expected one of tiny, got 'huge'"):
        FasopTables.open(folder).model("tiny")
    (folder / "models.json").write_text(json.dumps({"tiny": {**TINY, "hidden_size": "wide"}}))
    with pytest.raises(InputError, match=r"tiny.hidden_size: .*got 'wide'"):
        FasopTables.open(folder)
    times.unlink()
    with pytest.raises(InputError, match=r"'layer_fwdbwd_cost.csv' is missing"):
        FasopTables.open(folder)


def cluster_of(source: FasopTables, placement: str, table: str = "default") -> Cluster:
    """A cluster with FASOP's own links, one node per letter."""
    runs = []
    for letter in placement:
        kind = source.node_kinds(table)[letter]
        device = replace(resolve_device("a100-40gb"), name=kind.device, memory_bytes=kind.memory_bytes)
        intra, inter = Link("intra", kind.intra_bandwidth_bytes_per_s, 0.0), Link("inter", kind.inter_bandwidth_bytes_per_s, 0.0)
        runs.append(NodeRun(Node(kind.instance, device, kind.gpus_per_node, intra, inter, kind.price_usd_per_h)))
    return Cluster(placement, tuple(runs))


@pytest.mark.parametrize(
    ("setting", "placement", "tp", "dp", "mbs", "partition"),
    [
        ("bert-het", "ABBB", 1, 4, 8, [14, 5, 5, 2]),
        ("gpt2XL-het", "BBBBBBBA", 1, 2, 1, [4, 3, 3, 3, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4]),
        ("gpt2XL-homo", "BBBBBBBB", 4, 1, 2, [7, 6, 6, 6, 6, 6, 6, 7]),
        ("T5-het", "ABBBBBBB", 1, 4, 2, [15, 10, 5, 4, 4, 4, 4, 4]),
        ("T5-homo", "BBBBBBBB", 2, 2, 4, [9, 8, 8, 6, 5, 4, 5, 5]),
    ],
)
def test_stages_equal_the_judge(
    published: Path, judge: Callable[[str], ModuleType], setting: str, placement: str, tp: int, dp: int, mbs: int, partition: list[int]
) -> None:
    scorer = judge("fasop")
    source = FasopTables.open(published / "fasop")
    model = source.model(source.settings()[setting].model)
    cluster = cluster_of(source, placement)
    table = source.table(model, source.shapes(model), source.tps(model), cluster)
    plan = {"setting": setting, "placement": placement, "tp": tp, "dp": dp, "pp": len(partition), "mbs": mbs, "partition": partition}
    score = scorer.evaluate(plan, scorer.Data(str(published / "fasop")))
    assert not score.errors
    s, t = table.shape_index(model.usual_shape(mbs)), table.tp_index(tp)
    start = 0
    for stage, expected in enumerate(score.stages):
        ops = table.chain[start : start + partition[stage]]
        d = table.device_index(expected.gpu.lower())
        compute = table.forward_s[ops, s, t, 0, d].sum() + table.backward_s[ops, s, t, 0, d].sum()
        assert compute == pytest.approx(expected.compute_s, rel=1e-12)
        in_flight = min(len(partition) - stage, score.micro_batches)
        memory = table.parameters[ops, t, 0].sum() * 18 + table.kept_bytes[ops, s, t, 0].sum() * in_flight
        assert memory / 2**30 == pytest.approx(expected.memory_gib, rel=1e-12)
        ranks = range(stage * tp * dp, (stage + 1) * tp * dp, tp)
        reduce_s = source.collective_s("all_reduce", 2 * table.parameters[ops, t, 0].sum(), cluster, ranks) * tp
        assert reduce_s == pytest.approx(expected.allreduce_s, rel=1e-12)
        start += partition[stage]


def test_transfers_equal_the_judge(published: Path, judge: Callable[[str], ModuleType]) -> None:
    scorer = judge("fasop")
    source = FasopTables.open(published / "fasop")
    cluster, table = cluster_of(source, "AB"), scorer.Data(str(published / "fasop")).node_tables["default"]
    links = scorer.Links(dict(enumerate("AB")), table)
    for sender, receiver in ((0, 1), (3, 4), (5, 6)):
        stages = [scorer.Stage(1, 1, 1, 2, [cluster.node_index(rank)]) for rank in (sender, receiver)]
        expected = scorer.hop_seconds(*stages, links, bits_per_sample=8e6)
        assert source.transfer_s(2e6, cluster, sender, receiver) == pytest.approx(expected, rel=1e-12)
