"""A run's evaluations: of samples that were held out, and their mean."""

from __future__ import annotations

from types import SimpleNamespace

from penstock.data import open_data
from penstock.plans.build import uniform_plan
from penstock.plans.references import model_of
from penstock.runtime.rank import Evaluated
from penstock.runtime.request import EvalRecord, TrainRequest
from penstock.runtime.run import Run
from penstock.runtime.run_inputs import program_planner


def test_an_evaluation_is_the_mean_over_its_batches() -> None:
    run = Run.__new__(Run)  # only what an evaluation needs; what a rank finds in one batch is held against plain torch elsewhere
    found = {"one": Evaluated(2.0, 0.5), "two": Evaluated(5.0, 0.25), "three": Evaluated(2.0, 0.75)}
    run.rank = SimpleNamespace(evaluate=lambda program, source: found[program])  # type: ignore[assignment]
    run._held_out, run._evaluations = None, list(found)  # type: ignore[assignment]
    assert run._evaluate(7) == EvalRecord(7, 3.0, 0.5)


def test_what_is_evaluated_was_held_out(data: str) -> None:
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout="packed")
    run = Run.__new__(Run)
    run.request = TrainRequest(plan, data, 6, "", eval_every=1, eval_batches=2)
    run.model, run.rank = model_of(plan), SimpleNamespace(world=SimpleNamespace(rank=0))  # type: ignore[assignment]
    samples, programs = run._evaluation(program_planner(run.request))
    held_out, trained = open_data(data, "validation"), open_data(data, "train")
    assert len(samples.data) == len(held_out) < len(trained)
    assert samples.data[3]["input"].tolist() == held_out[3]["input"].tolist() != trained[3]["input"].tolist()
    assert len(programs) == 2 and not any(program.training for program in programs)
    drawn = [sample for program in programs for micro in program.micro_batches for sample in micro.samples]
    assert [sample % len(held_out) for sample in drawn] == [number % len(held_out) for number in range(32)]  # in their order
