"""A run's evaluations: of samples that were held out, and their mean; what is known of its steps; and how it ends, or goes on."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from losing_jobs import BEST_AT, LOST_AT, lose_rank_while_saving, lose_store
from training_jobs import WAITED_S, train_waiting

from penstock.data import open_data
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import uniform_plan
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.folder import best_checkpoint, step_of
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.nodes.supervisor import Supervisor
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.rank import Evaluated
from penstock.runtime.request import RECOVER, EvalRecord, TrainRequest
from penstock.runtime.run import Run
from penstock.runtime.run_folder import STEPS
from penstock.runtime.run_inputs import held_out_programs, program_planner
from penstock.runtime.steps.measuring import StepMeasures
from penstock.runtime.steps.messages import StepMessage
from penstock.runtime.steps.records import TrainedStep
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.observing import StageSpans
from penstock.runtime.telemetry.spans import COMPUTE
from penstock.runtime.telemetry.steps import StepRecord, read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import WorkerError, WorkerPool


def test_an_evaluation_is_the_mean_over_its_batches() -> None:
    run = Run.__new__(Run)  # only what an evaluation needs; what a rank finds in one batch is held against plain torch elsewhere
    found = {"one": Evaluated(2.0, 0.5), "two": Evaluated(5.0, 0.25), "three": Evaluated(2.0, 0.75)}
    run.rank = SimpleNamespace(evaluate=lambda program, source: found[program])  # type: ignore[assignment]
    run._inputs = SimpleNamespace(held_out=None, evaluations=list(found))  # type: ignore[assignment]
    assert run._evaluate(7) == EvalRecord(7, 3.0, 0.5)


def test_what_is_evaluated_was_held_out(data: str) -> None:
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout="packed")
    request = TrainRequest(plan, data, 6, "", eval_every=1, eval_batches=2)
    samples, programs = held_out_programs(request, program_planner(request), 0)
    held_out, trained = open_data(data, "validation"), open_data(data, "train")
    assert len(samples.data) == len(held_out) < len(trained)
    assert samples.data[3]["input"].tolist() == held_out[3]["input"].tolist() != trained[3]["input"].tolist()
    assert len(programs) == 2 and not any(program.training for program in programs)
    drawn = [sample for program in programs for micro in program.micro_batches for sample in micro.samples]
    assert [sample % len(held_out) for sample in drawn] == [number % len(held_out) for number in range(32)]  # in their order


@pytest.mark.parametrize("lateness", [0, 1])
def test_who_watches_is_told_of_every_step(lateness: int) -> None:
    """Of all that one program holds; on a GPU, whose times are known late, as the figures of the step before."""
    evaluated, heard, notes = EvalRecord(5, 2.5, 0.125), list[Any](), list[str]()
    own, other = RankFigures(3.0, 2.0, 0.5, 0.25, 7.0), RankFigures(9.0, 8.0, 7.0, 6.0, 5.0)
    records = [StepRecord(3, 6.5), StepRecord(4, 5.5, 0.1, 100, 1000.0, skipped=True)]
    before = {0: StepMessage(samples=3), 3: StepMessage(samples=7, figures=other, record=records[0])}
    last = {0: StepMessage(samples=4, figures=own), 3: StepMessage(samples=7, figures=other, record=records[1], evaluated=evaluated)}
    run: Any = Run.__new__(Run)  # only what this needs
    run.step, run._measures = 5, SimpleNamespace(lateness=lateness)
    run.rank = SimpleNamespace(world=SimpleNamespace(ranks=(3,)))
    run.records = SimpleNamespace(note=lambda *said: notes.extend(said))
    run.watcher = SimpleNamespace(after=lambda *figures: heard.append(figures) or ["slow."])
    steps = run._trained((before, last))
    assert steps == [TrainedStep(records[0], "0000000000a"), TrainedStep(records[1], "0000000000b", evaluated)]
    assert heard == [(3 - lateness, {0: RankFigures(), 3: other}), (4 - lateness, {0: own, 3: other})] and notes == ["slow."] * 2


@pytest.mark.timeout(300)
def test_a_process_without_work_waits_for_the_last_checkpoint(data: str, tmp_path: Path) -> None:
    """It learns with the others that the store is lost, has nothing to write, and must not end them while they do."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=4, layout="packed", pp=2)
    plan = replace(plan, stages=tuple(replace(stage, devices=((rank,),)) for stage, rank in zip(plan.stages, (0, 2), strict=True)))
    trainer = PlanTrainer(TrainRequest(plan, data, 20, str(tmp_path / "run")))
    with pytest.raises(WorkerError, match=rf"The run ended after {LOST_AT + 1} steps\.\nStep {LOST_AT + 1} is safe"):
        Supervisor(trainer.request, 0, lose_store).train()
    assert Checkpoint(tmp_path / "run").step == LOST_AT + 1


