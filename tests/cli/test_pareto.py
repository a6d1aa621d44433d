"""`penstock pareto` and the money objectives of `penstock search`: what is bought, what is beaten, and what cannot be had."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.plans.schema import read_plan

POOL = ["--model", "gpt-350m", "--cluster", "1xp3.8xlarge+2xg5.12xlarge", "--global-batch", "16", "--micro-batches", "1,4"]


def test_undominated_choices_with_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pareto", *POOL, "--steps", "100", "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = [row for row in told["choices"] if not row["dominated_by"]]
    assert best
    for row in best:
        others = [other for other in told["choices"] if other is not row]
        assert not any(
            other["hours"] <= row["hours"] and other["usd"] <= row["usd"] and other["devices"] < row["devices"] for other in others
        )
        plan = read_plan(tmp_path / "out" / f"{row['cluster'].replace('+', '_')}.json")
        assert plan.predicted is not None and plan.predicted.time_s == row["time_s"]
    rows = list(csv.DictReader((tmp_path / "out" / "pareto.csv").open()))
    assert len(rows) == len(told["choices"]) and (tmp_path / "out" / "pareto.svg").stat().st_size > 1000


def test_money_objectives(capsys: pytest.CaptureFixture[str]) -> None:
    def searched(objective: str) -> dict:
        assert run(["search", *POOL, "--steps", "100", "--objective", objective, "--json", "--top", "1"]) == 0
        return json.loads(capsys.readouterr().out)["plans"][0]

    fast, cheap = searched("time"), searched("cost")
    assert cheap["total_usd"] <= fast["total_usd"] * (1 + 1e-9)
    within = searched(f"time@cost<={cheap['total_usd'] * 1.2}")
    assert within["total_usd"] <= cheap["total_usd"] * 1.001


def test_a_limit_that_cannot_be_met_says_what_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", *POOL, "--steps", "100", "--objective", "time@cost<=0.0001"]) == 3
    assert "the cheapest takes" in " ".join(capsys.readouterr().err.split())
    assert run(["search", *POOL, "--steps", "100", "--objective", "cost@time<=0.000001"]) == 3
    assert "the fastest takes" in " ".join(capsys.readouterr().err.split())
