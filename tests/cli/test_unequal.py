"""Replicas of unequal speed on the command line: found, written, checked, explained, simulated, and refused where they cannot be told."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.plans.schema import read_plan

ODD = """\
nodes:
  - {device: a100-40gb, gpus: 3, price_usd_per_h: 9, inter: ethernet-100g}
  - {device: v100-32gb, gpus: 2, price_usd_per_h: 3, inter: ethernet-100g}
  - {device: t4, gpus: 1, price_usd_per_h: 0.5, inter: ethernet-25g}
"""


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine as much is found as on an idle one."""
    monkeypatch.setattr("penstock.search.what_if.BUDGET_S", math.inf)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cluster of three kinds in nodes of three sizes, and the best plan on it."""
    return searched(tmp_path_factory.mktemp("odd"), ODD)


def searched(path: Path, nodes: str) -> Path:
    """The folder with a cluster and the best plan on it."""
    (path / "odd.yaml").write_text(nodes, encoding="utf-8")
    asked = ["--model", "gpt-350m", "--cluster", str(path / "odd.yaml"), "--global-batch", "1022", "--micro-batches", "7,14"]
    assert run(["search", *asked, "--schedules", "1f1b", "--top", "1", "--out", str(path / "plan.json")]) == 0
    return path


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_plan_gives_each_kind_its_share(folder: Path) -> None:
    plan = read_plan(folder / "plan.json")
    shares = plan.micro_batching.per_replica
    assert plan.num_replicas > 1 and len(set(shares)) > 1 and sum(shares) * (plan.micro_batching.samples or 0) == 1022


def test_every_verb_tells_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plan = str(folder / "plan.json"), read_plan(folder / "plan.json")
    most, least = max(plan.micro_batching.per_replica), min(plan.micro_batching.per_replica)
    checked = told(capsys, "check", path)
    assert f"× {most} + " in checked and f"× {least} micro-batches of {plan.micro_batching.samples}" in checked
    assert "being last" in told(capsys, "explain", path)
    simulated = json.loads(told(capsys, "simulate", path, "--json"))
    assert simulated["num_micro_batches"] == plan.micro_batching.per_replica[simulated["replica"]]
    assert simulated["time_s"] == pytest.approx(simulated["predicted_s"], rel=0.05)


def test_what_if_searches_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten times, without the third kind: the best plan leaves it out, and searches of three kinds take several times as long."""
    path = searched(tmp_path, ODD[: ODD.index("  - {device: t4")]) / "plan.json"
    assert len(set(read_plan(path).micro_batching.per_replica)) > 1
    capsys.readouterr()
    found = json.loads(told(capsys, "explain", str(path), "--what-if", "--json"))
    rows = {row["change"]: row for row in found["what_if"]}
    assert rows["twice the memory"]["gain"] >= -1e-9
    assert rows["one more node: 3 × a100-40gb"]["gain"] > 0.2


def test_exports_refuse_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(folder / "plan.json"), "--to", f"megatron:{tmp_path / 'flags'}"]) == 2
    assert "unequal numbers of micro-batches" in " ".join(capsys.readouterr().err.split())
    assert told(capsys, "export", str(folder / "plan.json"), "--to", f"torchrun:{tmp_path / 'run.sh'}") and (tmp_path / "run.sh").is_file()


def test_money_counts_odd_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prime batch divides over no node but the single device; every choice that is worth its money has a plan all the same."""
    asked = ["--model", "gpt-350m", "--cluster", str(folder / "odd.yaml"), "--global-batch", "31", "--steps", "100"]
    found = json.loads(told(capsys, "pareto", *asked, "--json", "--dominated"))
    rows = {row["devices"]: row for row in found["choices"]}
    assert 3 in rows and rows[3]["time_s"] < 0.5 * rows[1]["time_s"]
