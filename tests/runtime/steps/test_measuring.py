"""What a step took, by the clock that counts, and what a process without work says of its device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.steps.measuring import StepMeasures
from penstock.runtime.telemetry.figures import RankFigures


def measures_of(rank: Any, notes: list[str], **times: Any) -> StepMeasures:
    records: Any = SimpleNamespace(note_once=lambda topic, note: notes.append(note))
    loader: Any = SimpleNamespace(wait_s=5.0, data_wait_s=2.0)
    return StepMeasures(rank, loader, records, SimpleNamespace(), SimpleNamespace(**times), None)  # type: ignore[arg-type]


def paced(wall_s: float) -> PacedRank:
    """A rank of which nothing but its clock is known."""
    rank = PacedRank.__new__(PacedRank)
    rank.clock = SimpleNamespace(wall_s=wall_s, device_s=1.0, busy_s=0.5, expected_s=0.25, data_wait_s=0.125)  # type: ignore[assignment]
    return rank


def test_a_probe_is_held_against_the_first_one() -> None:
    took = iter([2.0, 3.0, 1.0])
    measures = measures_of(SimpleNamespace(probe_s=lambda step: next(took)), [])
    assert [measures.idle_figures(step) for step in range(3)] == [RankFigures(2.0, 2.0), RankFigures(3.0, 2.0), RankFigures(1.0, 2.0)]


def test_paced_devices_say_what_a_step_took_and_a_slow_machine_that_it_is_one() -> None:
    """Once it is warm."""
    for wall_s, step, is_told in ((1.3, 1, False), (1.3, 2, True), (1.1, 2, False)):
        notes: list[str] = []
        measures = measures_of(paced(wall_s), notes, first_iteration=2)
        assert measures._whole_s(step, 9.0) == 1.0 and bool(notes) == is_told
        assert measures._figures(9.0) == RankFigures(0.5, 0.25, 0.125, 0.0, 1.0)


def test_waits_are_told_apart_and_passes_held_against_what_was_predicted() -> None:
    measures = measures_of(SimpleNamespace(), [], passes_s=6.0)
    assert (measures._whole_s(7, 9.0), measures._figures(9.0), measures.lateness) == (9.0, RankFigures(), 0)
    assert measures._pace(RankFigures(8.0, 2.0), 3) == 2.0  # nobody has predicted anything
    given: list[Any] = []
    measures._meter = SimpleNamespace(refused=None, lateness=1, ended=lambda *some: given.append(some) or RankFigures(8.0, 2.0))  # type: ignore[assignment, func-returns-value]
    assert measures._figures(9.0) == RankFigures(8.0, 2.0) and given == [(9.0, 2.0, 3.0)] and measures.lateness == 1
    assert measures._pace(RankFigures(8.0, 2.0), 3) == pytest.approx(4.0) and measures._pace(RankFigures(8.0), 3) == 0.0
