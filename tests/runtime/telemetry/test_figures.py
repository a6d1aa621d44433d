"""Figures of a step: passes beside what is predicted of them, of the step before where a GPU is read late, and nothing where nothing is
known."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from penstock.errors import InputError
from penstock.runtime.telemetry import figures
from penstock.runtime.telemetry.figures import RankFigures, StepMeter


class Times:
    """Predicts of a program, which is a number here, that number."""

    def __init__(self, plan: Any, model: Any, costs: Any) -> None:
        if plan is None:
            raise InputError("there are no costs.")

    def workload(self, program: Any) -> Any:
        return program


def meter_of(gpu: bool, plan: Any = "plan") -> tuple[StepMeter, Any]:
    spans = mock.Mock(gpu="cuda" if gpu else None, passes_s=0.0, issued_s=0.0)
    with mock.patch.object(figures, "ProgramTimes", Times):
        found = StepMeter(mock.Mock(plan=plan), spans)
    found._opening.exception(10)  # wait for it, so that no step comes before it
    return found, spans


def fed(meter: StepMeter, spans: Any, steps: list[tuple[Any, float]]) -> list[RankFigures]:
    """(predicted, what `StageSpans` has by then) for each step in turn."""
    found = []
    with mock.patch.object(figures, "passes_s", lambda program, work: work):
        for number, (predicted, passes_s) in enumerate(steps):
            meter.expect(predicted)
            spans.passes_s = passes_s
            found.append(meter.ended(10.0 + number, 0.1 * number, 0.01))
    return found


def test_a_processor_tells_of_the_step_that_has_ended() -> None:
    meter, spans = meter_of(gpu=False)
    assert fed(meter, spans, [(1.0, 1.5), (2.0, 3.0)]) == [RankFigures(1.5, 1.0, 0.0, 0.01, 10.0), RankFigures(3.0, 2.0, 0.1, 0.01, 11.0)]
    assert meter.lateness == 0


def test_a_gpu_tells_of_the_step_before_beside_what_was_predicted_of_that() -> None:
    meter, spans = meter_of(gpu=True)
    found = fed(meter, spans, [(1.0, 0.0), (2.0, 1.5), (3.0, 3.0)])
    assert found[0] == RankFigures() and meter.lateness == 1
    assert found[1:] == [RankFigures(1.5, 1.0, 0.0, 0.01, 10.0), RankFigures(3.0, 2.0, 0.1, 0.01, 11.0)]


def test_a_run_without_costs_goes_on_and_can_say_why_it_predicts_nothing() -> None:
    meter, spans = meter_of(gpu=False, plan=None)
    assert [own.predicted_s for own in fed(meter, spans, [(1.0, 1.5)])] == [0.0]
    assert str(meter.refused) == "there are no costs."


def test_a_bug_is_no_lack_of_costs() -> None:
    with mock.patch.object(Times, "__init__", side_effect=KeyError("x")):
        meter, _ = meter_of(gpu=False)
    with pytest.raises(KeyError):
        meter.expect(1.0)


def test_steps_of_one_program_share_its_figures() -> None:
    figures = RankFigures(8.0, 4.0, 2.0, 1.0, 16.0, 6.0)
    assert figures.shared_out(1) == figures
    assert figures.shared_out(4) == RankFigures(2.0, 1.0, 0.5, 0.25, 4.0, 1.5)