@pytest.mark.timeout(200)
def test_a_death_does_not_lose_the_best_checkpoint(data: str, tmp_path: Path) -> None:
    """It is not whole when a rank dies: though copies are made after every step, training goes on from before the evaluation."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=4, layout="packed", pp=2)
    request = TrainRequest(
        plan, data, 6, str(tmp_path / "run"), eval_every=BEST_AT, checkpoint_every=0, on_death=RECOVER, copies=1, eval_batches=1
    )  # fmt: skip
    result = Supervisor(PlanTrainer(request).request, 0, lose_rank_while_saving).train()
    assert len(result.losses) == 6 and [(one.step, one.loss) for one in result.evaluated] == [(2, 1.0), (4, 3.0), (6, 5.0)]
    found = best_checkpoint(tmp_path / "run" / "checkpoints")
    assert found is not None and (step_of(found[0]), found[1]) == (BEST_AT, 1.0)


@pytest.mark.parametrize(("kind", "is_here", "prepared"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
def test_while_a_gpu_ends_a_step_the_next_is_prepared(kind: str, is_here: bool, prepared: bool) -> None:
    """A processor would only do it earlier."""
    coming, given = SimpleNamespace(program="next"), list[Any]()
    run: Any = Run.__new__(Run)
    run.rank = SimpleNamespace(world=SimpleNamespace(device=SimpleNamespace(type=kind)), prepare=lambda *one: given.append(one))
    run.loader = SimpleNamespace(coming=lambda: coming if is_here else None)
    run._prepare_next()
    assert given == ([("next", coming)] if prepared else [])


def test_each_step_is_told_its_own_waits(data: str, tmp_path: Path) -> None:
    """Not those of all steps before it too."""
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=4, micro_batch=4, layout="packed")
    request = TrainRequest(plan, data, 3, str(tmp_path / "run"))
    with WorkerPool(1, timeout_s=250) as pool:
        pool.run(train_waiting, request)
    waits = [one.planning_wait_s or 0.0 for one in read_steps(tmp_path / "run" / STEPS)]
    assert len(waits) == 3 and all(WAITED_S <= wait_s < 2 * WAITED_S for wait_s in waits)


def test_each_step_of_a_program_is_told_its_own_figures() -> None:
    """Two steps in 8 s, of which the device computed 3 and the program was waited for 1; an evaluation after the last step of all."""
    micros = MicroBatch(0, (1, 2), "padded", (6, 10), (), 10), MicroBatch(1, (3,), "padded", (4,), (), 4)
    program = Program(0, 5, 0, 1, 1, 20, 3, (), micros, (), True, (1, 2))
    device, done = torch.device("cpu"), list[Any]()
    results = tuple(
        StepResult(torch.tensor(loss), torch.tensor(2 * loss), rate, torch.tensor(tokens), torch.zeros(1))
        for loss, rate, tokens in ((4.0, 0.5, 16.0), (3.0, 0.25, 4.0))
    )
    run: Any = Run.__new__(Run)
    run.rank = SimpleNamespace(
        world=SimpleNamespace(rank=0, place=0, device=device), executor=SimpleNamespace(observer=None), results=results, leads_replica=True,
        train=lambda *given: done.append("trained"), update=SimpleNamespace(exchanges=(), scale=None),
    )  # fmt: skip
    loader, records = SimpleNamespace(wait_s=1.0), SimpleNamespace(gpu_sample=lambda: {"gpu_power_w": 300.0})
    spans = SimpleNamespace(position=7, busy_ns=lambda since: {COMPUTE: 3e9 if since == 7 else 0.0})
    times = SimpleNamespace(step_done=lambda *given: done.append(given[-1]), passes_s=0.0)
    peaks = SimpleNamespace(time_s=lambda own, tokens: tokens / 8)
    run._measures = measures = StepMeasures(run.rank, loader, records, spans, times, peaks)  # type: ignore[arg-type]
    measures._whole_s = lambda step, wall_s: 8.0  # type: ignore[method-assign]
    measures._figures = lambda wall_s: RankFigures(compute_s=6.0)  # type: ignore[method-assign]
    measures.memory = lambda: {"allocated_bytes": 9}  # type: ignore[method-assign]
    run.faults = SimpleNamespace(look=lambda step: done.append(step), observer=lambda before: before)
    run.loads = SimpleNamespace(look=lambda step: None, measured=lambda pace: None)
    run.profiled, run._guard = SimpleNamespace(around=lambda step: nullcontext()), SimpleNamespace(check=lambda *given: None)
    run.request = SimpleNamespace(eval_every=5, steps=7)
    run._evaluate = lambda done: EvalRecord(done, 2.0, 0.5)
    first, second = run._train(SimpleNamespace(program=program), 0.0)
    shared = {"planning_wait_s": 0.5, "bubble_share": 1 - 3 / 8, "allocated_bytes": 9, "gpu_power_w": 300.0}
    assert first.record == StepRecord(5, 4.0, 4.0, 16, 4.0, 0.5, 0.5, 8.0, padding_share=pytest.approx(0.2), **shared)
    assert second.record == StepRecord(6, 3.0, 4.0, 4, 1.0, 0.125, 0.25, 6.0, padding_share=0.0, **shared)
    assert first.figures == second.figures == RankFigures(compute_s=3.0) and 0 != first.samples != second.samples != 0
    assert (first.evaluated, second.evaluated) == (None, EvalRecord(7, 2.0, 0.5)) and done == [6, "trained", 2]


def test_the_speed_of_a_run_is_that_of_its_last_plan_warmed_up() -> None:
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=4)
    run: Any = Run.__new__(Run)
    run.first_step, run.plan_since, run.step, run._ended_by = 1, 3, 7, 0
    run.request, run.times, run.saves = TrainRequest(plan, "", 7, "out"), StageSpans(), SimpleNamespace(finish=lambda step: None)
    run.records = SimpleNamespace(
        evaluated=[], losses=[1.0] * 6, times_s=[50.0, 50.0, 9.0, 8.0, 1.0, 3.0], tokens=[10, 20, 30, 40, 50, 60]
    )  # fmt: skip
    run.worker = SimpleNamespace(groups=SimpleNamespace(gather=lambda own: own[None], generation=SimpleNamespace(members=(0,))))
    run.rank = SimpleNamespace(world=SimpleNamespace(rank=-1))
    found = run._finished()
    assert (found.first_step, found.num_steps, found.time_s, found.tokens_per_s) == (1, 6, 2.0, 35 / 2)
    assert (found.plan, found.plan_since) == (plan, 3)
    run.plan_since = 6
    assert run._finished().time_s == 3.0  # all that there is of it
