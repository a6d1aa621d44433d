"""Asynchronous 1F1B with weight stashing: equal to a plain emulation of the same delays, version by version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from oracles.pipedream import emulate
from runtime_cases import Case, Choice, largest_difference, make_case, with_count
from torch import nn
from training_jobs import train_programs

from penstock.costs.sources import open_costs
from penstock.data.samples import Samples
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan
from penstock.programs import instructions as i
from penstock.programs.check import check_programs
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.parallel.stashing import WeightStash
from penstock.runtime.request import TrainRequest
from penstock.runtime.run import train_rank
from penstock.runtime.run_folder import CHECKPOINTS, STEPS
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import WorkerPool
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.estimate import Estimator
from penstock.timing.iteration_estimate import Estimate

SGD = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"), clip_norm=None)
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=None)
PLAIN: Choice = {"family": "llama", "pp": 3, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "some",
                 "cuts": "uneven", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(5, timeout_s=250) as workers:
        yield workers


def asynchronous(choice: Choice, seed: int, iterations: int = 2, count: int = 8) -> Case:
    """A case of so many micro-batches in each iteration, with updates after each."""
    case = make_case(choice, seed, iterations)
    plan = replace(case.plan, schedule="pipedream")
    return with_count(replace(case, plan=plan), count)


def windows(case: Case, *sizes: int) -> list[tuple[i.Program, ...]]:
    """The iterations of a case as programs of so many each, without a break within one."""
    programs, first = [], 0
    for size in sizes:
        works = [work for work, in case.works[first : first + size]]
        micros = tuple(msgspec.structs.replace(one, index=at) for at, one in enumerate(one for own in works for one in own.micro_batches))
        ends = tuple(accumulate(len(own.micro_batches) for own in works)) if size > 1 else ()
        schedule = schedule_of(case.plan.schedule, case.plan.num_stages, len(micros))
        joined = ReplicaWork(micros, schedule, tuple(one for own in works for one in own.patterns), ends=ends)
        programs.append(lower(case.plan, case.model, [joined], first))
        first += size
    return programs


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"pp": 2}, SGD),
        ({"pp": 3}, ADAMW),
        ({"pp": 4, "recompute": "all"}, SGD),
        ({"pp": 2, "tp": 2}, ADAMW),
        ({"pp": 2, "dp": 2}, SGD),
        ({"pp": 3, "degrees": "per stage"}, ADAMW),
        ({"pp": 3, "family": "vgg", "layout": "padded"}, SGD),
        ({"pp": 1}, ADAMW),
    ],
    ids=["two stages", "three, AdamW", "four, recomputed", "tp", "dp", "degrees of each stage", "convolutions", "one stage"],
)
def test_equals_an_emulation_of_the_delays(pool: WorkerPool, more: dict[str, Any], settings: TrainingSettings) -> None:
    """Three iterations: two without a break, shorter than the pipeline is deep where that has four stages, and one by itself."""
    case = asynchronous(PLAIN | more, 3, iterations=3, count=7 - more["pp"])
    assert check_plan(replace(case.plan, micro_batching=replace(case.plan.micro_batching, policy="dynamic")), case.model) == []
    programs = windows(case, 2, 1)
    assert all(check_programs(one, case.plan, case.model) == [] for one in programs)
    working = [outcome for outcome in pool.run(train_programs, case.plan, programs, settings) if outcome.losses]
    losses, weights = emulate(case.model, case.plan.stages, [one[0] for one in programs], settings)
    assert working[0].losses == pytest.approx(losses, rel=1e-6)
    assert largest_difference(case, working, weights)[0] <= 1e-5


def test_the_delay_is_seen(pool: WorkerPool) -> None:
    """An emulation with other delays, or none, or that is drained between the iterations, is far away."""
    case = asynchronous(PLAIN, 3)
    together = windows(case, 2)
    outcomes = [outcome for outcome in pool.run(train_programs, case.plan, together, SGD) if outcome.losses]
    for depth, programs in ((1, together), (2, together), (3, case.programs())):
        whole = (*case.plan.stages[: depth - 1], replace(case.plan.stages[depth - 1], last=case.model.num_ops))
        _, weights = emulate(case.model, whole, [one[0] for one in programs], SGD)
        assert largest_difference(case, outcomes, weights)[0] > 1e-4


def test_a_run_is_drained_where_it_must_be(pool: WorkerPool, data: str, tmp_path: Path) -> None:
    """Seven steps as two programs, for an evaluation and a checkpoint after four: each step is told as the emulation has it, and what goes
    on from the checkpoint is to the bit what never stopped."""
    case = make_case(PLAIN | {"pp": 2}, 3, vocab=384)
    plan = replace(case.plan, schedule="pipedream", global_batch=6, micro_batching=MicroBatching("packed", "fixed", 2))
    request = TrainRequest(plan, data, 7, str(tmp_path / "run"), ADAMW, eval_every=4, eval_batches=1, checkpoint_every=4)
    result = pool.run(train_rank, request, ("", None), "one")[0]
    source, planner = run_inputs(request)
    opened, batches = source.open()
    programs = [planner.window(opened, batches, step)[1][0] for step in (0, 4)]
    assert [program.ends for program in programs] == [(3, 6, 9, 12), (3, 6, 9)]
    losses, _ = emulate(planner.model, plan.stages, programs, ADAMW, Samples(opened, planner.form, source.limits))
    assert result.losses == pytest.approx(losses, rel=1e-6) and [one.step for one in result.evaluated] == [4, 7]
    told = read_steps(tmp_path / "run" / STEPS)
    assert [(one.step, one.loss) for one in told] == list(enumerate(result.losses)) and len({one.samples for one in told}) == 7
    assert [one.learning_rate for one in told] == [ADAMW.rate.at(step) for step in range(7)]
    (saved,) = (tmp_path / "run" / CHECKPOINTS).glob("*-step-4")
    other = replace(request, out=str(tmp_path / "other"), resume=str(saved))
    assert pool.run(train_rank, other, ("", None), "two")[0].losses == result.losses[4:]


def test_it_learns(pool: WorkerPool) -> None:
    """Twelve times the same twelve micro-batches: as good as with updates in step, within what the delay costs."""
    case = asynchronous(PLAIN | {"recompute": "none"}, 5, iterations=1, count=12)
    programs = case.programs() * 12
    waiting = replace(case, plan=replace(case.plan, schedule="1f1b"))
    fast = TrainingSettings(LearningRate(0.02), OptimizerSettings("sgd"), clip_norm=None)
    found, slow = (pool.run(train_programs, one, many, fast)[0].losses
                   for one, many in ((case.plan, programs), (waiting.plan, waiting.programs() * 12)))  # fmt: skip
    assert found[-1] < 0.85 * found[0]
    assert found[-1] < slow[-1]  # twelve times as many updates


def test_versions_live_as_long_as_they_are_used() -> None:
    weight = nn.Parameter(torch.zeros(2))
    stash = WeightStash([weight])
    seen = []
    for micro_batch in range(3):
        stash.use(micro_batch)
    for micro_batch in range(4):
        with stash.restored(micro_batch):
            seen.append(weight[0].item())
        with stash.updating():
            weight.data += 1
        seen.append(float(stash.num_versions))
        stash.use(micro_batch + 3)
    assert seen == [0.0, 2.0, 0.0, 3.0, 0.0, 3.0, 1.0, 3.0]
    assert weight.tolist() == [4.0, 4.0]


def test_the_last_stage_needs_no_copy() -> None:
    weight = nn.Parameter(torch.zeros(2))
    stash, place = WeightStash([weight]), weight.data_ptr()
    for micro_batch in range(3):
        stash.use(micro_batch)
        with stash.restored(micro_batch):
            pass
        with stash.updating():
            weight.data += 1
    assert weight.data_ptr() == place and stash.num_versions == 1


def estimated(plan: Plan) -> Estimate:
    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, open_costs("roofline", cluster)).estimate(plan)


def test_a_version_that_nobody_needs_is_changed_where_it_is() -> None:
    """Micro-batch 0 still needs the first version; what is updated after it no pass has used."""
    weight = nn.Parameter(torch.zeros(1))
    stash = WeightStash([weight])
    stash.use(0)
    places = []
    for _ in range(2):
        with stash.updating(), torch.no_grad():
            weight += 1
        places.append(weight.data_ptr())
    assert places[0] == places[1] and stash.num_versions == 2
    with stash.restored(0):
        assert weight == 0
    assert weight == 2


def test_versions_of_abandoned_micro_batches_are_let_go() -> None:
    weight = nn.Parameter(torch.zeros(1))
    stash = WeightStash([weight])
    stash.use(0)
    with stash.updating(), torch.no_grad():
        weight += 1
    stash.abandon()
    assert stash.num_versions == 1 and weight == 1


def test_memory_counts_the_versions() -> None:
    fields = {"pp": 4, "global_batch": 32, "micro_batch": 2}
    memory = {}
    for schedule in ("1f1b", "pipedream"):
        plan = uniform_plan("llama-tiny", "4xa100-40gb", schedule=schedule, **fields)
        memory[schedule] = [stage.memory for stage in estimated(plan).stages]
    for stage, (plain, stashed) in enumerate(zip(memory["1f1b"], memory["pipedream"], strict=True)):
        assert stashed.weights_bytes == pytest.approx(plain.weights_bytes * SCHEDULES["pipedream"].in_flight(4, stage, 16, 1)[0])
        assert stashed.activations_bytes == plain.activations_bytes and stashed.moments_bytes == plain.moments_bytes


def test_time_has_an_update_for_every_micro_batch() -> None:
    found = {}
    for schedule in ("1f1b", "pipedream"):
        found[schedule] = estimated(uniform_plan("llama-tiny", "2xa100-40gb", schedule=schedule, pp=2, global_batch=32, micro_batch=2))
    for plain, own in zip(found["1f1b"].stages, found["pipedream"].stages, strict=True):
        assert own.work.total_s - plain.work.total_s == pytest.approx(plain.optimizer_s) and plain.optimizer_s > own.optimizer_s == 0


def test_time_has_a_sum_of_gradients_for_every_micro_batch() -> None:
    found = {}
    for schedule in ("1f1b", "pipedream"):
        plan = uniform_plan("llama-tiny", "4xa100-40gb", schedule=schedule, pp=2, dp=2, global_batch=32, micro_batch=2)
        found[schedule] = estimated(plan)
    for plain, own in zip(found["1f1b"].stages, found["pipedream"].stages, strict=True):
        assert own.work.total_s - plain.work.total_s == pytest.approx(plain.sync_s + plain.optimizer_s)
        assert plain.sync_s > own.sync_s == own.optimizer_s == 0


def broken(program: i.Program, change: Any) -> i.Program:
    steps = list(program.instructions)
    at = [index for index, step in enumerate(steps) if isinstance(step, i.StepStage)]
    change(steps, at)
    return msgspec.structs.replace(program, instructions=tuple(steps))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda steps, at: steps.pop(at[2]), "gradients of several micro-batches at once"),
        (lambda steps, at: steps.pop(at[-1]), "but not after micro-batch 7"),
        (lambda steps, at: steps.insert(at[0], steps[at[0]]), "updates its weights twice for micro-batch 0"),
        (lambda steps, at: steps.insert(0, steps.pop(at[0])), "before the backward pass of micro-batch 0 is done"),
        (lambda steps, at: [steps.pop(index) for index in reversed(at)], "does not update stages by themselves"),
    ],
)
def test_the_checker_sees_wrong_updates(change: Any, text: str) -> None:
    case = asynchronous(PLAIN, 3, iterations=1)
    first, *others = case.programs()[0]
    problems = check_programs([broken(first, change), *others], case.plan, case.model)
    assert any(text in problem.text for problem in problems), problems


def test_updates_are_refused_where_the_schedule_is_synchronous() -> None:
    case = asynchronous(PLAIN, 3)
    problems = check_programs(case.programs()[0], replace(case.plan, schedule="1f1b"), case.model)
    assert problems and all("updates stages by themselves, but the schedule is '1f1b'" in problem.text for problem in problems)
    (several,) = windows(case, 2)
    problems = check_programs(several, replace(case.plan, schedule="1f1b"), case.model)
    assert any("has 2 global batches without an update between them" in problem.text for problem in problems)


@pytest.mark.parametrize("ends", [(16, 16), (0, 16), (9, 8, 16), (8, 15), (8, 16, 17), ()])
def test_the_checker_sees_batches_that_end_wrongly(ends: tuple[int, ...]) -> None:
    """Samples that two global batches have in common are none of one batch that come twice."""
    (several,) = windows(asynchronous(PLAIN, 3), 2)
    assert several[0].ends == (8, 16) and check_programs(several) == []
    problems = check_programs([msgspec.structs.replace(one, ends=ends) for one in several])
    assert any(("rising numbers up to 16" if ends else "in more than one micro-batch") in problem.text for problem in problems)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (TrainingSettings(), r"clipped to a norm of 1, but .* Use --clip 0"),
        (TrainingSettings(optimizer=OptimizerSettings("lamb"), clip_norm=None), "LAMB needs norms over all ranks"),
        (TrainingSettings(on_nan="skip", clip_norm=None), "no update can be dropped"),
    ],
)
def test_what_needs_all_stages_at_once_is_refused(settings: TrainingSettings, message: str) -> None:
    plan = uniform_plan("llama-tiny", "2xcpu", pp=2, global_batch=8, micro_batch=2, schedule="pipedream", precision="fp32")
    with pytest.raises(InputError, match=message):
        PlanTrainer(TrainRequest(plan, "no-data", 1, "no-folder", settings))


def test_evaluation_updates_nothing() -> None:
    case = asynchronous(PLAIN, 3, iterations=1)
    work = case.works[0][0]
    forward = schedule_of("gpipe", case.plan.num_stages, len(work.micro_batches))
    only = tuple(tuple(action for action in actions if action.kind == 0) for actions in forward)
    programs = lower(case.plan, case.model, (replace(work, schedule=only, patterns=()),), 0, training=False)
    assert not any(isinstance(step, i.StepStage | i.Step) for program in programs for step in program.instructions)
    assert check_programs(programs, case.plan, case.model) == []
