"""Schedules against tables drawn by hand, and what any schedule must hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plans.inflight import in_flight
from penstock.schedules.actions import FORWARD, Action, format_schedule, parse_schedule
from penstock.schedules.orders import gpipe, one_forward_one_backward, schedule_of


def test_1f1b_is_the_drawn_table() -> None:
    assert format_schedule(one_forward_one_backward(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_gpipe_is_the_drawn_table() -> None:
    assert format_schedule(gpipe(2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 12))
def test_every_action_once_and_text_round_trips(name: str, stages: int, micro_batches: int) -> None:
    schedule = schedule_of(name, stages, micro_batches)
    actions = [action for device in schedule for action in device]
    assert sorted(actions) == sorted(Action(s, k, m) for s in range(stages) for k in (0, 1) for m in range(micro_batches))
    assert parse_schedule(format_schedule(schedule)) == schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(stages=st.integers(1, 9), micro_batches=st.integers(1, 12))
def test_micro_batches_in_flight_are_as_planned(name: str, stages: int, micro_batches: int) -> None:
    for stage, actions in enumerate(schedule_of(name, stages, micro_batches)):
        held, most = 0, 0
        for action in actions:
            held += 1 if action.kind == FORWARD else -1
            most = max(most, held)
        assert most == in_flight(name, stages, stage, micro_batches)


def test_unknown_names_and_bad_texts_are_refused() -> None:
    with pytest.raises(InputError, match="1f1b"):
        schedule_of("1f1", 2, 2)
    with pytest.raises(InputError, match="2X0"):
        parse_schedule("0F0 2X0")
