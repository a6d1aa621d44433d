"""DynaPipe's cost models: interpolation, chains, arrays, and agreement with the independent judge."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from penstock.clusters import Cluster, resolve_cluster
from penstock.errors import InputError, ProfileMissingError
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from penstock.systems.dynapipe.grid import Grid
from penstock.systems.dynapipe.tables import DynaPipeTables

HEADER = "tp,recompute,component,micro_batch_size,enc_or_input_seqlen,dec_seqlen,fw_ms,bw_ms,stored_activation_mb,peak_activation_mb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A GPT profiled at micro-batches 1, 2 and lengths 16, 32 (the largest point missing), a T5 at one cell."""
    gpt = [HEADER]
    for mbs, length in ((1, 16), (1, 32), (2, 16)):
        gpt += [f"1,none,encoder,{mbs},{length},,{mbs * length},{2 * mbs * length},{mbs},{3 * mbs}"]
        gpt += [f"1,none,postprocess,{mbs},{length},,1,2,,"]
    (tmp_path / "gpt_6.7b_cost_model.csv").write_text("\n".join(gpt))
    (tmp_path / "gpt_6.7b_model_state.csv").write_text(
        "tp,recompute,component,fp16_param_mb_per_layer\n1,none,embedding,10\n1,none,encoder,20\n"
    )
    t5 = [HEADER]
    for mbs, enc in itertools.product((1, 2), (16, 32)):
        t5 += [f"1,none,encoder,{mbs},{enc},,{enc},1,1,1", f"1,none,postprocess,{mbs},{enc},,{enc},1,,"]
        t5 += [f"1,none,decoder,{mbs},{enc},{dec},{enc + 1000 * dec},1,1,2" for dec in (16, 32)]
    (tmp_path / "t5_11b_cost_model.csv").write_text("\n".join(t5))
    (tmp_path / "t5_11b_model_state.csv").write_text(
        "tp,recompute,component,fp16_param_mb_per_layer\n1,none,embedding,10\n1,none,encoder,20\n1,none,decoder,30\n"
    )
    config = {"model": "gpt", "layers": 4, "tp": 1, "pp": 2, "dp": 1, "zero": 1, "mem": 100, "rc": ["none"], "noperm": 1}
    (tmp_path / "configs.json").write_text(json.dumps({"_common": {"inter_node_gbit_per_s": 80}, "configs": {"small": config}}))
    return tmp_path


def test_interpolation_between_and_outside_points(folder: Path) -> None:
    source = DynaPipeTables.open(folder / "gpt_6.7b")
    cost = source.interpolate("encoder", 1, "none", [1, 1, 1, 2, 2, 1, 3], [16, 24, 8, 16, 24, 33, 16])
    assert cost.fw_ms.tolist() == [16, 24, 8, 32, np.inf, np.inf, np.inf]
    assert cost.peak_mb.tolist() == [3, 3, 3, 6, np.inf, np.inf, np.inf]
    head = source.interpolate("postprocess", 1, "none", 1, 16)
    assert (float(head.fw_ms), float(head.stored_mb)) == (1.0, 0.0)
    decoder = DynaPipeTables.open(folder / "t5_11b")
    assert float(decoder.interpolate("decoder", 1, "none", 1, 24, 20).fw_ms) == 24 + 20000
    assert float(decoder.interpolate("postprocess", 1, "none", 1, 16, 32).fw_ms) == 32


def test_the_larger_of_two_values_at_a_point_counts() -> None:
    grid = Grid.of([[1.0], [1.0], [2.0], [4.0]], [[5.0], [7.0], [np.nan], [9.0]])
    assert grid.at([np.array([1.0, 2.0, 4.0, 3.0, 8.0])])[:, 0].tolist() == [7.0, np.inf, 9.0, np.inf, np.inf]


