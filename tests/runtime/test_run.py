"""A run's evaluations: of samples that were held out, and their mean; and the one message after each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.data import open_data
from penstock.plans.build import uniform_plan
from penstock.runtime.rank import Evaluated
from penstock.runtime.request import EvalRecord, TrainRequest
from penstock.runtime.run import Run
from penstock.runtime.run_inputs import held_out_programs, program_planner
from penstock.runtime.step_words import StepWord
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.steps import StepRecord


def test_an_evaluation_is_the_mean_over_its_batches() -> None:
    run = Run.__new__(Run)  # only what an evaluation needs; what a rank finds in one batch is held against plain torch elsewhere
    found = {"one": Evaluated(2.0, 0.5), "two": Evaluated(5.0, 0.25), "three": Evaluated(2.0, 0.75)}
    run.rank = SimpleNamespace(evaluate=lambda program, source: found[program])  # type: ignore[assignment]
    run._place = SimpleNamespace(held_out=None, evaluations=list(found))  # type: ignore[assignment]
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


RECORD = StepRecord(4, 5.5, 0.1, 100, 1000.0, skipped=True)


def run_of_two(own: int, other: StepWord, sent: list[torch.Tensor], broadcast: bytes = b"") -> Run:
    """Process 0 or 3 of a run after its step 4, beside another that says `other`; only what agreeing needs."""

    def gather(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        rows = [values, torch.tensor([other.row()] * len(values), dtype=torch.float64)]
        return torch.stack(rows if own == 0 else rows[::-1])

    groups = SimpleNamespace(gather=gather, broadcast=lambda data, size: data or broadcast)
    run = Run.__new__(Run)
    run.step, run.members, run.is_first = 5, (0, 3), own == 0
    run._lost, run._notes, run.watcher, run._meter = None, [], None, None
    run.saves = SimpleNamespace(is_late=False, is_saving=False, copied=0.0)  # type: ignore[assignment]
    run.request = TrainRequest(uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4), "", 9, "")
    run.worker = SimpleNamespace(asked_to_end=lambda: 0, groups=groups, copies=None)  # type: ignore[assignment]
    run.rank = SimpleNamespace(world=SimpleNamespace(ranks=(3,)))  # type: ignore[assignment]
    return run


@pytest.mark.parametrize("lateness", [0, 1])
def test_figures_ride_on_the_one_message_after_each_step(lateness: int) -> None:
    """Watching costs no message, nor do several steps in one program; all are told the same, on a GPU of the step before; a signal to one
    ends all."""
    own, sent, heard = RankFigures(3.0, 2.0, 0.5, 0.25, 7.0), [], []
    evaluated = EvalRecord(5, 2.5, 0.125)
    other = StepWord(asked_to_end=15, samples=7, figures=RankFigures(9.0, 8.0, 7.0, 6.0, 5.0), record=RECORD, evaluated=evaluated)
    run = run_of_two(0, other, sent)
    run._meter = SimpleNamespace(lateness=lateness)  # type: ignore[assignment]
    given = SimpleNamespace(after=lambda *figures: heard.append(figures) or ["slow."], order=lambda step: None)
    run.watcher = given  # type: ignore[assignment]
    told = run._agreed([StepWord(samples=3), StepWord(samples=4, figures=own)])
    before, last = told.steps
    assert before.samples == "0000000000a"
    assert (last.record, last.evaluated, last.samples, told.ended_by, told.plan) == (RECORD, evaluated, "0000000000b", 15, None)
    assert heard == [(3 - lateness, {0: RankFigures(), 3: other.figures}), (4 - lateness, {0: own, 3: other.figures})]
    assert run._notes == ["slow."] * 2 and len(sent) == 1


def test_a_plan_that_the_first_process_orders_goes_to_all() -> None:
    wanted = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, pp=2)
    run, asked = run_of_two(0, StepWord(record=RECORD), []), []
    given: Any = SimpleNamespace(after=lambda *_: (), order=lambda step: asked.append(step) or wanted, exact=True)
    run.watcher = given
    told = run._agreed([StepWord()])
    assert told.plan == wanted and told.exact and asked == [5]
    data = run._order()
    told = run_of_two(3, StepWord(order_bytes=len(data)), [], data)._agreed([StepWord(record=RECORD)])
    assert told.plan == wanted and told.exact


def test_who_loses_the_store_tells_all() -> None:
    assert run_of_two(0, StepWord(lost=True, record=RECORD), [])._agreed([StepWord()]).is_lost
    assert not run_of_two(0, StepWord(record=RECORD), [])._agreed([StepWord()]).is_lost
