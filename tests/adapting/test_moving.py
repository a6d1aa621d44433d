"""A live move is, to the bit, a stop, a checkpoint and a restart under the new plan; one that fails has not been."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from adopting_jobs import Part
from checkpoint_jobs import train_part
from module_cases import module_case
from moving_jobs import Failure, differences, drawn_chain, move_to_and_fro, placed, train_moving, train_on, train_overlapping
from runtime_cases import MODELS, Case, Choice, make_case

from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool

NUM_PROCESSES = 4
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
SGD = TrainingSettings(LearningRate(0.02), OptimizerSettings("sgd", momentum=0.9))
ONE: Choice = {"family": "gpt", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
               "cuts": "uneven", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip
CHAINS = [number + len(MODELS) * (number % 2 == 0) for number in range(len(MODELS))]
"""Every model, moved twice, in one of two precisions."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(NUM_PROCESSES, timeout_s=200) as workers:
        yield workers


def part_of(choice: Choice, steps: slice, precision: str = "fp32", places: Sequence[int] = range(NUM_PROCESSES)) -> Part:
    case = placed(make_case(ONE | choice, 3, iterations=8), places, precision)
    return case.plan, case.programs()[steps]


def check(parts: Sequence[Part], settings: TrainingSettings, pool: WorkerPool, folder: Path) -> None:
    """Moving through the parts equals stopping, saving and resuming between them: losses, weights, moments, step counts, statistics."""
    saved, losses = None, [()] * NUM_PROCESSES
    for number, (plan, programs) in enumerate(parts):
        done = pool.run(train_part, plan, programs, settings, saved, folder / str(number))
        saved, losses = folder / str(number), [(*before, *now.losses) for before, now in zip(losses, done, strict=True)]
    moved = pool.run(train_moving, parts, settings, folder / "moved")
    assert [found.losses for found, _ in moved] == losses
    assert saved is not None and differences(folder / "moved", saved) == []


@pytest.mark.parametrize("number", CHAINS)
def test_a_move_is_a_stop_and_a_restart(number: int, pool: WorkerPool, tmp_path: Path) -> None:
    chain = drawn_chain(number, 3, 1, 1, NUM_PROCESSES)
    print(chain.name)  # shown if it fails
    check(chain.parts, ADAMW, pool, tmp_path)


@pytest.mark.parametrize(("settings", "precision"), [(SGD, "fp32"), (SGD, "bf16"), (ADAMW, "fp16")])
def test_one_move_after_the_other(settings: TrainingSettings, precision: str, pool: WorkerPool, tmp_path: Path) -> None:
    """From one process to all, to two, to one of these and another, and to that one alone. Under ZeRO-2 a rank sends weights of which it
    has the masters only in part."""
    parts = [part_of({}, slice(0, 1), precision), part_of({"tp": 2, "dp": 2, "zero": 1}, slice(1, 2), precision),
             part_of({"dp": 2, "zero": 2}, slice(2, 3), precision, (2, 1)), part_of({"dp": 2, "zero": 1}, slice(3, 4), precision, (3, 2)),
             part_of({}, slice(4, 5), precision, (3,))]  # fmt: skip
    check(parts, settings, pool, tmp_path)