def test_gpt_chain_and_table(folder: Path, two_nodes: Cluster) -> None:
    source = DynaPipeTables.open(folder / "gpt_6.7b")
    model = source.model(3, seq_length=16)
    assert [placed.name for placed in model.ops] == ["encoder-first", "encoder.0.layer", "encoder.1.layer", "head"]
    assert (source.model().num_ops, model.num_parameters) == (33, (10 + 3 * 20) * 500_000)
    shapes = [Shape.padded(1, 16), Shape.padded(1, 24), Shape.padded(2, 32), Shape.packed([16])]
    table = source.table(model, shapes, (1, 2), two_nodes)
    assert (table.chain.tolist(), table.devices) == ([0, 1, 1, 2], ("v100-32gb",))
    assert table.forward_s[1, :, 0, 0, 0].tolist() == pytest.approx([0.016, 0.024, np.inf, np.inf])
    assert np.isinf(table.backward_s[:, :, 1]).all()
    assert table.kept_bytes[0, :, 0, 0].tolist() == [1e6, 1e6, 0, 0]
    assert table.workspace_bytes[0, :, 0, 0].tolist() == [2e6, 2e6, 0, 0]
    assert table.parameters[:, 0, 0].tolist() == [15e6, 10e6, 0]
    assert table.input_bytes[:, 0, 0, 0].tolist() == [0, 16 * 4096 * 2, 16 * 4096 * 2]
    assert table.output_bytes[:, 0, 0, 0].tolist() == [16 * 4096 * 2, 16 * 4096 * 2, 0]
    assert source.shapes(model)[-1] == Shape.padded(2, 16)


def test_t5_decoder_carries_both_tensors(folder: Path) -> None:
    source = DynaPipeTables.open(folder / "t5_11b")
    model = source.model(2, 16, 32)
    table = source.table(model, [Shape.padded(1, 16, 32)], (1,))
    assert table.op_names == ("encoder-first", "encoder", "decoder-first", "decoder", "postprocess")
    assert (table.input_bytes[:, 0, 0, 0] / 2048).tolist() == [0, 16, 16, 48, 48]
    assert table.forward_s[2:, 0, 0, 0, 0].tolist() == [32.016, 32.016, 0.032]


def test_state_links_and_configs(folder: Path, two_nodes: Cluster) -> None:
    source = DynaPipeTables.open(folder / "gpt_6.7b")
    states = [source.model_state_bytes("encoder", 1, zero=zero, dp=2) / 20e6 for zero in (0, 1, 2, 3)]
    assert states == [8, 5, 4.5, 4]
    assert source.transfer_s(6e8, two_nodes, 0, 1) == pytest.approx(1e-3)
    assert source.transfer_s(1e7, two_nodes, 0, 4) == pytest.approx(5e-3)
    assert source.collective_s("all_gather", 1e10, two_nodes, (0, 4)) == pytest.approx(0.5)
    assert source.optimizer_s(1e9, "a100-40gb") == 0.0
    config = source.configs()["small"]
    assert (config.layers, config.rc, config.noperm, config.memory_limit_bytes) == (4, ("none",), True, 1e8)


def test_wrong_input_is_explained(folder: Path) -> None:
    with pytest.raises(InputError, match=r"holds gpt_6.7b, t5_11b; add one to the path"):
        DynaPipeTables.open(folder)
    with pytest.raises(InputError, match=r"no table 'gpt_6.7'. Did you mean 'gpt_6.7b'"):
        DynaPipeTables.open(folder / "gpt_6.7")
    source = DynaPipeTables.open(folder / "gpt_6.7b")
    with pytest.raises(
        ProfileMissingError, match="does not hold encoder with tp 2 and recompute 'full'; it holds encoder, postprocess with tp 1"
    ):
        source.interpolate("encoder", 2, "full", 1, 16)
    with pytest.raises(ProfileMissingError, match="weights of decoder"):
        source.model_state_bytes("decoder", 1)
    with pytest.raises(InputError, match="is not the chain of dynapipe"):
        source.table(Model("mine", "gpt", "fp16", ()), [Shape(1)], (1,))
    with pytest.raises(InputError, match="num_layers is -1"):
        source.model(-1)
    with pytest.raises(InputError, match="measured on one device kind"):
        source.table(source.model(), [Shape.padded(1, 16)], (1,), resolve_cluster("1xp4d.24xlarge+1xg5.24xlarge"))
    path = folder / "gpt_6.7b_cost_model.csv"
    path.write_text(path.read_text().replace("1,none,encoder,1,16,,16", "1,some,encoder,1,16,,16"))
    with pytest.raises(InputError, match=r"row 2, column 'recompute': expected one of none, selective, full, got 'some'"):
        DynaPipeTables.open(folder / "gpt_6.7b").model()
    (folder / "llama_cost_model.csv").write_text(HEADER)
    with pytest.raises(InputError, match="hidden size of DynaPipe's 'llama' is not in its tables"):
        DynaPipeTables.open(folder / "llama")


