"""A run's evaluations: of samples that were held out, and their mean; and the one message after each step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.data import open_data
from penstock.plans.build import uniform_plan
from penstock.plans.references import model_of
from penstock.runtime.rank import Evaluated
from penstock.runtime.request import EvalRecord, TrainRequest
from penstock.runtime.run import Run
from penstock.runtime.run_inputs import program_planner
from penstock.runtime.telemetry.figures import RankFigures


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


@pytest.mark.parametrize("lateness", [0, 1])
def test_figures_ride_on_the_one_message_after_each_step(lateness: int) -> None:
    """Watching costs no message and forty bytes of each rank; all ranks are told the same, on a GPU of the step before."""
    own, sent, heard = RankFigures(3.0, 2.0, 0.5, 0.25, 7.0), [], []

    def gather(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        other = torch.tensor([0.0, 15.0, 0.0, 0.0, 9.0, 8.0, 7.0, 6.0, 5.0], dtype=torch.float64)
        return torch.stack([values, other])

    run = Run.__new__(Run)
    run.is_first, run._lost, run._notes, run.watcher = False, None, [], None
    run.worker = SimpleNamespace(asked_to_end=lambda: 0)  # type: ignore[assignment]
    run.checkpoints = SimpleNamespace(busy=False)  # type: ignore[assignment]
    run.rank = SimpleNamespace(world=SimpleNamespace(gather=gather, ranks=(0, 3)))  # type: ignore[assignment]
    run._meter = SimpleNamespace(lateness=lateness)  # type: ignore[assignment]
    assert run._agreed(4, own) == (15, False) and not run._notes
    run.watcher = SimpleNamespace(after=lambda *given: heard.append(given) or ["slow."])  # type: ignore[assignment]
    assert run._agreed(5, own) == (15, False) and run._notes == ["slow."]
    assert heard == [(5 - lateness, {0: own, 3: RankFigures(9.0, 8.0, 7.0, 6.0, 5.0)})]
    assert [values.nbytes for values in sent] == [32 + 40] * 2
