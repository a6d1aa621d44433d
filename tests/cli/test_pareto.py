"""`penstock pareto` and the money objectives of `penstock search`: what is bought, what is beaten, and what cannot be had."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from searched_once import searched_once

from penstock.cli.main import run
from penstock.cli.pareto import _file_names
from penstock.plans.schema import read_plan

MODEL = Path(__file__).parents[1] / "short_gpt.yaml"
POOL = ["--model", str(MODEL), "--cluster", "1xp3.8xlarge+2xg5.12xlarge", "--global-batch", "16", "--micro-batches", "1,4"]

BEATEN = ["--model", "gpt2-xl", "--cluster", "1xp4d.24xlarge+1xg5.24xlarge", "--global-batch", "64", "--micro-batches", "1,4"]
"""A node on which the model barely fits is searched first, and beaten by the other."""


@pytest.fixture(autouse=True, scope="module")
def searches() -> Iterator[None]:
    """All clusters of a pool are searched once for all tests that ask for the same."""
    with searched_once():
        yield


def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """No slower and no dearer, and better in one of these, which are the axes of the chart."""
    axes = ("hours", "usd")
    return all(one[axis] <= other[axis] * (1 + 1e-9) for axis in axes) and any(one[axis] < other[axis] * (1 - 1e-9) for axis in axes)


def test_undominated_choices_with_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pareto", *POOL, "--steps", "100", "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    by_name = {row["cluster"]: row for row in told["choices"]}
    best = [row for row in told["choices"] if not row["dominated_by"]]
    assert 0 < len(best) <= len(by_name) == len(told["choices"])
    assert len(told["choices"]) + len(told["left_out"]) == 2 * 3 - 1  # every choice of nodes is accounted for
    for left in told["left_out"]:
        assert left["cluster"] not in by_name and any(reason in left["reason"] for reason in ("beaten by", "no plan", "fits"))
    for row in told["choices"]:
        beaten_by = {name for name, other in by_name.items() if beats(other, row)}
        assert row["dominated_by"] in beaten_by if row["dominated_by"] else not beaten_by, row
    assert told["choices"] == sorted(told["choices"], key=lambda row: (bool(row["dominated_by"]), row["hours"]))
    for row in best:
        plan = read_plan(tmp_path / "out" / f"{row['cluster'].replace('+', '_')}.json")
        assert plan.predicted is not None and plan.predicted.time_s == row["time_s"]
    rows = list(csv.DictReader((tmp_path / "out" / "pareto.csv").open()))
    record = json.loads((tmp_path / "out" / "pareto.json").read_text(encoding="utf-8"))
    assert record["left_out"] == told["left_out"] and [one["cluster"] for one in record["choices"]] == [one["cluster"] for one in rows]
    for one in record["choices"]:
        assert (one["file"] is None) == bool(one["dominated_by"])
        assert one["file"] is None or read_plan(tmp_path / "out" / one["file"]).predicted.time_s == one["time_s"]  # type: ignore[union-attr]
    assert len(rows) == len(told["choices"]) and (tmp_path / "out" / "pareto.svg").stat().st_size > 1000


def test_beaten_choices_are_shown_if_asked_for(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    def shown(*options: str) -> str:
        assert run(["pareto", *BEATEN, "--steps", "100", *options]) == 0
        return capsys.readouterr().out

    choices = json.loads(shown("--json"))["choices"]
    assert [bool(row["dominated_by"]) for row in choices] == [False] * (len(choices) - 1) + [True], "the beaten one is last"

    def rows(text: str) -> set[str]:
        return {row["cluster"] for row in choices if re.search(rf"^\W*{re.escape(row['cluster'])}\s", text, re.MULTILINE)}

    best = {row["cluster"] for row in choices if not row["dominated_by"]}
    assert rows(shown()) == best < {row["cluster"] for row in choices} == rows(shown("--dominated"))


def test_all_choices_are_told_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    """One A10G is too small for the model, and beside eight A100s it is of little use."""
    asked = ["--model", "gpt-2.6b", "--cluster", "1xp4d.24xlarge+1xg5.xlarge", "--global-batch", "8", "--micro-batches", "1"]
    assert run(["pareto", *asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = [row["cluster"] for row in (*told["choices"], *told["left_out"])]
    assert sorted(names) == ["1xg5.xlarge", "1xp4d.24xlarge", "1xp4d.24xlarge+1xg5.xlarge"]
    [small] = [row for row in told["left_out"] if row["cluster"] == "1xg5.xlarge"]
    assert "fits on" in small["reason"]
    assert run(["pareto", *asked]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"left out ({len(told['left_out'])}): " in shown and "1xg5.xlarge: no " in shown


def test_every_choice_has_a_plan_or_a_reason_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--all`, on the screen and under FASOP's columns: what has no plan says whether memory, its bound or a part of it is why."""
    assert run(["pareto", *POOL, "--steps", "100", "--all", "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader((tmp_path / "out" / "clusters.csv").open()))
    names = {row["cluster"]: row for row in (*told["choices"], *told["left_out"])}
    assert len(rows) == len(names) == 5
    for row in rows:
        placement = json.loads(row["node placement"].replace("'", '"'))
        name = "+".join(f"{placement.count(node)}x{node}" for node in dict.fromkeys(placement))
        one = names[name]
        assert row["is_oom"] == str(one.get("status") == "out of memory")
        if row["mbs"]:
            assert float(row["estimated time (s/step)"]) == one["time_s"] and float(row["train_cost"]) == one["usd"]
            assert int(row["pp"]) == one["pp"] == len(json.loads(row["partition"])) and sum(json.loads(row["partition"])) == 10 + 2
            assert row["status"] == (f"dominated by {one['dominated_by']}" if one["dominated_by"] else "worth having")
        else:
            assert row["status"] == one["status"] in ("out of memory", "bounded out", "dominated") and row["reason"] == one["reason"]
    asked = ["--model", "gpt-2.6b", "--cluster", "1xp4d.24xlarge+1xg5.xlarge", "--global-batch", "8", "--micro-batches", "1"]
    assert run(["pareto", *asked, "--all"]) == 0
    assert re.search(r"1xg5\.xlarge\s.*out of memory", capsys.readouterr().out)


def test_nodes_may_be_called_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are no paths, no formulas of the chart, and two that look alike as files are two files."""
    nodes = [
        {"name": name, "device": "a100-40gb", "gpus": 1, "price_usd_per_h": price}
        for name, price in (("x/../../y", 1.0), ("x .. y", 1.2), ("$\\frac{$", 0.5))
    ]
    (tmp_path / "pool.yaml").write_text(json.dumps({"nodes": nodes}), encoding="utf-8")
    out = tmp_path / "deep" / "out"
    asked = ["--model", "gpt-tiny", "--cluster", str(tmp_path / "pool.yaml"), "--global-batch", "4", "--micro-batches", "1"]
    assert run(["pareto", *asked, "--steps", "10", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = [row for row in told["choices"] if not row["dominated_by"]]
    plans = [path for path in out.iterdir() if path.suffix == ".json" and path.name != "pareto.json"]
    assert len(plans) == len(best) and sorted(path.name for path in tmp_path.iterdir()) == ["deep", "pool.yaml"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert sorted(read_plan(path).predicted.time_s for path in plans) == sorted(row["time_s"] for row in best)  # type: ignore[union-attr]
    assert _file_names(["1xx/../../y", "1xX .. y", "2x$", "2x€"]) == ["1xx_.._.._y.json", "1xX_.._y.json", "2x_.json", "2x_.2.json"]
    assert _file_names(["1xa/b", "1xA b"]) == ["1xa_b.json", "1xA_b.2.json"]
    assert all(len(name) < 200 for name in _file_names(["n" * 1000] * 3))


def test_money_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    def searched(objective: str) -> dict:
        # A simpler plan that is as fast as costs can tell would be offered first.
        assert run(["search", *POOL, "--steps", "100", "--objective", objective, "--strict", "--json", "--top", "1"]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]

    assert run(["pareto", *POOL, "--steps", "100", "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["choices"]
    fast, cheap = searched("time"), searched("cost")
    assert cheap["total_usd"] == pytest.approx(min(offer["usd"] for offer in offers))
    assert fast["hours"] == pytest.approx(min(offer["hours"] for offer in offers), rel=0.01)
    assert cheap["total_usd"] < 0.99 * fast["total_usd"] and fast["hours"] < 0.99 * cheap["hours"]  # the two are not the same
    limit = (cheap["total_usd"] + fast["total_usd"]) / 2
    within = searched(f"time@cost<={limit}")
    assert within["total_usd"] <= limit and within["hours"] == pytest.approx(min(o["hours"] for o in offers if o["usd"] <= limit))


def test_a_limit_that_cannot_be_met_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", *POOL, "--steps", "100", "--objective", "time@cost<=0.0001"]) == 3
    assert "the cheapest takes" in " ".join(capsys.readouterr().err.split())
    assert run(["search", *POOL, "--steps", "100", "--objective", "cost@time<=0.000001"]) == 3
    assert "the fastest takes" in " ".join(capsys.readouterr().err.split())
