"""Micro-batches in flight: the table of the docstring as literals, and the bounds that hold for all sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedules.in_flight import all_held, as_many_as_groups, as_stages_left, by_chunk, warm_up
from penstock.schedules.rules import SCHEDULES


@pytest.mark.parametrize(
    ("held", "num_micro_batches", "num_chunks", "expected"),
    [
        (all_held, 8, 1, [(8,), (8,), (8,), (8,)]),
        (as_stages_left, 8, 1, [(4,), (3,), (2,), (1,)]),
        (as_stages_left, 2, 1, [(2,), (2,), (2,), (1,)]),
        (as_many_as_groups, 8, 1, [(4,), (4,), (4,), (4,)]),
        (by_chunk, 8, 2, [(8, 4), (8, 4), (7, 3), (5, 1)]),
    ],
)
def test_four_groups(
    held: Callable[[int, int, int, int], tuple[int, ...]], num_micro_batches: int, num_chunks: int, expected: list[tuple[int, ...]]
) -> None:
    assert [held(4, group, num_micro_batches, num_chunks) for group in range(4)] == expected


def test_by_chunk() -> None:
    # Group 1 of 2, two chunks, four micro-batches: F0 F0 F1 B1 F1 B1 F0 B0 F0 B0 F1 B1 F1 B1 B0 B0.
    assert by_chunk(2, 1, 4, 2) == (3, 1)
    assert by_chunk(2, 0, 4, 2) == (4, 2)


def test_warm_up_is_that_of_megatron() -> None:
    assert [warm_up(4, group, 2) for group in range(4)] == [10, 8, 6, 4]


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 12), st.integers(1, 30), st.integers(1, 4), st.data())
def test_never_more_than_there_are(schedule: str, groups: int, micro_batches: int, chunks: int, data: st.DataObject) -> None:
    group, held = data.draw(st.integers(0, groups - 1)), SCHEDULES[schedule].in_flight
    chunks = chunks if SCHEDULES[schedule].chunked else 1
    found, most = held(groups, group, micro_batches, chunks), SCHEDULES[schedule].window(groups, micro_batches) * micro_batches
    assert len(found) == chunks and all(1 <= number <= most for number in found)
    if group:
        assert all(own <= before for own, before in zip(found, held(groups, group - 1, micro_batches, chunks), strict=True))


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 4), st.data())
def test_chunks_together_hold_at_least_what_a_group_runs_ahead(groups: int, count: int, chunks: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, groups - 1))
    assert sum(by_chunk(groups, group, count, chunks)) >= min(count * chunks, warm_up(groups, group, chunks) + 1)
