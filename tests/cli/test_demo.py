"""`penstock demo`: runs anywhere, twice, and leaves a profile and a valid plan."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path

import pytest
from pty_runs import cut_lines, on_terminal, screen_lines

from penstock.cli.main import run
from penstock.plans.schema import read_plan
from penstock.reports.blocks import Facts
from penstock.reports.report import report_of

SMALL = "family: gpt\nlayers: 2\nhidden: 64\nheads: 4\nseq_length: 256\nvocab: 2048\ndtype: fp32\n"


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is measured in seconds, and as many of these as it takes: what a budget leaves out, a second run would measure."""
    (tmp_path / "small.yaml").write_text(SMALL, encoding="utf-8")
    demo = import_module("penstock.cli.demo")
    monkeypatch.setattr(demo, "_MODEL", str(tmp_path / "small.yaml"))
    monkeypatch.setattr(demo, "_BUDGET_S", math.inf)
    monkeypatch.setattr(demo, "_MOVING_STEPS", 20)


@pytest.mark.usefixtures("quick")
def test_the_demo_runs_and_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    assert run(["demo", "--out", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    profile, plan = folder / "profile.json", folder / "plan.json"
    assert told["profile"] == str(profile) and told["plan"] == str(plan)
    assert sorted(entry.name for entry in folder.iterdir()) == ["data", "moving", "plan.json", "profile.json", "report.html", "run"]
    assert len(told["losses"]) == 6 and told["losses"][-1] < told["losses"][0]
    assert "rank 2 has computed 3x slower than the others since step 10" in told["events"][0]
    assert "is in force from step" in told["events"][-1]
    assert told["report"] == str(folder / "report.html")
    [trained, moved] = report_of([folder / "run", folder / "moving"]).subjects
    facts = {fact.label: fact.value for view in trained.views for block in view.blocks if isinstance(block, Facts) for fact in block.facts}
    assert facts["loss"] == told["losses"][-1] and facts["predicted"] > 0 and told["events"][0] in str(moved.views[-1])
    first, written = profile.read_bytes(), read_plan(plan)
    assert written.predicted is not None and written.predicted.time_s == told["plans"][0]["time_s"]
    assert all(row["tp"] == 1 for row in told["plans"])

    demo = import_module("penstock.cli.demo")
    monkeypatch.setattr(demo, "_STEPS", 3)
    monkeypatch.setattr(demo, "_MOVING_STEPS", 12)  # two slow ones, after which nobody moves yet
    status, said = on_terminal(["demo", "--out", str(folder)], 80)
    shown = " ".join(" ".join(screen_lines(said)).split())
    assert status == 0 and cut_lines(said, 80) == []
    assert profile.read_bytes() == first and read_plan(plan) == written
    assert "one micro-batch on each stage, predicted and measured" in shown and "the largest cause of the" in shown
    assert "while rank 2 was slow, and" in shown
    assert "demo/report.htmlinabrowser" in shown.replace(" ", "")  # wherever the line was broken
    assert "What to try next" in shown and "one iteration" in shown and "profile:h200-141gb" in shown
    assert run(["check", str(plan)]) == 0 and run(["explain", str(plan)]) == 0


def test_a_file_that_is_no_profile_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"mine": 1}', encoding="utf-8")
    assert run(["demo", "--out", str(tmp_path)]) == 2
    assert "is not a profile" in capsys.readouterr().err
    assert path.read_text(encoding="utf-8") == '{"mine": 1}' and len(list(tmp_path.iterdir())) == 1
