"""Planners beside real training: killed, hanging, more of them or none, a store that restarts or stays away, a batch that is damaged."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stores.conftest import require_redis
from torchrun_ranks import run_ranks

from penstock.cli import main
from penstock.data import open_data
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.runtime.planner_processes import Planners
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.settings import LearningRate, TrainingSettings
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import WorkerError
from penstock.stores.addresses import ADDRESS_VARIABLE, StoreFile, connect, write_store_file
from penstock.stores.server import RedisServer, start_redis

STEPS, BATCH = 14, 8
SETTINGS = TrainingSettings(LearningRate(2e-3))


@dataclass(frozen=True)
class Case:
    """A plan of two stages with dynamic micro-batches, its data, and the losses of a run in which every rank plans for itself."""

    request: TrainRequest
    losses: list[float]

    def command(self, out: Path, *options: str) -> list[str]:
        """`penstock train` of the same run."""
        given = ["--data", self.request.data, "--steps", str(STEPS), "--out", str(out), "--lr", "2e-3", "--json", *options]
        return ["train", f"{self.request.out}/plan.json", *given]


def test_what_was_planned_for_ranks_that_have_ended_is_deleted_before_others_begin() -> None:
    """Else a run holds more after each death."""
    done = list[Any]()
    pool: Any = SimpleNamespace(stop=lambda: done.append("stop"), adopt=lambda step, planner: done.append(step) or f"job of {step}")
    planners = Planners(("store", None), pool, SimpleNamespace(purge=lambda: done.append("purge")))  # type: ignore[arg-type]
    planners.adopt(3, None)  # type: ignore[arg-type]
    planners.begin_anew(5, None)  # type: ignore[arg-type]
    assert done == [3, "stop", "purge", 5] and planners.handover == ("store", "job of 5")


@pytest.fixture(scope="module")
def case(data: str, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=BATCH, micro_batch=4, layout="packed", pp=2)
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic"))
    request = TrainRequest(plan, data, STEPS, str(folder / "run"), SETTINGS, planning=PlanningSettings(planners=0))
    return Case(request, list(PlanTrainer(request).train().losses))


def steps_done(out: Path) -> int:
    """Lines of a run's record."""
    path = out / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def own_planners() -> list[int]:
    """The planners that this process had forked, by their name: others may be children of the same server."""
    found = []
    for process in multiprocessing.active_children():
        assert process.pid is not None
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            if Path(f"/proc/{process.pid}/comm").read_text().startswith("planner "):
                found.append(process.pid)
    return found


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    told: str
    said: str


def run(case: Case, out: Path, caught: pytest.CaptureFixture[str], at: dict[int, Callable[[], None]], *options: str) -> Done:
    """Trains; when so many steps are done, something happens."""
    ended = threading.Event()

    def act() -> None:
        for step, action in sorted(at.items()):
            while steps_done(out) < step and not ended.wait(0.01):
                pass
            action()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(act)
        try:
            status = main.run(case.command(out, *options))
        finally:
            ended.set()
        acting.result()
    told, said = caught.readouterr()
    return Done(status, told, said)


