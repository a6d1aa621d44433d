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
from adopting_jobs import train_abandoning, train_adopting, train_handing_over, train_loaded, until
from checkpoint_jobs import train_part
from runtime_cases import Case, Choice, make_case, with_count
from training_jobs import TrainedPrograms

from penstock.data.planners import PlannerPool
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.programs.instructions import Backward, BackwardInput, Forward, Instruction
from penstock.programs.lower import lower
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import batch_source, program_planner
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerError, WorkerPool, launch
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
def pair() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout_s=250) as workers:
        yield workers


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
    one, other = (make_case(choice, seed, iterations=2) for seed, choice in enumerate(PAIRS[name], 3))
    before, after = one.programs()[:1], other.programs()[1:]
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


def in_bf16(choice: Choice, seed: int, **changes: int) -> Case:
    case = make_case(choice, seed, iterations=3, **changes)
    plan = replace(case.plan, precision="bf16")
    return replace(case, plan=plan, model=model_of(plan))


def test_ops_that_stay_keep_their_modules_and_others_do_not(pair: WorkerPool, tmp_path: Path) -> None:
    one, other = (in_bf16(ONE | {"pp": 2, "cuts": cuts}, 3) for cuts in ("even", "uneven"))
    cuts = [case.plan.stages[0].last for case in (one, other)]
    shared = {place.op.tied_to for place in one.model.ops} - {""}
    tied = {place.index for place in one.model.ops if place.op.tied_to or place.name in shared}
    assert cuts[0] != cuts[1]
    parts = [(one.plan, one.programs()[:BREAK]), (other.plan, other.programs()[BREAK:])]
    adopted = pair.run(train_adopting, parts, ADAMW, tmp_path / "moving")
    stay = [set(range(min(cuts))), set(range(max(cuts), one.model.num_ops))]
    assert [modules for _, modules in adopted] == [len(own - tied) for own in stay]
    first = pair.run(train_part, one.plan, parts[0][1], ADAMW, None, tmp_path / "saved")
    second = launch(train_part, 2, other.plan, parts[1][1], ADAMW, tmp_path / "saved", None)  # new processes
    assert adopted[0][0].losses == (*first[0].losses, *second[0].losses)
    assert all(equal(found, wanted) for (found, _), wanted in zip(adopted, second, strict=True))
    handed = pair.run(train_handing_over, parts, ADAMW)
    assert handed[0].losses == adopted[0][0].losses and all(map(equal, handed, second))


def test_where_stages_are_cut_changes_no_bit_of_half_precision(pair: WorkerPool, tmp_path: Path) -> None:
    """Masters of several ops in one flat tensor would be rounded by their place in it, which changes with the cut."""
    case = in_bf16(ONE | {"pp": 2, "cuts": "even"}, 3, hidden=18, heads=2)  # no multiples of a vector's length
    first, second = case.plan.stages
    saved = []
    for cut in (first.last, first.last + 2, first.last - 3):
        plan = replace(case.plan, stages=(replace(first, last=cut), replace(second, first=cut)))
        programs = [lower(plan, case.model, work, number) for number, work in enumerate(case.works)]
        pair.run(train_part, plan, programs, ADAMW, None, tmp_path / str(cut))
        saved.append(Checkpoint(tmp_path / str(cut)))
    for other in saved[1:]:
        assert other.kinds == saved[0].kinds and "exp_avg_sq" in other.kinds
        assert [name for name in other.manifest.tensors if not torch.equal(other.read(name), saved[0].read(name))] == []


@pytest.mark.parametrize(
    ("choice", "kind", "failing"),
    [(ONE | {"pp": 2}, Forward, 1), (ONE | {"pp": 2, "schedule": "zero-bubble"}, Backward, 0), (ONE | {"dp": 2}, Backward, 0),
     (ONE | {"dp": 2, "zero": 3}, Forward, 1), (ONE | {"pp": 2, "schedule": "pipedream"}, Backward, 0),
     (ONE | {"tp": 2, "family": "resnet", "layout": "padded"}, Forward, 1)],
)  # fmt: skip
def test_a_step_that_fails_half_way_leaves_nothing(
    pair: WorkerPool, choice: Choice, kind: type[Instruction], failing: int, tmp_path: Path
) -> None:
    """Whoever waits for the rank that failed fails too; all go on under another plan, as new processes would, and no thread or file of the
    abandoned generation is left."""
    family = {name: choice[name] for name in ("family", "layout")}
    one = with_count(make_case(choice, 3, iterations=3), 4)  # half of them done is half-way
    other = make_case(ONE | family | {"pp": 2, "cuts": "even"}, 4, iterations=4)
    settings = replace(ADAMW, clip_norm=None) if choice["schedule"] == "pipedream" else ADAMW
    kind = BackwardInput if choice["schedule"] == "zero-bubble" else kind
    first, second = (one.plan, one.programs()), (other.plan, other.programs()[2:])
    found = pair.run(train_abandoning, first, second, settings, tmp_path / "saved", failing, kind)
    wanted = pair.run(train_part, other.plan, second[1], settings, tmp_path / "saved", None)
    for (trained, before, after), right in zip(found, wanted, strict=True):
        assert trained.losses[2:] == right.losses and len(trained.losses) == 4
        assert equal(trained, right)
        assert after[0] <= before[0] + 2 and after[2] <= before[2] + 1, (before, after)


def test_another_model_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    one, other = make_case(ONE, 3, iterations=2), make_case(ONE | {"family": "llama"}, 3, iterations=2)
    with WorkerPool(1, timeout_s=200) as alone, pytest.raises(WorkerError, match="Use plans of one model and precision"):
        alone.run(train_adopting, [(one.plan, one.programs()[:1]), (other.plan, other.programs()[1:])], ADAMW, tmp_path)


def request_of(data: str, dynamic: bool, **degrees: int) -> TrainRequest:
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, layout="packed", **degrees)  # type: ignore[arg-type]
    plan = replace(plan, micro_batching=MicroBatching("packed", "dynamic")) if dynamic else plan
    return TrainRequest(plan, data, 4, "", replace(ADAMW, seed=1))


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
    assert [ran for _, ran in found] == [[(step, 2 if step < BREAK else 1) for step in range(4)]] * 2
    assert found[0][0].losses == (*first[0][0].losses, *second[0][0].losses)
    for (adopted, _), (wanted, _) in zip(found, second, strict=True):
        assert equal(adopted, wanted)
    assert not [thread for thread in threading.enumerate() if thread.name in ("planners", "loader")]
