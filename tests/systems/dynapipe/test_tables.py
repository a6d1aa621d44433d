"""DynaPipe's cost models: interpolation, chains, arrays, and agreement with the independent judge."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from command_lines import with_last_values
from counted_work import counted_calls
from small_tables import dynapipe_pickle, dynapipe_tables

from penstock.cli.main import run
from penstock.errors import InputError, ProfileMissingError
from penstock.systems.dynapipe.grid import CostGrid
from penstock.systems.dynapipe.tables import DynaPipeTables, open_configuration

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
    grid = CostGrid.of([[1.0], [1.0], [2.0], [4.0]], [[5.0], [7.0], [np.nan], [9.0]])
    assert grid.at([np.array([1.0, 2.0, 4.0, 3.0, 8.0])])[:, 0].tolist() == [7.0, np.inf, 9.0, np.inf, np.inf]


def test_state_and_configurations(folder: Path) -> None:
    source = DynaPipeTables.open(folder / "gpt_6.7b")
    states = [source.model_state_bytes("encoder", 1, zero=zero, dp=2) / 20e6 for zero in (0, 1, 2, 3)]
    assert states == [8, 5, 4.5, 4]
    tables, config = open_configuration(folder / "small")
    assert (tables.table_name, tables.links.inter_node_gbit_per_s, tables.links.gpus_per_node) == ("gpt_6.7b", 80, 8)
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
    with pytest.raises(InputError, match=r"no configuration 'smal' of DynaPipe\. Did you mean 'small'"):
        open_configuration(folder / "smal")
    path = folder / "gpt_6.7b_cost_model.csv"
    path.write_text(path.read_text().replace("1,none,encoder,1,16,,16", "1,some,encoder,1,16,,16"))
    with pytest.raises(InputError, match=r"row 2, column 'recompute': expected one of none, selective, full, got 'some'"):
        DynaPipeTables.open(folder / "gpt_6.7b").knots("encoder", 1, "none")
    (folder / "llama_cost_model.csv").write_text(HEADER)
    with pytest.raises(InputError, match="hidden size of DynaPipe's 'llama' is not in its tables"):
        DynaPipeTables.open(folder / "llama")


def test_the_best_degrees_are_found_for_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two GPUs of which each holds one side of the pipeline, or both halves of the batch where weights fit twice."""
    lengths, out = folder / "lengths.csv", folder / "found.json"
    lengths.write_text("sample_id,enc_len,dec_len\n" + "".join(f"{i},{17 + i % 9},0\n" for i in range(12)))
    asked = ["search", "--costs", f"dynapipe:{folder}", "--model", "gpt_6.7b", "--cluster", "1x2", "--lengths", str(lengths), "--json"]
    assert run([*asked, "--baselines", "--out", str(out)]) == 0
    wide = json.loads(capsys.readouterr().out)
    assert set(wide["baselines"]) == {"tp 1, pp 1, dp 2", "tp 1, pp 2, dp 1"} and wide["lower_bound_s"] <= wide["time_s"]
    assert wide["time_s"] <= min(wide["baselines"].values()) * (1 + 1e-9)
    config = json.loads(out.read_text())["configs"]["found"]
    assert config["tp"] * config["pp"] * config["dp"] == 2 and len(wide["stages"]) == config["pp"]
    assert run([*asked, "--memory-limit", "3", "--baselines"]) == 0  # 32 layers of 160 MB: only half of them fit
    assert set(json.loads(capsys.readouterr().out)["baselines"]) == {"tp 1, pp 2, dp 1"}
    assert run(with_last_values([*asked, "--cluster", "1x3", "--baselines"])) == 0
    assert set(json.loads(capsys.readouterr().out)["baselines"]) == {"tp 1, pp 1, dp 3"}  # 32 layers are no multiple of 3
    assert run([*asked, "--memory-limit", "0.1"]) == 3
    assert "no configuration" in capsys.readouterr().err
    for more, message in ((["--global-batch", "4"], "are the batch"), (["--cluster", "2xt4"], "nodes x GPUs")):
        assert run(with_last_values([*asked, *more])) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run([*asked[:7], "--json"]) == 2
    assert "--lengths is missing" in capsys.readouterr().err


def test_interpolation_takes_all_points_at_once(small_tables: Path) -> None:
    source = DynaPipeTables.open(small_tables / "dynapipe" / "t5_11b")
    rng = np.random.default_rng(0)
    mbs, enc, dec = rng.integers(1, 64, 100_000), rng.integers(8, 2048, 100_000), rng.integers(8, 512, 100_000)
    source.interpolate("decoder", 4, "none", 1, 16, 16)
    one = counted_calls(lambda: source.interpolate("decoder", 4, "none", 1, 16, 16))
    assert counted_calls(lambda: source.interpolate("decoder", 4, "none", mbs, enc, dec)) < 2 * one


@pytest.mark.parametrize("name", ["gpt_6.7b", "t5_11b"])
def test_dynapipes_own_file_is_the_same_cost_model(name: str, tmp_path: Path) -> None:
    dynapipe_pickle(tmp_path / f"{name}_cost_model.pkl", name)
    dynapipe_tables(tmp_path / "csv", (1, 2, 4))
    theirs, plain = DynaPipeTables.open(tmp_path / name), DynaPipeTables.open(tmp_path / "csv" / name)
    mbs, enc, dec = np.random.default_rng(0).integers(1, [[5], [2500], [2500]], (3, 200))
    for component in ("encoder", "postprocess", *(["decoder"] if name == "t5_11b" else [])):
        for own, other in zip(*(t.interpolate(component, 2, "selective", mbs, enc, dec) for t in (theirs, plain)), strict=True):
            assert np.allclose(own, other, rtol=1e-2, atol=1e-3) and np.isfinite(own).any()
    assert theirs.modes(4) == ("none", "selective", "full") and theirs.model_state_bytes("encoder", 2) == 8 * 200e6


@pytest.mark.parametrize(
    ("saved", "message"),
    [({"gpt": b""}, "not as DynaPipe saves it"), ({(1, "some"): b""}, "no \\(tp, recompute\\)"), ({(1, "none"): b"x"}, "not a pickle"),
     ({(1, "none"): pickle.dumps(({("encoder", "forward"): {}}, {}, {}, {}, {}))}, "backward"),
     ({(1, "none"): pickle.dumps(({("encoder", way): {16: [(-1, 2, 3)]} for way in ("forward", "backward")}, {}, {}, {}, {}))}, "-1.0")],
)  # fmt: skip
def test_another_pickle_is_explained(saved: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "gpt_6.7b_cost_model.pkl").write_bytes(pickle.dumps(saved))
    with pytest.raises(InputError, match=message):
        DynaPipeTables.open(tmp_path / "gpt_6.7b").modes(1)


def test_the_largest_value_of_a_pickle_counts(tmp_path: Path) -> None:
    times = {("encoder", way): {16: [(1, 5.0, 1.0), (1, 7.0, 1.0), (1, 6.0, 1.0)]} for way in ("forward", "backward")}
    memory = {"encoder": {16: [(1, 2.0)]}}
    (tmp_path / "gpt_6.7b_cost_model.pkl").write_bytes(pickle.dumps({(1, "none"): pickle.dumps((times, memory, memory, {}, {}))}))
    assert float(DynaPipeTables.open(tmp_path / "gpt_6.7b").interpolate("encoder", 1, "none", 1, 16).fw_ms) == 7.0