@pytest.mark.parametrize(("name", "family"), [("gpt_6.7b", "gpt"), ("t5_11b", "t5")])
def test_interpolation_equals_the_judge(published: Path, judge: Callable[[str], ModuleType], name: str, family: str) -> None:
    scorer = judge("dynapipe")
    source = DynaPipeTables.open(published / "dynapipe" / name)
    rng = np.random.default_rng(7)
    points = 300
    feasible = 0
    for tp in source.tps():
        cost = scorer.CostModel(str(published / "dynapipe"), family, tp)
        for mode, component in itertools.product(("none", "selective", "full"), ("encoder", "decoder", "postprocess")):
            if (mode, component, "fw") not in cost.grids:
                continue
            mbs = 2 ** rng.uniform(0, 9, points) // 1
            enc, dec = (2 ** rng.uniform(2, 13.2, points) // 1 for _ in range(2))
            mbs[:50], enc[:50] = 2 ** rng.integers(0, 5, 50), 2 ** rng.integers(4, 12, 50)  # exactly on the grid as well
            got = source.interpolate(component, tp, mode, mbs, enc, dec if family == "t5" else 0)
            for i in range(points):
                shape = scorer.Shape(float(mbs[i]), float(enc[i]), float(dec[i]) if family == "t5" else 0)
                expected = cost.head(mode, shape) if component == "postprocess" else cost.layer(component, mode, shape)
                assert tuple(float(quantity[i]) for quantity in got)[: len(expected)] == expected
                feasible += np.isfinite(expected[0])
    assert feasible > 500


@pytest.mark.parametrize("config", ["gptA", "gptB", "t5C", "t5D"])
def test_stages_equal_the_judge(published: Path, judge: Callable[[str], ModuleType], config: str) -> None:
    scorer = judge("dynapipe")
    setup = scorer.CONFIGS[config]
    pipe = scorer.Pipeline(setup, str(published / "dynapipe"))
    source = DynaPipeTables.open(published / "dynapipe" / scorer.MODELS[setup["model"]][0])
    assert source.configs()[config].layers == setup["layers"]
    model = source.model(setup["layers"])
    for mode in ("none", "full"):
        shapes = [Shape.padded(*rows) for rows in ((1, 512, 64), (3, 200, 40), (8, 104, 16), (2, 1000, 300))]
        shapes = shapes if setup["model"] == "t5" else [Shape.padded(s.samples, s.tokens // s.samples) for s in shapes]
        table = source.table(model, shapes, (setup["tp"],), recompute=mode)
        start = 0
        for stage, layers in enumerate(pipe.stages):
            count = len(layers) + (stage == pipe.pp - 1)
            ops = table.chain[start : start + count]
            for s, shape in enumerate(shapes):
                rows = scorer.Shape(shape.samples, shape.tokens // shape.samples, shape.dec_tokens // shape.samples)
                expected = pipe.stage_cost(stage, mode, rows)
                assert table.forward_s[ops, s, 0, 0, 0].sum() * 1e3 == pytest.approx(expected.forward_ms, rel=1e-12)
                assert table.backward_s[ops, s, 0, 0, 0].sum() * 1e3 == pytest.approx(expected.backward_ms, rel=1e-12)
                kept, extra = table.kept_bytes[ops, s, 0, 0], table.workspace_bytes[ops, s, 0, 0]
                assert kept.sum() / 1e6 == pytest.approx(expected.stored_mb, rel=1e-12)
                assert (np.cumsum(kept) + extra).max() / 1e6 == pytest.approx(expected.peak_mb, rel=1e-12)
            state = table.parameters[ops, 0, 0].sum() * 2 * (2 + 6 / setup["dp"]) / 1e6
            assert state == pytest.approx(pipe.state_mb(stage, {mode}), rel=1e-12)
            start += len(layers)


def test_interpolation_is_fast(published: Path) -> None:
    source = DynaPipeTables.open(published / "dynapipe" / "t5_11b")
    rng = np.random.default_rng(0)
    mbs, enc, dec = rng.integers(1, 64, 100_000), rng.integers(8, 2048, 100_000), rng.integers(8, 512, 100_000)
    source.interpolate("decoder", 8, "none", 1, 16, 16)
    began = time.perf_counter()
    source.interpolate("decoder", 8, "none", mbs, enc, dec)
    assert time.perf_counter() - began < 1.0
