"""A plan is adopted between two steps: to the bit what a checkpoint, and a restart under the new plan, would have given."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adopting_jobs import train_adopting, train_loaded, until
from checkpoint_jobs import train_part
from runtime_cases import Choice, make_case
from training_jobs import TrainedPrograms

from penstock.data.planners import PlannerPool
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import batch_source, program_planner
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerError, WorkerPool
from penstock.stores import Job
from penstock.stores.addresses import connect
from penstock.stores.tcp_server import TcpServer

BREAK = 2
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
ONE: Choice = {"family": "gpt", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
               "cuts": "uneven", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip
PAIRS: dict[str, tuple[Choice, Choice]] = {
    "other cuts": (ONE | {"pp": 2}, ONE | {"pp": 2, "cuts": "even"}),
    "two stages to tp": (ONE | {"pp": 2}, ONE | {"tp": 2}),
    "dp to two stages": (ONE | {"dp": 2}, ONE | {"pp": 2}),
    "replicas to ZeRO-1 with tp": (ONE | {"replicas": 2}, ONE | {"tp": 2, "dp": 2, "zero": 1}),
    "ZeRO-1 to ZeRO-3": (ONE | {"dp": 2, "zero": 1}, ONE | {"replicas": 2, "zero": 3}),
    "ZeRO-3 to four stages": (ONE | {"dp": 2, "zero": 3}, ONE | {"pp": 4}),
    "zero-bubble, to one process of four": (ONE | {"pp": 2, "replicas": 2, "schedule": "zero-bubble"}, ONE),
    "statistics": (
        ONE | {"family": "resnet", "layout": "padded", "pp": 2}, ONE | {"family": "resnet", "layout": "padded", "dp": 2, "zero": 1}),
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=200) as workers:
        yield workers


def equal(one: TrainedPrograms, other: TrainedPrograms) -> bool:
    """Whether the weights and statistics of a rank are the same to the bit."""
    tensors = [[*(weight.values for weight in own.weights), *own.statistics] for own in (one, other)]
    names = [[(weight.op, weight.name, weight.tp_rank) for weight in own.weights] for own in (one, other)]
    return names[0] == names[1] and all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_another_plan_goes_on_as_a_restart_does(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    one, other = (make_case(choice, seed, iterations=4) for seed, choice in enumerate(PAIRS[name], 3))
    before, after = one.programs()[:BREAK], other.programs()[BREAK:]
    first = pool.run(train_part, one.plan, before, ADAMW, None, tmp_path / "saved")
    second = pool.run(train_part, other.plan, after, ADAMW, tmp_path / "saved", None)
    adopted = pool.run(train_adopting, [(one.plan, before), (other.plan, after)], ADAMW, tmp_path / "moving")
    assert not any((tmp_path / "moving").iterdir())
    assert adopted[0][0].losses == (*first[0].losses, *second[0].losses)
    for (found, _), wanted in zip(adopted, second, strict=True):
        assert equal(found, wanted)


def test_to_and_fro_and_the_same_plan(pool: WorkerPool, tmp_path: Path) -> None:
    """Four plans in a row in the same processes; the same plan again moves nothing, and changes nothing."""
    one, other = make_case(ONE | {"pp": 2, "zero": 0}, 3, iterations=4), make_case(ONE | {"tp": 2, "dp": 2, "zero": 1}, 4, iterations=4)
    there, here = one.programs(), other.programs()
    parts = [(one.plan, there[:1]), (other.plan, here[1:2]), (one.plan, there[2:3]), (one.plan, there[3:])]
    adopted = pool.run(train_adopting, parts, ADAMW, tmp_path / "moving")
    saved = [tmp_path / str(number) for number in range(3)]
    steps = [
        pool.run(train_part, one.plan, there[:1], ADAMW, None, saved[0]),
        pool.run(train_part, other.plan, here[1:2], ADAMW, saved[0], saved[1]),
        pool.run(train_part, one.plan, there[2:], ADAMW, saved[1], None),
    ]
    assert adopted[0][0].losses == tuple(loss for step in steps for loss in step[0].losses)
    assert all(equal(found, wanted) for (found, _), wanted in zip(adopted, steps[-1], strict=True))
    assert all(modules > 0 for found, modules in adopted if found.weights)


def test_another_model_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    one, other = make_case(ONE, 3, iterations=2), make_case(ONE | {"family": "llama"}, 3, iterations=2)
    with WorkerPool(1, timeout_s=200) as alone, pytest.raises(WorkerError, match="Use plans of one model and precision"):
        alone.run(train_adopting, [(one.plan, one.programs()[:1]), (other.plan, other.programs()[1:])], ADAMW, tmp_path)


def request_of(data: str, dynamic: bool, **degrees: int) -> TrainRequest:
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=16, micro_batch=4, layout="packed", **degrees)  # type: ignore[arg-type]
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic")) if dynamic else plan
    return TrainRequest(plan, data, 6, "", replace(ADAMW, seed=1))


def await_entry(address: str, job: Job, name: str) -> None:
    """Returns once an entry is in store, and stays there: nobody fetches yet. The test's time-out ends a wait in vain."""
    with closing(connect(address, job.key)) as values:
        while not values.names(name):
            time.sleep(0.02)


@pytest.mark.parametrize("dynamic", [False, True])
def test_loader_and_planners_adopt_it_too(data: str, tmp_path: Path, dynamic: bool) -> None:
    """Programs that planners made ahead for the plan before are run by nobody; the others are those that a restart plans."""
    requests = [request_of(data, dynamic, **degrees) for degrees in ({"pp": 2}, {"tp": 2})]
    source, planners = batch_source(requests[0]), [program_planner(request) for request in requests]
    job = Job.new(2)
    server = TcpServer(job.key)
    address, settings = f"tcp://127.0.0.1:{server.port}", requests[0].settings
    with server, WorkerPool(2, timeout_s=200) as pool, PlannerPool(source, planners[0], address, job) as planning:
        steps = [(0, planners[0]), (BREAK, planners[1])]
        await_entry(address, job, f"penstock/{job.id}/entry/{BREAK}/")  # planned for the plan before, to be discarded
        found = pool.run(
            train_loaded, source, steps, settings, tmp_path / "moving", (address, job),
            listen=lambda rank, step: planning.adopt(step, planners[1]),
        )  # fmt: skip
        alone = ("", None)
        first = pool.run(train_loaded, until(source, BREAK), steps[:1], settings, tmp_path, alone, None, tmp_path / "saved")
        second = pool.run(train_loaded, source, steps[1:], settings, tmp_path, alone, tmp_path / "saved")
    assert [ran for _, ran in found] == [[(step, 2 if step < BREAK else 1) for step in range(6)]] * 2
    assert found[0][0].losses == (*first[0][0].losses, *second[0][0].losses)
    for (adopted, _), (wanted, _) in zip(found, second, strict=True):
        assert equal(adopted, wanted)
    assert not [thread for thread in threading.enumerate() if thread.name in ("planners", "loader")]
