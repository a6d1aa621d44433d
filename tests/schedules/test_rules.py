"""What the records say of their schedules holds for the orders that they give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.schedules.actions import BACKWARD, WEIGHT_GRAD
from penstock.schedules.rules import CHUNKED_SCHEDULE, DEFAULT_SCHEDULE, SCHEDULES, SEARCHED_SCHEDULES, schedule_of, unchunked
from penstock.timing.order_memory import in_flight
from penstock.timing.simulator import simulate


@given(name=st.sampled_from(list(SCHEDULES)), groups=st.integers(1, 7), chunks=st.integers(2, 4), rounds=st.integers(1, 4))
def test_the_order_holds_as_many_micro_batches_as_the_record_says(name: str, groups: int, chunks: int, rounds: int) -> None:
    rules, count = SCHEDULES[name], groups * rounds
    chunks = chunks if rules.chunked else 1
    held = in_flight(schedule_of(name, groups * chunks, count, chunks)).by_stage
    assert [held[group::groups] for group in range(groups)] == [rules.in_flight(groups, group, count, chunks) for group in range(groups)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_order_has_the_passes_that_the_record_says(name: str) -> None:
    rules = SCHEDULES[name]
    kinds = {action.kind for actions in schedule_of(name, 4, 4, 2) for action in actions}
    assert (WEIGHT_GRAD in kinds) == rules.splits_backward and (BACKWARD in kinds) != rules.splits_backward
    assert len(schedule_of(name, 4, 4, 2)) == (2 if rules.chunked else 4)
    assert rules.fill_relief == 0 or rules.splits_backward
    assert rules.name == name and rules.about.endswith(".")


@pytest.mark.parametrize(
    ("schedule", "times_s", "count", "chunks", "weight_s", "expected"),
    [
        ("1f1b", [3.0], 4, 1, [], 12.0),
        ("1f1b", [1.0, 2.0, 1.0], 4, 1, [], 10.0),
        ("gpipe", [1.0, 2.0, 1.0], 4, 1, [], 10.0),
        ("interleaved", [2.0, 2.0], 4, 2, [], 9.0),  # 1f1b: 10, of which 2 are bubble
        ("zero-bubble", [3.0, 3.0], 4, 1, [1.0, 1.0], 13.0),  # F = B = W = 1: the bubble falls from 3 to 1
        ("zero-bubble", [3.0, 1.0], 4, 1, [1.0, 0.6], 12.0),  # and never below nothing
        ("pipedream", [1.0, 2.0, 1.0], 4, 1, [], 8.2),  # filled and drained once in ten batches
        ("pipedream", [1.0, 2.0, 1.0], 100, 1, [], 201.0),  # in two
    ],
)
def test_pipeline_by_hand(schedule: str, times_s: list[float], count: int, chunks: int, weight_s: list[float], expected: float) -> None:
    assert SCHEDULES[schedule].pipeline_s(times_s, count, chunks, weight_s) == pytest.approx(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_closed_formula_is_what_the_clock_says_of_equal_stages(name: str) -> None:
    """Without messages; a schedule with a bubble of its own shows here that the formula lacks a term."""
    rules, groups = SCHEDULES[name], 4
    chunks = 2 if rules.chunked else 1
    for of_batch in (4, 8, 16) if rules.chunked else (1, 2, 3, 4, 7, 16, 150):
        window = rules.window(groups, of_batch)
        count = window * of_batch
        forward, weight = np.ones((groups * chunks, count)), np.ones((groups * chunks, count))
        passes = np.stack([forward, 2 * forward, forward, weight]) if rules.splits_backward else np.stack([forward, 2 * forward])
        order = schedule_of(name, groups * chunks, count, chunks)
        clock_s = simulate(order, passes, np.zeros((2, groups * chunks - 1, count))).makespan_s / window
        assert rules.pipeline_s([3.0 * chunks] * groups, of_batch, chunks, [1.0 * chunks] * groups) == pytest.approx(clock_s, rel=1e-9)


def test_names() -> None:
    assert {"1f1b", "interleaved", "zero-bubble"} <= set(SEARCHED_SCHEDULES) and "gpipe" not in SEARCHED_SCHEDULES
    assert (DEFAULT_SCHEDULE, CHUNKED_SCHEDULE) == ("1f1b", "interleaved")
    assert unchunked(["1f1b", "interleaved", "zero-bubble"]) == ["zero-bubble", "1f1b"] and unchunked(["interleaved"]) == []
    assert [SCHEDULES[name].plain for name in ("1f1b", "gpipe", "interleaved", "zero-bubble", "pipedream")] == [True] * 2 + [False] * 3


def test_unknown_names_and_stages_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InputError, match="1f1b"):
        schedule_of("1f1", 2, 2)
    with pytest.raises(InputError, match="5 stages cannot be 2 chunks"):
        schedule_of("interleaved", 5, 2, 2)


def test_batches_of_very_many_micro_batches_fill_a_pipeline_each_by_itself() -> None:
    """And of few, as many run without a break as make up for it."""
    rules = SCHEDULES["pipedream"]
    counts = [rules.window(4, count) for count in (1, 3, 10**6)]
    assert counts[0] >= counts[1] > counts[2] == 1
    assert rules.pipeline_s([1.0] * 4, 10**6) == 10**6 + 3
