"""`penstock replan`: what becomes of a request, and runs that nobody would answer for."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pty_runs import cut_lines, on_terminal, screen_lines

from penstock.adapting import asking
from penstock.adapting.asking import asked_for, withdraw
from penstock.adapting.events import EVENTS, aborted, asked, moved
from penstock.adapting.moving import MoveAbortedError
from penstock.cli.main import run
from penstock.errors import InfeasibleError, InputError, PenstockError
from penstock.files import write_json
from penstock.plans.build import uniform_plan
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.run_lock import run_lock
from penstock.runtime.telemetry.steps import LineLog


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2))
    write_plan(tmp_path / "other.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, tp=2))
    return tmp_path


@contextmanager
def job(folder: Path, error: PenstockError | None, answers: bool = True) -> Iterator[None]:
    """Holds the run's folder as a job does, and answers the first request; or ends without a word."""

    def work() -> None:
        with run_lock(folder):
            held.set()
            while (request := asked_for(folder)) is None:
                time.sleep(0.01)
            if answers:
                log = LineLog(folder / EVENTS)
                log.write(asked(7, 1e9, request.at, request.id))
                log.write(moved(9, 1e9, 5_000_000, 0.25, "as asked", request.id) if error is None else aborted(9, 1e9, error, request.id))
                log.close()
                withdraw(folder)

    held = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert held.wait(250)
    yield
    thread.join(250)


def test_a_job_that_moves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(folder, None):
        status, said = on_terminal(["replan", str(folder), "--plan", str(folder / "other.json"), "--at", "9"], 80)
    told = " ".join(" ".join(screen_lines(said)).split())
    assert status == 0 and cut_lines(said, 80) == [] and "was asked to move to another plan before step 9" in told
    assert "another plan (as asked) is in force from step 9 on: 5 MB travelled, training stood still for 0.25 s" in told
    with job(folder, None):
        assert run(["replan", str(folder), "--plan", str(folder / "other.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["moved_bytes"], found["pause_s"]) == (9, 5_000_000, 0.25)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError("global_batch is 4."), 2), (InfeasibleError("no room to move."), 3), (MoveAbortedError("process 1 failed."), 1)],
)
def test_a_job_that_stays(folder: Path, capsys: pytest.CaptureFixture[str], error: PenstockError, status: int) -> None:
    with job(folder, error):
        assert run(["replan", str(folder), "--plan", str(folder / "other.json")]) == status
    assert f"the plan stays as it is: {error}" in capsys.readouterr().err


def test_a_job_that_ends_before_it_moves(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with job(folder, None, answers=False):
        assert run(["replan", str(folder), "--plan", str(folder / "other.json")]) == 1
    assert "ended before it moved" in capsys.readouterr().err and asked_for(folder) is None


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit(128 + signal.SIGTERM)])
def test_who_does_not_wait_for_the_answer_takes_the_request_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException | type[BaseException]
) -> None:
    """Ctrl-C and SIGTERM, as `penstock` raises them."""
    seen = list[bool]()

    def end_it(pause_s: float) -> None:
        seen.append(asked_for(folder) is not None)
        raise end

    monkeypatch.setattr("penstock.cli.replan.time.sleep", end_it)
    with run_lock(folder):
        assert run(["replan", str(folder), "--plan", str(folder / "other.json")]) > 128
    assert seen == [True] and asked_for(folder) is None


def test_of_two_who_ask_at_once_one_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for an answer to what nobody has read."""
    plan, first = read_plan(folder / "other.json"), list[str]()

    def write(path: Path, value: object) -> None:
        if not first:
            first.append("")
            first[0] = asking.ask_for(folder, plan)
        write_json(path, value)

    monkeypatch.setattr(asking, "write_json", write)
    with pytest.raises(InputError, match="has been asked for a move that is still to come"):
        asking.ask_for(folder, plan, 9)
    found = asked_for(folder)
    assert found is not None and [found.id] == first
    assert sorted(path.name for path in folder.iterdir()) == ["other.json", "plan.json", "replan.json"]


def test_runs_that_nobody_would_answer_for(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, plan: str = "other.json") -> str:
        assert run(["replan", str(path), "--plan", str(folder / plan)]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "is not the folder of a run" in refused(folder / "nowhere")
    assert "is not running on this machine" in refused(folder)
    with run_lock(folder):
        assert "nowhere.json" in refused(folder, "nowhere.json")
        own = os.geteuid()
        monkeypatch.setattr("os.geteuid", lambda: own + 1)
        assert f"belongs to user {own}, and you are user {own + 1}" in refused(folder)
    assert asked_for(folder) is None
