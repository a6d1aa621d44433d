"""`penstock events`: what a run noticed and decided, as lines, as JSON, and while it goes on."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from pty_runs import cut_lines, on_terminal, screen_lines

from penstock.adapting.detecting import Cause, Change
from penstock.adapting.events import EVENTS, RunEvent, noticed
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.run_lock import run_lock
from penstock.runtime.telemetry.steps import LineLog

SLOW = Change(Cause.COMPUTE, (2,), 1.53, 1.0, 40, 45)
DATA = Change(Cause.DATA, (1,), 1.5, 1.0, 50, 56)
ALIKE = Change(Cause.COSTS, (), 0.5, 1.0, 10, 59)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run that was watched and noticed nothing."""
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2))
    LineLog(tmp_path / EVENTS, anew=True).close()
    return tmp_path


def write(folder: Path, *changes: Change) -> None:
    log = LineLog(folder / EVENTS)
    for change in changes:
        log.write(noticed(change, 1e9))
    log.close()


def test_events_fit_a_terminal_and_say_who_what_and_when(folder: Path) -> None:
    write(folder, SLOW, DATA, ALIKE)
    status, shown = on_terminal(["events", str(folder)], 80)
    assert status == 0 and cut_lines(shown, 80) == [] and max(map(len, screen_lines(shown))) <= 80
    told = " ".join(" ".join(screen_lines(shown)).split())
    for wanted in ("step 45 ", "rank 2 has computed 1.53x slower than the others since step 40",
                   "rank 1 has waited for samples, and its steps took 1.5x as long, since step 50",
                   "all ranks have computed 2x faster than the costs say since step 10; no plan would help"):  # fmt: skip
        assert wanted in told


def test_events_as_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, SLOW)
    assert run(["events", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["watched"] and len(found["events"]) == 1
    event = found["events"][0]
    assert (event["event"], event["cause"], event["ranks"], event["factor"], event["since"]) == ("noticed", "compute", [2], 1.53, 40)


def test_events_are_followed_until_the_run_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, SLOW)

    def train() -> None:
        with run_lock(folder):
            held.set()
            write(folder, DATA)
            time.sleep(0.1)

    held = threading.Event()
    other = threading.Thread(target=train)
    other.start()
    held.wait(250)
    assert run(["events", str(folder), "--follow"]) == 0
    other.join(250)
    assert capsys.readouterr().out.count("noticed") == 2


def test_followed_events_are_an_object_in_each_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, SLOW, DATA, ALIKE)
    assert run(["events", str(folder), "--follow", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["cause"] for event in found] == ["compute", "data", "costs"]


def test_a_calm_run_an_unwatched_one_and_none_at_all(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", str(folder)]) == 0
    assert "nothing has been noticed" in capsys.readouterr().err
    (folder / EVENTS).unlink()
    assert run(["events", str(folder)]) == 0
    assert "was not watched" in capsys.readouterr().err
    assert run(["events", str(tmp_path / "nowhere")]) == 2
    assert "is not the folder of a run" in " ".join(capsys.readouterr().err.split())


def test_a_damaged_line_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ('{"event": 3}', '{"event": "noticed", "step": 1, "time_s": 1e300, "text": ""}'):
        (folder / EVENTS).write_text(wrong + "\n", encoding="utf-8")
        assert run(["events", str(folder)]) == 2
        assert "line 1" in capsys.readouterr().err


def test_text_from_elsewhere_does_not_reach_the_terminal_raw(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = LineLog(folder / EVENTS)
    log.write(RunEvent("noticed", 1, 1e9, "rank \x1b[2J"))
    log.close()
    assert run(["events", str(folder)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_way_to_adapt_that_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", "nowhere", "--steps", "3", "--out", str(folder / "run"), "--adapt", "on"]
    assert run(["train", str(folder / "plan.json"), *options]) == 2
    assert "off, watch or move was expected" in " ".join(capsys.readouterr().err.split()) and not (folder / "run").exists()
