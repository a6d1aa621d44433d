"""The folder of a run: no other run is overwritten, and no two train into it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.runtime.request import PlanningSettings, TrainRequest
from penstock.runtime.run_folder import own_folder, read_request, safe_step
from penstock.runtime.run_lock import run_lock
from penstock.runtime.settings import TrainingSettings


def request_of(out: Path, **more: object) -> TrainRequest:
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=8)
    return replace(TrainRequest(plan, "data", 4, str(out)), **more)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def add_checkpoint(out: Path, name: str = "save-000001-step-3") -> Path:
    folder = out / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with own_folder(request_of(out)):
        pass
    with own_folder(request_of(out)):  # the one before ended without a step: nothing to lose
        (out / "steps.jsonl").write_text('{"step":0}\n')
    before = contents(out)
    with pytest.raises(InputError, match="steps, but no checkpoint") as refused, own_folder(request_of(out, steps=9)):
        pass
    assert "--resume" not in str(refused.value) and f"--out {out}-2" in str(refused.value)
    add_checkpoint(out)
    before = contents(out)
    with pytest.raises(InputError, match=r"holds a run already \(checkpoints up to save-000001-step-3\)") as refused:
        own_folder(request_of(out, steps=9)).__enter__()
    assert f"--resume {out}" in str(refused.value) and f"--out {out}-2" in str(refused.value)
    assert contents(out) == before and read_request(out).steps == 4


def test_the_same_run_goes_on_and_another_does_not(tmp_path: Path) -> None:
    out, other = tmp_path / "run", tmp_path / "other"
    own, foreign = add_checkpoint(out), add_checkpoint(other)
    with own_folder(request_of(out, steps=9, resume=str(own))):
        assert read_request(out).steps == 9
    with pytest.raises(InputError, match="holds a run already"):
        own_folder(request_of(out, resume=str(foreign))).__enter__()


def test_what_decides_batches_is_read_back(tmp_path: Path) -> None:
    """Reports and traces of a run draw the same samples again, and count the same labels."""
    planning = PlanningSettings(search_steps=3)
    asked = request_of(tmp_path / "run", steps=7, settings=TrainingSettings(seed=5), prompt_loss=True, planning=planning)
    with own_folder(asked):
        found = read_request(tmp_path / "run")
    assert (found.plan, found.steps, found.data) == (asked.plan, 7, str(Path(asked.data).resolve()))
    assert (found.settings.seed, found.prompt_loss, found.planning.search_steps) == (5, True, 3)


def test_what_is_safe_after_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert "nothing to go on from" in safe_step(request_of(out), 0)
    assert "Step 7 is safe" in (told := safe_step(request_of(out, resume="other/save"), 7)) and told.endswith("--resume other/save")
    add_checkpoint(out)
    told = safe_step(request_of(out, resume="other/save"), 2)
    assert "Step 3 is safe" in told and told.endswith(f"--out {out} --resume {out}")


HOLD = """
import sys, time
from pathlib import Path
from penstock.runtime.run_lock import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(1000)
"""


def test_two_runs_at_once(tmp_path: Path) -> None:
    """The lock names its holder, and dies with it, killed or not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=rf"is in use: process {holder.pid} on .*, started 2"):
            own_folder(request_of(tmp_path)).__enter__()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with (tmp_path / "lock").open("a") as lock:
        lock.write("what a holder with a long name has said\n" * 20)
    for _ in range(2):
        with run_lock(tmp_path):
            (told,) = (tmp_path / "lock").read_text().splitlines()  # of those before nothing
            assert told.startswith(f"process {os.getpid()} on")
