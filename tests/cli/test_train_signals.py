"""Real signals to real `penstock train` processes: the step that runs ends, a checkpoint is written, and the curve goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.interrupts import _SAME_S
from penstock.runtime.telemetry.steps import read_steps

ENDLESS = 3_000
"""Steps of a run that somebody must end; one that is left behind because the tests were killed ends by itself after minutes."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "data").symlink_to(data)
    write_plan(folder / "plan.json", uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, pp=2, layout="packed"))
    return folder


def command(folder: Path, run: Path, steps: int, *options: str, launcher: tuple[str, ...] = ()) -> list[str]:
    given = [str(folder / "plan.json"), "--data", str(folder / "data"), "--steps", str(steps), "--out", str(run)]
    return [sys.executable, *launcher, "-m", "penstock.cli.main", "train", *given, *options]


def processes_of(session: int) -> set[int]:
    """The living processes of a session."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(own) == session and state != "Z":
            found.add(int(path.parent.name))
    return found


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when it holds; if it never does, the time-out of the test ends the wait."""
    while not condition():
        time.sleep(0.02)


@contextmanager
def begun(arguments: list[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a session of its own that has done some steps; nothing of the session is left behind."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        lines = run / "steps.jsonl"
        eventually(lambda: process.poll() is not None or (lines.exists() and lines.read_bytes().count(b"\n") >= 3))
        assert process.poll() is None, process.communicate()[1]
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def losses_of(run: Path) -> list[float | None]:
    return [record.loss for record in read_steps(run / "steps.jsonl")]


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begun(command(folder, run, ENDLESS), run) as process:
        os.killpg(process.pid, signal.SIGINT)
        told, err = process.communicate(timeout=250)
    assert process.returncode == 130, err
    done = len(losses_of(run))
    assert f"SIGINT ended the run after {done} of {ENDLESS} steps" in err and f"go on from there with --resume '{run}'" in err
    assert "Traceback" not in err and f"trained {done} steps" in told
    eventually(lambda: not processes_of(process.pid))
    assert Checkpoint(find_checkpoint(run)).step == done
    for out, options in ((run, ("--resume", str(run))), (tmp_path / "straight", ())):
        assert main.run(command(folder, out, done + 2, *options)[3:]) == 0
    assert len(losses_of(run)) == done + 2 and losses_of(run) == pytest.approx(losses_of(tmp_path / "straight"), rel=1e-5)


def test_a_second_one_ends_at_once(folder: Path, tmp_path: Path) -> None:
    """Also while a step never ends, here because its processes are stopped."""
    run = tmp_path / "run"
    with begun(command(folder, run, ENDLESS), run) as process:
        workers = [pid for pid in processes_of(process.pid) if Path(f"/proc/{pid}/comm").read_text().startswith("rank ")]
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None and any("ends after this step" in line for line in process.stderr)
        time.sleep(1.5 * _SAME_S)  # one that comes sooner is the same
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=250)
    assert process.returncode == 143 and "SIGTERM: the run ends at once" in err and "Traceback" not in err
    eventually(lambda: not processes_of(process.pid))
    assert not list((run / "checkpoints").glob("save-*"))


def test_sigterm_under_torchrun(folder: Path, tmp_path: Path) -> None:
    """As a batch system sends it, to torchrun and to its processes, who then get it from torchrun too."""
    run = tmp_path / "run"
    with begun(command(folder, run, ENDLESS, "--planners", "0", launcher=TORCHRUN), run) as process:
        ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        assert len(ranks) == 2
        for pid in (*ranks, process.pid):
            os.kill(pid, signal.SIGTERM)
        _, err = process.communicate(timeout=250)
    done = len(losses_of(run))
    assert err.count(f"SIGTERM ended the run after {done} of {ENDLESS} steps") == 1, err
    eventually(lambda: not any(processes_of(pid) for pid in ranks))
    assert Checkpoint(find_checkpoint(run)).step == done
