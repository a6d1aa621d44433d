"""Planners beside real training: killed, hanging, more of them or none, a store that restarts or stays away, a batch that is damaged."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from stores.conftest import require_redis

from penstock.cli import main
from penstock.data import open_data
from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.runtime.request import PlanningSettings, StepTold, TrainRequest
from penstock.runtime.settings import LearningRate, TrainingSettings
from penstock.runtime.trainer import Trainer
from penstock.runtime.workers import WorkerError
from penstock.stores.addresses import connect
from penstock.stores.server import RedisServer, start_redis

pytestmark = pytest.mark.timeout(480)
"""Two whole commands, each of which starts processes that import torch, take minutes on a machine that has ten other things to do."""

STEPS, BATCH = 26, 16
SETTINGS = TrainingSettings(LearningRate(2e-3))


@dataclass(frozen=True)
class Case:
    """A plan of two stages with dynamic micro-batches, its data, and the losses of a run in which every rank plans for itself."""

    request: TrainRequest
    losses: list[float]

    def command(self, out: Path, *options: str) -> list[str]:
        """`penstock train` of the same run."""
        given = ["--data", self.request.data, "--steps", str(STEPS), "--out", str(out), "--lr", "2e-3", "--json", *options]
        return [sys.executable, "-m", "penstock.cli.main", "train", f"{self.request.out}/plan.json", *given]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=BATCH, micro_batch=4, layout="packed", pp=2)
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic"))
    request = TrainRequest(plan, str(folder / "data"), STEPS, str(folder / "run"), SETTINGS, planning=PlanningSettings(planners=0))
    return Case(request, list(Trainer(request).train().losses))


def steps_done(out: Path) -> int:
    """Lines of a run's record."""
    path = out / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def planners_of(launcher: int) -> list[int]:
    """The planners that a launcher had forked: children of its children, by their name."""
    found: dict[int, tuple[str, int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = entry.read_text().partition("(")[2].rpartition(")")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
        found[int(entry.parent.name)] = name, int(rest.split()[1])
    return [pid for pid, (name, parent) in found.items() if name.startswith("planner ") and found.get(parent, ("", 0))[1] == launcher]


def run(case: Case, out: Path, at: dict[int, Callable[[int], None]], *options: str) -> subprocess.CompletedProcess[str]:
    """Trains; when so many steps are done, something happens, told of the launcher's process id."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(case.command(out, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        for step, act in sorted(at.items()):
            while steps_done(out) < step and process.poll() is None:
                time.sleep(0.01)
            act(process.pid)
        told, said = process.communicate(timeout=400)
    finally:
        process.kill()
        process.wait()
    return subprocess.CompletedProcess(process.args, process.returncode, told, said)


def test_killed_planners_are_replaced_and_the_losses_stay(case: Case, tmp_path: Path) -> None:
    """Two planners share the work; with none of them, every rank plans for itself."""
    killed: list[int] = []

    def kill(launcher: int) -> None:
        for pid in planners_of(launcher):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    done = run(case, tmp_path / "run", {3: kill}, "--planners", "2")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["losses"] == case.losses and len(killed) == 2
    assert done.stderr.count("died with status -9") == 2 and "Traceback" not in done.stderr


def test_a_hanging_planner_is_replaced_and_the_losses_stay(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(step: StepTold) -> None:
        if step.step == 3:
            for pid in planners_of(os.getpid()):
                os.kill(pid, signal.SIGSTOP)

    planning = PlanningSettings(hang_s=8.0)
    with caplog.at_level(logging.WARNING):
        found = Trainer(replace(case.request, out=str(tmp_path / "run"), planning=planning)).train(told)
    assert list(found.losses) == case.losses
    assert "planner 0 hung at iteration" in caplog.text


@pytest.fixture
def redis() -> Iterator[list[RedisServer]]:
    """Servers in one place, one after the other."""
    require_redis()
    servers = [start_redis()]
    yield servers
    for server in servers:
        server.stop()


def test_a_store_that_restarts_is_survived_and_one_that_stays_away_ends_the_run_with_a_checkpoint(
    case: Case, tmp_path: Path, redis: list[RedisServer]
) -> None:
    def kill(launcher: int) -> None:
        redis[-1].process.kill()
        redis[-1].process.wait()

    def start(launcher: int) -> None:
        redis.append(start_redis(redis[0].host, redis[0].port, password=redis[0].password))

    def restart(launcher: int) -> None:
        kill(launcher)
        start(launcher)

    options = "--store", redis[0].address, "--store-timeout", "8"
    ended = run(case, tmp_path / "run", {3: restart, 8: kill}, *options)
    done = steps_done(tmp_path / "run")
    assert ended.returncode == 1 and 8 <= done < STEPS
    assert "Traceback" not in ended.stderr and ended.stderr.count("error:") == 1 and str(redis[0].password) not in ended.stderr
    said = " ".join(ended.stderr.split())
    assert re.search(r"Redis at 127\.0\.0\.1:\d+ has not answered for 8 s|another rank gets no more programs from the store", said)
    assert f"The run ended after {done} steps. Step {done} is safe. Go on with:" in said and f"--resume '{tmp_path / 'run'}'" in said

    start(0)
    again = run(case, tmp_path / "again", {}, *options, "--resume", str(tmp_path / "run" / "checkpoints"))
    assert again.returncode == 0, again.stderr[-2000:]
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert [*losses, *json.loads(again.stdout)["losses"]] == case.losses
    values = connect(redis[0].address, b"")
    assert values.names("penstock/") == []  # the job took its keys with it
    values.close()


def test_a_planner_without_progress_on_a_store_that_answers_ends_the_run_with_a_checkpoint(case: Case, tmp_path: Path) -> None:
    """The planner is stopped for good, and nobody replaces it in time."""
    out = tmp_path / "run"

    def told(step: StepTold) -> None:
        if step.step == 3:
            for pid in planners_of(os.getpid()):
                os.kill(pid, signal.SIGSTOP)

    with pytest.raises(WorkerError) as ended:
        Trainer(replace(case.request, out=str(out), planning=PlanningSettings(wait_s=8.0))).train(told)
    done, said = steps_done(out), " ".join(str(ended.value).split())
    assert 3 < done < STEPS
    assert re.search(r"nothing came for 8 s in the store at 127|another rank gets no more programs from the store", said)
    assert f"The run ended after {done} steps. Step {done} is safe. Go on with:" in said and f"--resume '{out}'" in said
    assert list((out / "checkpoints").glob(f"*step-{done}"))


def test_a_damaged_sample_is_told_before_anything_starts(case: Case, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(case.request.data, data)
    sample = open_data(data).batches(BATCH, seed=SETTINGS.seed)[5].samples[7]
    index = np.memmap(data / "train_input.idx", np.uint8, "r+")
    index[34:][: 4 * len(open_data(data))].view("<i4")[sample] = -500
    index.flush()
    request = replace(case.request, data=str(data), out=str(tmp_path / "run"), planning=PlanningSettings())
    with pytest.raises(InputError, match=r"train_input\.idx' is damaged"):
        Trainer(request).train()
    assert not (tmp_path / "run").exists()


def test_two_nodes_share_the_planning(case: Case, tmp_path: Path) -> None:
    """Each node of torchrun starts a planner of its own; odd iterations are planned on one, even ones on the other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "PENSTOCK_LOG_LEVEL": "DEBUG"}
    nodes = []
    for node in range(2):
        where = [
            "--nnodes",
            "2",
            "--node-rank",
            str(node),
            "--nproc-per-node",
            "1",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(port),
        ]
        command = [sys.executable, "-m", "torch.distributed.run", *where, *case.command(tmp_path / "run")[1:]]
        own = {**environment, "PENSTOCK_LOG_DIR": str(tmp_path / f"node{node}")}
        nodes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own))
    try:
        told = [node.communicate(timeout=400) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], told[0][1][-2000:] + told[1][1][-2000:]
    assert json.loads(told[0][0])["losses"] == case.losses and not told[1][0]
    for node in range(2):
        log = (tmp_path / f"node{node}" / f"planner-{node}.log").read_text()
        assert [int(step) for step in re.findall(r"iteration (\d+) planned", log)] == list(range(node, STEPS, 2))


@pytest.mark.parametrize(
    ("option", "value", "status", "message"),
    [
        ("--planners", "-1", 2, "--planners is -1; 0 or more was expected"),
        ("--store", "ftp://there", 2, "store address begins with 'ftp:'"),
        ("--store", "redis://127.0.0.1:1", 1, "does not answer"),
        ("--store-timeout", "-1", 2, "--store-timeout is -1.0; 0 or more was expected"),
        ("--budget-steps", "-1", 2, "--budget-steps is -1"),
    ],
)
def test_what_cannot_plan_a_run(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, value: str, status: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("penstock.stores.redis._FIRST_CONNECT_S", 0.2)
    assert main.run([*case.command(tmp_path / "run", option, value)[3:]]) == status
    assert message in " ".join(capsys.readouterr().err.split()) and steps_done(tmp_path / "run") == 0
