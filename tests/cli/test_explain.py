"""`penstock explain`: tables, totals, differences, other plans, and what it refuses."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.console import format_time
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Predicted
from penstock.plans.schema import read_plan, write_plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
PP4, MIXED, BERT = (str(EXAMPLES / f"{name}.json") for name in ("gpt-1.3b-pp4", "llama-8b-mixed", "bert-large-zero1"))


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine as much is found as on an idle one."""
    monkeypatch.setattr("penstock.search.what_if.BUDGET_S", math.inf)


def told_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    assert run(["explain", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_whole_story(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", MIXED]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PP 4 × TP 2-4 × DP 2-4 + ZeRO-1, recomputing, micro-batch 2 over 1-2: ")
    words = ("forward", "backward", "recompute", "tp comm", "transfers", "bubble", "grad sync", "optimizer", "activations", "MFU")
    for word in (*words, "tokens/s", "master weights"):
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


def cells(table: Any) -> dict[str, list[str]]:
    """The columns of a table that explain prints."""
    return {column.name: [cell.plain for cell in column.cells] for column in table.columns}


def test_tables_have_the_figures_of_the_estimate() -> None:
    told = import_module("penstock.cli.explain")
    found, other = told._estimate(Path(PP4), None), told._estimate(Path(BERT), None)
    shares = cells(told._shares_table(found))["share"]
    assert shares[-1] == "100.0%" and sum(float(share[:-1]) for share in shares[:-1]) == pytest.approx(100, abs=0.3)
    differ = cells(told._differences_table("a", found, "b", other))
    assert differ["relative"][differ["what"].index("iteration")] == f"{found.time_s / other.time_s - 1:+.1%}"
    for stage in found.stages:
        row = dict(zip(told._TIME_COLUMNS, told._time_row(stage, found), strict=True))
        both_s = stage.work.transfer_in_s + stage.work.transfer_out_s
        assert row["transfers"] == (format_time(both_s) if both_s else "-")


def test_the_stage_that_does_not_fit_is_told_and_not_the_one_that_needs_most() -> None:
    told = import_module("penstock.cli.explain")
    found = told._estimate(Path(PP4), None)
    most = max(found.stages, key=lambda stage: stage.memory.total_bytes).index
    small = (most + 1) % 4
    stages = tuple(replace(stage, limit_bytes=1e6, fits=False) if stage.index == small else stage for stage in found.stages)
    facts = told._facts(replace(found, stages=stages, fits=False))
    assert any(fact.startswith(f"this plan does not fit: stage {small} needs") for fact in facts)


def test_a_bound_by_other_costs_is_not_told(tmp_path: Path) -> None:
    told = import_module("penstock.cli.explain")
    plan = replace(read_plan(PP4), cluster="4xh200-141gb")
    write_plan(tmp_path / "a.json", plan)
    found = told._estimate(tmp_path / "a.json", "roofline")
    for costs, is_told in (("roofline", True), ("profile:h200-141gb", False)):
        known = Predicted(found.time_s, costs, lower_bound_s=0.9 * found.time_s)
        write_plan(tmp_path / "a.json", replace(plan, predicted=known))
        assert ("above the best possible" in told._sentence(tmp_path / "a.json", "roofline", found)) == is_told


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


@pytest.fixture
def searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table and for other programs: the same answers, searched for once."""
    explain = import_module("penstock.cli.explain")
    find = explain._what_if
    answers = cache(lambda path, costs: find(path, costs, quiet=True))
    monkeypatch.setattr(explain, "_what_if", lambda path, costs, quiet: answers(path, costs))


@pytest.mark.usefixtures("searched_once")
def test_what_if_of_a_plan_that_could_be_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    write_plan(path, replace(uniform_plan("gpt-tiny", "4xa100-40gb", pp=4, global_batch=64, micro_batch=1), precision="bf16"))
    told = told_json(capsys, path, "--what-if")
    time_s, first, (as_it_is, *changes) = told["estimate"]["time_s"], told["rivals"][0], told["what_if"]
    assert as_it_is["change"] == "as it is" and as_it_is["time_s"] < time_s
    assert sum(first["differences_s"].values()) == pytest.approx(first["time_s"] - time_s)
    assert first["slower"] < 0 and first["pp"] != 4
    assert all(row["time_s"] <= as_it_is["time_s"] and row["plan"]["time_s"] == row["time_s"] for row in changes)
    assert run(["explain", path, "--what-if"]) == 0
    shown = capsys.readouterr().out
    for words in ("a faster plan was found", "takes more", "twice the memory", "inside nodes", "one more node: 4 × a100-40gb", "a100-80gb"):
        assert words in shown
    assert "between nodes" not in shown and "rivals" not in told_json(capsys, path)


@pytest.mark.usefixtures("searched_once")
def test_what_if_of_the_best_plan_says_why_the_runner_up_lost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.json")
    assert run(["search", "--model", "gpt-tiny", "--cluster", "4xa10g", "--global-batch", "64", "--out", path]) == 0
    capsys.readouterr()
    told = told_json(capsys, path, "--what-if")
    assert told["what_if"][0]["time_s"] == pytest.approx(told["estimate"]["time_s"]) and told["rivals"][0]["slower"] >= 0
    most = max(told["rivals"][0]["differences_s"].items(), key=lambda part: part[1])[0]
    assert run(["explain", path, "--what-if"]) == 0
    shown = capsys.readouterr().out
    assert f"the runner-up lost most by its {most}: " in shown and "a faster plan" not in shown


def test_what_if_of_a_plan_that_fits_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, uniform_plan("gpt-1.3b", "1xv100-16gb", global_batch=4, micro_batch=1))
    assert run(["explain", str(path), "--what-if"]) == 0
    shown = capsys.readouterr().out
    assert "no plan of another kind was found that fits" in shown and "as it is: no plan was found that fits" in shown
    assert "v100-32gb instead of v100-16gb" in shown


def test_what_cannot_be_trained_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told_json(capsys, PP4)["unsupported"] == []
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, global_batch=4, micro_batch=1, schedule="pipedream")
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    assert run(["explain", str(path)]) == 0
    assert "cannot be trained yet: schedule 'pipedream' updates each stage by itself" in " ".join(capsys.readouterr().out.split())


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
