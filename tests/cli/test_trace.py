"""`penstock trace`: runs of several ranks, whole and killed, beside their prediction and without; what is no run is refused."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from warm_launchers import launched

from penstock.cli.main import run
from penstock.cli.trace import _chosen
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.schema import write_plan
from penstock.runtime.request import TrainRequest
from penstock.runtime.telemetry.spans_reader import read_spans
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer

STEPS = 4


def plan_of(**degrees: int) -> Plan:
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout="packed", **degrees)  # type: ignore[arg-type]
    return replace(plan, micro_batching=MicroBatching("packed", "dynamic"))


@pytest.fixture(scope="module")
def trained(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages, dynamic micro-batches, evaluations in between."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    PlanTrainer(TrainRequest(plan_of(pp=2), data, STEPS, str(folder), eval_every=2, eval_batches=1)).train()
    return folder


@pytest.fixture
def a_run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def events(path: Path) -> list[dict[str, Any]]:
    raw = path.read_bytes()
    found: list[dict[str, Any]] = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)["traceEvents"]
    return found


def named(trace: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Names of all slices of each process."""
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    return {name: [event["name"] for event in trace if event["ph"] == "X" and event["pid"] == pid] for pid, name in names.items()}


@pytest.mark.parametrize("file", ["t.json", "t.json.gz"])
def test_predicted_beside_measured(a_run: Path, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batches of each step are the ones that ran, although they differ from step to step; evaluations are left out."""
    assert run(["trace", str(a_run), "--out", str(tmp_path / file)]) == 0
    told = capsys.readouterr().out
    assert "steps 0 to 3 of 0 to 3" in told and "predicted beside measured" in told
    found = named(events(tmp_path / file))
    assert list(found) == ["rank 0", "rank 0 predicted", "rank 1", "rank 1 predicted"]
    for rank in (0, 1):
        passes = [
            sorted(name for name in found[who] if name[0] in "FB" and name[1:].isdecimal())
            for who in (f"rank {rank}", f"rank {rank} predicted")
        ]
        assert passes[0] == passes[1] and len(passes[0]) >= 2 * STEPS


def test_slices_of_a_track_do_not_overlap(a_run: Path, tmp_path: Path) -> None:
    assert run(["trace", str(a_run), "--out", str(tmp_path / "t.json")]) == 0
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events(tmp_path / "t.json"):
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(("asked", "steps"), [("2", [2]), ("1-2", [1, 2]), ("0-3", [0, 1, 2, 3])])
def test_some_steps(a_run: Path, tmp_path: Path, asked: str, steps: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["trace", str(a_run), "--out", str(tmp_path / "t.json"), "--steps", asked, "--measured-only", "--json"]
    assert run(given) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == steps and not told["predicted"] and [row["rank"] for row in told["ranks"]] == [0, 1]
    assert all(row["compute"] + row["wait"] + row["transfer"] + row["idle"] == pytest.approx(1, abs=1e-6) for row in told["ranks"])
    trace = events(tmp_path / "t.json")
    assert sorted({event["name"] for event in trace if event["ph"] == "i"}) == [f"iteration {step}" for step in steps]
    found = named(trace)
    assert list(found) == ["rank 0", "rank 1"]
    for own in found.values():  # one update closes each step
        assert own.count("Step") == len(steps)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--steps", "9"), "step 9 was not run. Run 'RUN' has steps 0 to 3"),
        (("--steps", "2-7"), "step 7 was not run"),
        (("--steps", "3-1"), "ends before it begins"),
        (("--steps", "two"), "a step such as 3"),
        (("--steps", "-1"), "a step such as 3"),
    ],
)
def test_steps_that_are_not_there(
    a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], told: str
) -> None:
    assert run(["trace", str(a_run), "--out", str(tmp_path / "t.json"), *options]) == 2
    assert told.replace("RUN", str(a_run)) in capsys.readouterr().err and not (tmp_path / "t.json").exists()


def test_folders_that_are_no_runs(a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "t.json")]
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        assert run(["trace", str(folder), *out]) == 2
        assert "is not the folder of a run: it has no plan.json" in capsys.readouterr().err
    for path in a_run.glob("*.spans"):
        header = path.read_bytes().partition(b"\n")[0] + b"\n"
        path.write_bytes(header)
    assert run(["trace", str(a_run), *out]) == 2
    assert "has not begun its first step" in capsys.readouterr().err
    for path in a_run.glob("*.spans"):
        path.unlink()
    assert run(["trace", str(a_run), *out]) == 2
    assert "holds no span files" in capsys.readouterr().err


def test_without_the_data_there_is_no_prediction(a_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The measured part is there all the same; so it is where the run does not say which data it had."""
    facts = json.loads((a_run / "run.json").read_text())
    shutil.rmtree(a_run / "inputs", ignore_errors=True)  # as of an earlier version, or of data with too many samples
    wrong = {
        json.dumps({**facts, "data": str(tmp_path / "gone")}): "holds no prepared data",
        "[]": "is not version 1 of 'penstock-run'",
        json.dumps({**facts, "data": 3}): "Expected `str`",
        "": "run.json' is not valid JSON",
    }
    for text, problem in wrong.items():
        (a_run / "run.json").write_text(text)
        assert run(["trace", str(a_run), "--out", str(tmp_path / "t.json"), "--json"]) == 0
        found = capsys.readouterr()
        assert not json.loads(found.out)["predicted"] and found.err.startswith("note: without a prediction") and problem in found.err
        assert list(named(events(tmp_path / "t.json"))) == ["rank 0", "rank 1"]


def test_ranks_of_an_earlier_run_are_left_out(a_run: Path, tmp_path: Path) -> None:
    shutil.copy(a_run / "rank-00001.spans", a_run / "rank-00002.spans")
    header, _, body = (a_run / "rank-00002.spans").read_bytes().partition(b"\n")
    (a_run / "rank-00002.spans").write_bytes(json.dumps({**json.loads(header), "rank": 2}).encode() + b"\n" + body)
    assert run(["trace", str(a_run), "--out", str(tmp_path / "t.json")]) == 0
    assert "rank 2" not in named(events(tmp_path / "t.json"))


def test_a_run_that_was_killed(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    write_plan(tmp_path / "plan.json", plan_of(pp=2))
    command = ["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "100000", "--out", str(folder)]
    with launched(command, tmp_path) as launcher:
        while not ((folder / "steps.jsonl").is_file() and len(read_steps(folder / "steps.jsonl")) > 4):
            assert launcher.status is None, launcher.ended()
            time.sleep(0.1)
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.ended()
        while launcher.session():  # ranks may live and write a moment longer than who launched them
            time.sleep(0.02)
    with open(folder / "rank-00001.spans", "ab") as file:
        file.write(b"\x02\x00\x01")  # as if killed within a record
    last = max(read_spans(folder / "rank-00000.spans").iterations)
    assert run(["trace", str(folder), "--out", str(tmp_path / "t.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["predicted"] and len(told["steps"]) >= 3 and last in told["steps"]


def test_the_last_steps_are_shown_unless_others_are_asked_for() -> None:
    known = [*range(20), *range(30, 45)]
    assert _chosen("", known, Path("run")) == list(range(35, 45)) and _chosen("", known[:4], Path("run")) == [0, 1, 2, 3]
    assert _chosen("18-31", known, Path("run")) == [18, 19, 30, 31]