def test_killed_planners_are_replaced_and_the_losses_stay(
    case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Two planners share the work; with none of them, every rank plans for itself."""
    killed: list[int] = []

    def kill() -> None:
        for pid in own_planners():
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    done = run(case, tmp_path / "run", capfd, {3: kill}, "--planners", "2")
    assert done.status == 0, done.said[-2000:]
    assert json.loads(done.told)["losses"] == case.losses and len(killed) == 2
    assert caplog.text.count("died with status -9") == 2 and "Traceback" not in done.said


def test_a_hanging_planner_is_replaced_and_the_losses_stay(case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def told(step: StepReport) -> None:
        if step.step == 3:
            for pid in own_planners():
                os.kill(pid, signal.SIGSTOP)

    with caplog.at_level(logging.WARNING):
        found = PlanTrainer(replace(case.request, out=str(tmp_path / "run"), planning=PlanningSettings())).train(told)
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


def kill(servers: list[RedisServer]) -> None:
    servers[-1].process.kill()
    servers[-1].process.wait()


def start(servers: list[RedisServer]) -> None:
    servers.append(start_redis(servers[0].host, servers[0].port, password=servers[0].password))


def test_a_store_that_restarts_is_survived(
    case: Case, tmp_path: Path, redis: list[RedisServer], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, redis[0].address)
    def restart() -> None:
        kill(redis)
        start(redis)

    done = run(case, tmp_path / "run", capfd, {3: restart}, "--store-timeout", "200")
    assert done.status == 0, done.said[-2000:]
    assert json.loads(done.told)["losses"] == case.losses and len(redis) == 2
    values = connect(redis[0].address, b"")
    assert values.names("penstock/") == []  # the job took its keys with it
    values.close()


def test_a_store_that_stays_away_ends_the_run_with_a_checkpoint(
    case: Case, tmp_path: Path, redis: list[RedisServer], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    write_store_file(str(tmp_path / "store.json"), StoreFile(redis[0].address, b"k" * 32))
    store = ("--store", f"file:{tmp_path / 'store.json'}")
    ended = run(case, out, capfd, {5: lambda: kill(redis)}, *store, "--store-timeout", "2")
    files = [path for path in out.rglob("*") if path.is_file()]
    assert files and not any(str(redis[0].password).encode() in path.read_bytes() for path in files)
    done = steps_done(out)
    assert ended.status == 1 and 5 <= done < STEPS
    assert "Traceback" not in ended.said and ended.said.count("error:") == 1 and str(redis[0].password) not in ended.said
    said = " ".join(ended.said.split())
    assert re.search(r"Redis at 127\.0\.0\.1:\d+ has not answered for 2 s|another rank gets no more programs from the store", said)
    assert f"The run ended after {done} steps. Step {done} is safe. Go on with:" in said and f"--resume {out}" in said

    start(redis)
    again = run(case, tmp_path / "again", capfd, {}, *store, "--resume", str(out / "checkpoints"))
    assert again.status == 0, again.said[-2000:]
    losses = [json.loads(line)["loss"] for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [*losses, *json.loads(again.told)["losses"]] == case.losses


def test_a_planner_without_progress_on_a_store_that_answers_ends_the_run_with_a_checkpoint(case: Case, tmp_path: Path) -> None:
    """The planner is stopped, and so is every other that takes its place."""
    out, over = tmp_path / "run", threading.Event()

    def stop_planners() -> None:
        while not over.wait(0.05):
            for pid in own_planners():
                with suppress(ProcessLookupError):  # it was ended, since it was stopped
                    os.kill(pid, signal.SIGSTOP)

    stopper = threading.Thread(target=stop_planners, daemon=True)

    def told(step: StepReport) -> None:
        if step.step == 3:
            stopper.start()

    try:
        with pytest.raises(WorkerError) as ended:
            PlanTrainer(replace(case.request, out=str(out), planning=PlanningSettings(wait_s=250.0))).train(told)
    finally:
        over.set()
    done, said = steps_done(out), " ".join(str(ended.value).split())
    assert 3 < done < STEPS
    why = r"another rank gets no more programs|cannot be planned: its planner hung, 3 times"
    assert re.search(why, said)
    assert f"The run ended after {done} steps. Step {done} is safe. Go on with:" in said and f"--resume {out}" in said
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
        PlanTrainer(request).train()
    assert not (tmp_path / "run").exists()


def test_two_nodes_share_the_planning(case: Case, tmp_path: Path) -> None:
    """Each node, told what torchrun tells its own, starts a planner; odd iterations are planned on one, even ones on the other."""
    both = {"GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "PENSTOCK_LOG_LEVEL": "DEBUG"}
    nodes = [both | {"GROUP_RANK": str(node), "PENSTOCK_LOG_DIR": str(tmp_path / f"node{node}")} for node in range(2)]
    told = run_ranks(case.command(tmp_path / "run"), nodes, tmp_path)
    assert [one.status for one in told] == [0, 0], told[0].err[-2000:] + told[1].err[-2000:]
    assert json.loads(told[0].out)["losses"] == case.losses and not told[1].out
    for node in range(2):
        log = (tmp_path / f"node{node}" / f"planner-{node}.log").read_text()
        assert [int(step) for step in re.findall(r"iteration (\d+) planned", log)] == list(range(node, STEPS, 2))


@pytest.mark.parametrize(
    ("option", "value", "status", "message"),
    [
        ("--planners", "-1", 2, "--planners is -1; 0 or more was expected"),
        ("--store", "ftp://there", 2, "store address begins with 'ftp:'"),
        ("--store", "redis://127.0.0.1:1", 1, "does not answer"),
        ("--store", "redis://user:word@127.0.0.1:1", 2, "the store's address holds a password"),
        ("--store-timeout", "-1", 2, "--store-timeout is -1.0; 0 or more was expected"),
        ("--budget-steps", "-1", 2, "--budget-steps is -1"),
    ],
)
def test_what_cannot_plan_a_run(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, value: str, status: int,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("penstock.stores.redis._FIRST_CONNECT_S", 0.2)
    assert main.run(case.command(tmp_path / "run", option, value)) == status
    assert message in " ".join(capsys.readouterr().err.split()) and steps_done(tmp_path / "run") == 0
