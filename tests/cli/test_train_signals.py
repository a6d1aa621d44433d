"""Real signals to `penstock train` and its processes: the step that runs ends, a checkpoint is written, the curve goes on from there."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from free_ports import free_port
from warm_launchers import Launched, launched

from penstock.cli import main
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.interrupts import _SAME_S
from penstock.runtime.telemetry.steps import read_steps
from penstock.stores.sealing import KEY_VARIABLE

ENDLESS = 3_000
"""Steps of a run that somebody must end; one that is left behind because the tests were killed ends by itself after minutes."""


@pytest.fixture(scope="module")
def folder(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "data").symlink_to(data)
    write_plan(folder / "plan.json", uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, pp=2, layout="packed"))
    return folder


def command(folder: Path, run: Path, steps: int, *options: str) -> list[str]:
    return ["train", str(folder / "plan.json"), "--data", str(folder / "data"), "--steps", str(steps), "--out", str(run), *options]


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when it holds; if it never does, the time-out of the test ends the wait."""
    while not condition():
        time.sleep(0.02)


@contextmanager
def begun(folder: Path, run: Path, *options: str, ranks: int = 0) -> Iterator[list[Launched]]:
    """A run in a session of its own that has done some steps; or so many processes of one, as torchrun starts them."""
    given, lines = command(folder, run, ENDLESS, *options), run / "steps.jsonl"
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks else {}
    with ExitStack() as stack:
        found = []
        for rank in range(max(1, ranks)):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
            found.append(stack.enter_context(launched(given, run.parent, f"rank-{rank}", **job, **own)))
        eventually(lambda: found[0].status is not None or (lines.exists() and lines.read_bytes().count(b"\n") >= 3))
        assert found[0].status is None, found[0].ended()
        yield found


def losses_of(run: Path) -> list[float | None]:
    return [record.loss for record in read_steps(run / "steps.jsonl")]


def test_ctrl_c_leaves_a_checkpoint_to_go_on_from(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with begun(folder, run) as (launcher,):
        os.killpg(launcher.pid, signal.SIGINT)
        told, err = launcher.ended()
    assert launcher.status == 130, err
    done = len(losses_of(run))
    assert f"SIGINT ended the run after {done} of {ENDLESS:,} steps" in err and f"go on from there with `--resume {run}`" in err
    assert "Traceback" not in err and f"trained {done} steps" in told
    eventually(lambda: not launcher.session())
    assert Checkpoint(find_checkpoint(run)).step == done
    for out, options in ((run, ("--resume", str(run))), (tmp_path / "straight", ())):
        assert main.run(command(folder, out, done + 2, *options)) == 0
    assert len(losses_of(run)) == done + 2 and losses_of(run) == pytest.approx(losses_of(tmp_path / "straight"), rel=1e-5)


def test_a_second_one_ends_at_once(folder: Path, tmp_path: Path) -> None:
    """Also while a step never ends, here because its processes are stopped."""
    run = tmp_path / "run"
    with begun(folder, run) as (launcher,):
        workers = [pid for pid in launcher.session() if Path(f"/proc/{pid}/comm").read_text().startswith("rank ")]
        assert len(workers) == 2
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        os.kill(launcher.pid, signal.SIGTERM)
        eventually(lambda: "ends after this step" in launcher.err.read_text())
        time.sleep(1.5 * _SAME_S)  # one that comes sooner is the same
        assert launcher.status is None
        os.kill(launcher.pid, signal.SIGTERM)
        _, err = launcher.ended()
    assert launcher.status == 143 and "SIGTERM: the run ends at once" in err and "Traceback" not in err
    eventually(lambda: not launcher.session())
    assert not list((run / "checkpoints").glob("save-*"))


def test_sigterm_as_processes_of_torchrun_get_it(folder: Path, tmp_path: Path) -> None:
    """From a batch system, and once more from torchrun; they were told what torchrun tells its own."""
    run = tmp_path / "run"
    with begun(folder, run, "--planners", "0", ranks=2) as ranks:
        for _ in range(2):
            for rank in ranks:
                os.kill(rank.pid, signal.SIGTERM)
        err = "".join(rank.ended()[1] for rank in ranks)
    done = len(losses_of(run))
    assert err.count(f"SIGTERM ended the run after {done} of {ENDLESS:,} steps") == 1, err
    assert [rank.status for rank in ranks] == [143, 143] and not any(rank.session() for rank in ranks)
    assert Checkpoint(find_checkpoint(run)).step == done


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_that_waits_for_another_ends_at_once(number: signal.Signals, folder: Path, tmp_path: Path) -> None:
    """It has said whom it waits for, and has nothing to lose."""
    (tmp_path / "two.yaml").write_text("nodes: [{device: cpu, gpus: 1, count: 2, inter: {bandwidth_gb_per_s: 1}}]\n")
    plan = uniform_plan("gpt-tiny", str(tmp_path / "two.yaml"), global_batch=4, micro_batch=2, pp=2, layout="packed", precision="fp32")
    write_plan(tmp_path / "plan.json", plan)
    words = ["train", str(tmp_path / "plan.json"), *command(folder, tmp_path / "run", 3)[2:], "--on-death", "recover", "--node-rank", "1"]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        met = f"127.0.0.1:{silent.getsockname()[1]}"
        with launched([*words, "--master", met], tmp_path, **{KEY_VARIABLE: "5e" * 32}) as node, silent.accept()[0]:
            os.kill(node.pid, number)
            _, err = node.ended()
    assert node.status == 128 + number and "Traceback" not in err
    assert f"this is node 1, which waits for node 0 at {met}" in err
    assert f"{number.name} ended this node while it waited for its first step" in err
