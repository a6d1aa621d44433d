"""`penstock check`: what it prints and with which status it leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
GOOD = EXAMPLES / "gpt-1.3b-pp4.json"


def broken(tmp_path: Path) -> Path:
    """A plan that places ops 49:50 twice and whose stages use an unknown rank."""
    data = json.loads(GOOD.read_text(encoding="utf-8"))
    data["stages"][0]["ops"] = "0:50"
    data["stages"][3]["devices"] = ["9"]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_a_valid_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(GOOD)]) == 0
    shown = capsys.readouterr().out
    assert "plan is valid" in shown and "145:196" in shown and "layers.18.norm1" in shown and "4 × a100-40gb" in shown
    assert "global batch 512 = 1 × 128 micro-batches of 4 (fixed, padded)" in shown
    assert "schedule 1f1b" in shown and "One forward, one backward in turn" in shown


def test_a_valid_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(EXAMPLES / "llama-8b-mixed.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] is True and told["problems"] == [] and told["num_devices"] == 32 and told["num_micro_batches"] == 64


@pytest.mark.parametrize("verb", [["check"], ["check", "--json"], ["train", "--data", "nowhere", "--steps", "1"]])
def test_a_plan_that_does_not_fit(verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is valid but for its micro-batches, which were made larger by hand: the prediction in the file still says that it fits."""
    data = json.loads(GOOD.read_text(encoding="utf-8"))
    data["micro_batching"]["samples"] = 64
    path, out = tmp_path / "plan.json", tmp_path / "run"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert run([verb[0], str(path), *verb[1:], *(["--out", str(out)] if verb[0] == "train" else [])]) == 3
    told = capsys.readouterr()
    message = json.loads(told.out)["problems"][0] if "--json" in verb else told.err
    assert "the plan does not fit: rank 0, instruction" in message and "a100-40gb has" in message and "micro-batches among it" in message
    assert not out.exists()


def test_unequal_shares_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = uniform_plan("gpt-tiny", "3xa100-40gb", replicas=3, global_batch=24, micro_batch=2)
    write_plan(tmp_path / "plan.json", replace(plan, micro_batching=replace(plan.micro_batching, per_replica=(5, 5, 2))))
    assert run(["check", str(tmp_path / "plan.json")]) == 0
    assert "global batch 24 = 2 × 5 + 1 × 2 micro-batches of 2 (fixed, padded)" in capsys.readouterr().out
    assert run(["check", str(tmp_path / "plan.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_micro_batches"] == 5 and told["per_replica"] == [5, 5, 2]


def test_every_problem_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = broken(tmp_path)
    assert run(["check", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and f"plan '{path}' has 2 problems" in told.err
    assert "49:50 are placed twice" in told.err and "has rank 9" in told.err


def test_every_problem_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(broken(tmp_path)), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] is False and len(told["problems"]) == 2


@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_a_missing_file(json_flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "no-such-plan.json", *json_flag]) == 2
    told = capsys.readouterr()
    assert "no-such-plan.json' does not exist" in told.out + told.err


def test_predictions_and_notes_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(GOOD.read_text(encoding="utf-8"))
    data["cluster"] = "8xa100-40gb"
    data["predicted"] = {"time_s": 2.5, "costs": "roofline", "price_usd": 0.02, "memory": [{"weights_bytes": 2**30}] * 4}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert run(["check", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "predicted 2.50 s, $0.0200 per iteration (roofline)" in shown and "1.0 GiB" in shown
    assert "note: 4 of 8 devices are idle: ranks 4-7." in shown
