"""`penstock batch`: the table, the file, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.batching.plan import read_batch_plan
from penstock.cli.main import run

PLAN = Path(__file__).parents[2] / "examples" / "plans" / "gpt-1.3b-pp4.json"


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("sample_id,enc_len,dec_len\n" + "".join(f"{i + 5},{50 + 37 * i % 900},0\n" for i in range(30)))
    return path


def test_a_batch_is_planned_shown_and_written(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch.json"
    assert run(["batch", "--lengths", str(lengths), "--plan", str(PLAN), "--budget-steps", "200", "--out", str(path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("13 micro-batches: ") and " a step, " in shown and "200 steps of search" in shown
    assert "replica 0" in shown and "forwards ahead" in shown
    plan = read_batch_plan(path)
    assert sorted(i for one in plan.replicas[0].micro_batches for i in one.samples) == list(range(5, 35))


def test_json_is_one_object_and_the_same_each_time(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert run(["batch", "--lengths", str(lengths), "--plan", str(PLAN), "--budget-steps", "300", "--seed", "3", "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert 0 < told[0]["bound_s"] <= told[0]["predicted_s"]
    assert told[0]["batch"]["replicas"][0]["micro_batches"]


def test_the_usual_ways_stand_beside_the_plan(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["batch", "--lengths", str(lengths), "--plan", str(PLAN), "--budget-steps", "300", "--baselines"]
    assert run(asked) == 0
    assert "rows padded to the longest sample" in capsys.readouterr().out
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["baselines"]) >= 3 and all(one["num_tokens"] == told["num_tokens"] for one in told["baselines"])
    assert min(one["predicted_s"] for one in told["baselines"]) > told["predicted_s"]


def test_wrong_input_is_refused(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", "--lengths", str(tmp_path / "none.csv"), "--plan", str(PLAN)]) == 2
    assert run(["batch", "--lengths", str(lengths), "--plan", str(PLAN), "--budget-steps", "-1"]) == 2
    assert run(["batch", "--lengths", str(lengths), "--plan", str(PLAN), "--seed", "-1"]) == 2
    long = tmp_path / "long.csv"
    long.write_text("length\n900000\n20\n")
    assert run(["batch", "--lengths", str(long), "--plan", str(PLAN)]) == 3
    assert "sample 0 (900000 tokens) does not fit" in capsys.readouterr().err
    for choice, counts in (("drop", (1, 0)), ("truncate", (0, 1))):
        asked = ["batch", "--lengths", str(long), "--plan", str(PLAN), "--too-long", choice, "--budget-steps", "0", "--baselines", "--json"]
        assert run(asked) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["dropped"], told["truncated"]) == counts
        assert {one["num_tokens"] for one in told["baselines"]} == {told["num_tokens"]}
    assert run(["batch", "--lengths", str(long), "--plan", str(PLAN), "--too-long", "drop", "--budget-steps", "0"]) == 0
    assert "sample 0 of 900,000 tokens was dropped" in capsys.readouterr().out


@pytest.fixture
def configured(tmp_path: Path) -> str:
    """DynaPipe's tables of a model whose layers take a millisecond a sample, and a configuration of four layers on two stages."""
    header = "tp,recompute,component,micro_batch_size,enc_or_input_seqlen,dec_seqlen,fw_ms,bw_ms,stored_activation_mb,peak_activation_mb"
    sizes = [(rows, length) for rows in (1, 64) for length in (16, 1024)]
    layers = [f"1,none,encoder,{rows},{length},,{rows},{2 * rows},{rows * length / 1e4},{rows * length / 5e3}" for rows, length in sizes]
    heads = [f"1,none,postprocess,{rows},{length},,{rows},{rows},," for rows, length in sizes]
    (tmp_path / "gpt_6.7b_cost_model.csv").write_text("\n".join([header, *layers, *heads]))
    state = "tp,recompute,component,fp16_param_mb_per_layer\n1,none,embedding,1\n1,none,encoder,2\n"
    (tmp_path / "gpt_6.7b_model_state.csv").write_text(state)
    small = {"model": "gpt", "layers": 4, "tp": 1, "pp": 2, "dp": 1, "mem": 1000, "rc": ["none"]}
    (tmp_path / "configs.json").write_text(json.dumps({"_common": {}, "configs": {"small": small}}))
    return f"dynapipe:{tmp_path / 'small'}"


def test_a_batch_for_a_configuration(configured: str, lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, told = tmp_path / "batch.json", {}
    for free in (False, True):
        more = ["--free-layers"] if free else ["--out", str(path)]
        assert run(["batch", "--lengths", str(lengths), "--costs", configured, "--budget-steps", "200", "--json", *more]) == 0
        told[free] = json.loads(capsys.readouterr().out)
    assert sorted(i for one in read_batch_plan(path).replicas[0].micro_batches for i in one.samples) == list(range(5, 35))
    assert told[False]["predicted_s"] >= 30 * 4 * 3e-3 / 2  # 30 samples, 4 layers of 3 ms, 2 stages
    # The head is on the last stage, so that equal layers are not the best.
    assert told[True]["predicted_s"] <= told[False]["predicted_s"]
    assert run(["batch", "--lengths", str(lengths), "--costs", configured, "--budget-steps", "0"]) == 0
    assert " a step, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--costs", "CONFIGURED", "--plan", str(PLAN)], "--plan does not go with"),
        (["--costs", "CONFIGUREDx"], "no configuration 'smallx' of DynaPipe. Did you mean 'small'?"),
        (["--costs", "dynapipe:"], "expected dynapipe:DIR/NAME"),
        (["--plan", str(PLAN), "--free-layers"], "--free-layers belongs to --costs dynapipe:DIR/NAME"),
        ([], "--plan is missing"),
    ],
)
def test_what_goes_with_a_configuration(
    arguments: list[str], message: str, configured: str, lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["batch", "--lengths", str(lengths), *(one.replace("CONFIGURED", configured) for one in arguments)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
