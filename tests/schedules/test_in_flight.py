"""Micro-batches in flight: the table of the docstring as literals, and the bounds that hold for all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedules.in_flight import SCHEDULES, in_flight, in_flight_by_chunk, warm_up


@pytest.mark.parametrize(
    ("schedule", "num_micro_batches", "num_chunks", "held"),
    [
        ("gpipe", 8, 1, [8, 8, 8, 8]),
        ("1f1b", 8, 1, [4, 3, 2, 1]),
        ("1f1b", 2, 1, [2, 2, 2, 1]),
        ("zero-bubble", 8, 1, [4, 4, 4, 4]),
        ("interleaved", 8, 2, [11, 9, 7, 5]),
        ("interleaved", 4, 2, [8, 8, 7, 5]),
        ("interleaved", 16, 3, [15, 13, 11, 9]),
    ],
)
def test_four_groups(schedule: str, num_micro_batches: int, num_chunks: int, held: list[int]) -> None:
    assert [in_flight(schedule, 4, group, num_micro_batches, num_chunks) for group in range(4)] == held


def test_by_chunk() -> None:
    # Group 1 of 2, two chunks, four micro-batches: F0 F0 F1 B1 F1 B1 F0 B0 F0 B0 F1 B1 F1 B1 B0 B0.
    assert in_flight_by_chunk(2, 1, 4, 2) == (3, 1)
    assert in_flight_by_chunk(2, 0, 4, 2) == (4, 2)


def test_warm_up_is_that_of_megatron() -> None:
    assert [warm_up(4, group, 2) for group in range(4)] == [10, 8, 6, 4]


@given(st.sampled_from(SCHEDULES), st.integers(1, 12), st.integers(1, 30), st.integers(1, 4), st.data())
def test_never_more_than_there_are(schedule: str, groups: int, micro_batches: int, chunks: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, groups - 1))
    chunks = chunks if schedule == "interleaved" else 1
    held = in_flight(schedule, groups, group, micro_batches, chunks)
    assert 1 <= held <= micro_batches * chunks
    if group:
        assert held <= in_flight(schedule, groups, group - 1, micro_batches, chunks)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(1, 4), st.data())
def test_chunks_together_hold_at_least_the_total(groups: int, micro_batches: int, chunks: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, groups - 1))
    by_chunk = in_flight_by_chunk(groups, group, micro_batches, chunks)
    assert sum(by_chunk) >= in_flight("interleaved", groups, group, micro_batches, chunks)
    assert all(1 <= held <= micro_batches for held in by_chunk)


@pytest.mark.parametrize("sizes", [(0, 0, 1, 1), (4, 4, 1, 1), (4, -1, 1, 1), (4, 0, 0, 1), (4, 0, 1, 0)])
def test_impossible_sizes(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        in_flight("1f1b", *sizes)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'dapple'"):
        in_flight("dapple", 4, 0, 8)