def test_a_module_moves_like_ops_of_our_own(pool: WorkerPool, tmp_path: Path) -> None:
    """Somebody's net, divided otherwise by each plan, in bf16 with fp32 masters."""
    choices: list[Choice] = [{"tp": 2, "pp": 2}, {"pp": 2, "cuts": "uneven"}, {"tp": 2, "dp": 2, "zero": 1}]
    places = ((0, 1, 2, 3), (3, 1), (2, 0, 1, 3))
    made = [module_case("long_skips", iterations=3, precision="bf16", **choice) for choice in choices]
    cases = [placed(case, on, "bf16") for case, on in zip(made, places, strict=True)]
    check([(case.plan, case.programs()[at : at + 1]) for at, case in enumerate(cases)], ADAMW, pool, tmp_path)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_move_beside_a_step_is_one_after_it(precision: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Other cuts, a replica more, and no move that could be overlapped: tensor parallelism is another division of each op."""
    choices: list[Choice] = [{"pp": 2}, {"pp": 3}, {"pp": 2, "replicas": 2}, {"tp": 2}]
    places = ((0, 1), (1, 0, 3), (0, 3, 1, 2), (1, 2))
    parts = [part_of(choice, slice(2 * at, 2 * at + 2), precision, on) for at, (choice, on) in enumerate(zip(choices, places, strict=True))]
    saved, losses = None, [()] * NUM_PROCESSES
    for number, (plan, programs) in enumerate(parts):
        done = pool.run(train_part, plan, programs, ADAMW, saved, tmp_path / str(number))
        saved, losses = tmp_path / str(number), [(*before, *now.losses) for before, now in zip(losses, done, strict=True)]
    moved = pool.run(train_overlapping, parts, ADAMW, tmp_path / "moved")
    assert [count for _, count in moved] == [2] * NUM_PROCESSES
    assert [found.losses for found, _ in moved] == losses
    assert saved is not None and differences(tmp_path / "moved", saved) == []


def test_asynchronous_plans_move_where_they_are_drained(pool: WorkerPool, tmp_path: Path) -> None:
    """Which they are between two programs; the versions of weights are one again. (Llama shares no weights, which these plans cannot.)"""
    choices: list[Choice] = [{"pp": 2, "schedule": "pipedream"}, {"tp": 2}, {"pp": 3, "schedule": "pipedream"}]
    steps, places = (slice(0, 2), slice(2, 3), slice(3, 5)), ((0, 1), (1, 3), (2, 0, 1))
    parts = [part_of(choice | {"family": "llama"}, own, places=on) for choice, own, on in zip(choices, steps, places, strict=True)]
    check(parts, replace(ADAMW, clip_norm=None), pool, tmp_path)


def test_a_move_before_the_first_step_takes_first_weights(pool: WorkerPool, tmp_path: Path) -> None:
    """There are no moments yet, and none are made up."""
    old, new = part_of({"pp": 2}, slice(0, 0), "bf16"), part_of({"tp": 2}, slice(0, 2), "bf16", (3, 2, 1, 0))
    moved = pool.run(train_moving, [old, new], ADAMW, tmp_path / "moved")
    wanted = pool.run(train_part, *new, ADAMW, None, tmp_path / "new")
    assert [found.losses for found, _ in moved] == [found.losses for found in wanted]
    assert differences(tmp_path / "moved", tmp_path / "new") == []


NOBODY = Failure(-1, 0)
FAILURES = {"at once": Failure(1, 0), "half-way": Failure(0, 5), "of one without work": Failure(3, 0)}


@pytest.mark.parametrize("name", FAILURES)
def test_a_move_that_fails_has_not_been(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    """The process that failed is named by all; they go on under the old plan, in the same process groups, as if nothing had happened."""
    failure = FAILURES[name]
    part, (other, _) = part_of({"pp": 2}, slice(0, 3), "bf16"), part_of({"tp": 2}, slice(3, 4), "bf16", (2, 3))
    found = pool.run(train_on, part, other, ADAMW, tmp_path / "aborted", failure)
    wanted = pool.run(train_on, part, other, ADAMW, tmp_path / "plain", None)
    for (trained, said, same), (plain, _, _) in zip(found, wanted, strict=True):
        assert said.startswith("MoveAbortedError: the move before step 2 was aborted (process ")
        assert f"(process {failure.process}: OSError: as a test wants it). Training goes on under the old plan." in said
        assert trained.losses == plain.losses and same
    assert differences(tmp_path / "aborted", tmp_path / "plain") == []


SMALL = "nodes: [{device: cpu, gpus: 4, memory_limit_gb: 0.0005}]"
REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "another precision": (lambda plan: replace(plan, precision="fp32"), "InputError: precision is 'fp32' in the new plan, but 'bf16' in"),
    "another batch": (lambda plan: replace(plan, global_batch=4), "InputError: global_batch is 4 in the new plan, but 8 in the old one"),
    "a rank without a process": (
        lambda plan: placed(Case(plan, model_of(plan), ()), (0, 7), plan.precision).plan,
        "InputError: the new plan has rank 7, but the job has processes for 0-3 alone."),
    "no room": (lambda plan: plan, "InfeasibleError: no room to move: rank 1 would hold 0.000"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_plan_that_does_not_fit_is_refused_and_training_goes_on(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    part = part_of({"pp": 2}, slice(0, 3), "bf16")
    if name == "no room":
        (tmp_path / "small.yaml").write_text(SMALL)
        part = replace(part[0], cluster=str(tmp_path / "small.yaml")), part[1]
    found = pool.run(train_on, part, change(part_of({"tp": 2}, slice(0, 1), "bf16")[0]), ADAMW, tmp_path / "refused", NOBODY)
    wanted = pool.run(train_on, part, part[0], ADAMW, tmp_path / "plain", None)
    for _, said, same in found:
        assert said.startswith(message) and same
    assert [trained.losses for trained, _, _ in found] == [trained.losses for trained, _, _ in wanted]


def test_nothing_is_left_of_moves(pool: WorkerPool) -> None:
    parts = [part_of({"pp": 2}, slice(0, 1), "bf16"), part_of({"tp": 2, "dp": 2, "zero": 1}, slice(0, 1), "bf16")]
    for found in pool.run(move_to_and_fro, parts, ADAMW, 2):
        assert found[-1] == found[0], found
