"""`penstock explain`: tables, totals, differences, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
PP4, MIXED, BERT = (str(EXAMPLES / f"{name}.json") for name in ("gpt-1.3b-pp4", "llama-8b-mixed", "bert-large-zero1"))


def told_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert run(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", MIXED]) == 0
    shown = capsys.readouterr().out
    words = ("forward", "backward", "recompute", "tp comm", "transfers", "bubble", "grad sync", "optimizer", "activations", "limit", "MFU")
    for word in (*words, "tokens/s"):
        assert word in shown
    assert "3*" in shown and "the others wait for stage 3" in shown and "per hour" in shown and "sequence_parallel" in shown


def test_json_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = told_json(capsys, PP4)["estimate"]
    assert sum(found["shares_s"].values()) == pytest.approx(found["time_s"])
    assert len(found["stages"]) == 4 and found["fits"] is True and found["price_usd"] is None
    for stage in found["stages"]:
        work, memory = stage["work"], stage["memory"]
        assert sum(value for name, value in work.items() if name != "total_s") == pytest.approx(work["total_s"])
        assert sum(value for name, value in memory.items() if name != "total_bytes") == pytest.approx(memory["total_bytes"])


def test_differences(capsys: pytest.CaptureFixture[str]) -> None:
    told = told_json(capsys, PP4, "--against", BERT)
    assert told["differences"]["time_s"] == pytest.approx(told["estimate"]["time_s"] - told["other"]["time_s"])
    assert told["differences"]["price_usd"] is None
    assert set(told_json(capsys, PP4, "--against", PP4)["differences"].values()) <= {0, None}
    assert run(["explain", PP4, "--against", BERT]) == 0
    assert "against" in capsys.readouterr().out


def test_costs_are_the_plans_own_unless_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path(PP4).read_text(encoding="utf-8"))
    data |= {"cluster": "4xh200-141gb", "costs": "profile:h200-141gb"}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert told_json(capsys, str(path))["estimate"]["source"] == "profile:h200-141gb"
    assert told_json(capsys, str(path), "--costs", "roofline")["estimate"]["source"] == "roofline"


def test_a_plan_that_does_not_fit_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path(PP4).read_text(encoding="utf-8"))
    data["micro_batching"]["samples"] = 64
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert run(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "this plan does not fit: stage 0 needs" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.json"], "plan 'none.json' does not exist"),
        ([PP4, "--against", "none.json"], "plan 'none.json' does not exist"),
        ([PP4, "--costs", "profile:h200-141gb"], "measured on h200-141gb, but the cluster has 'a100-40gb'"),
        ([PP4, "--costs", "roofine"], "costs 'roofine' is not known. Did you mean 'roofline'"),
        ([str(EXAMPLES)], "is a directory"),
    ],
)
def test_wrong_input_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *arguments]) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == ""


def test_an_invalid_plan_names_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(Path(PP4).read_text(encoding="utf-8"))
    data["stages"][0]["ops"] = "0:50"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    assert run(["explain", str(path), "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "stages.1.ops is 49:97" in told.err
