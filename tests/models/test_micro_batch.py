"""Micro-batches: how their samples are divided, and the sizes of the parts."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Shape


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_shares_follow_each_other_and_are_even(lengths: list[int], dp: int, packed: bool) -> None:
    ids = tuple(range(len(lengths)))
    batch = MicroBatch(0, ids, "packed" if packed else "padded", tuple(lengths), row_length=0 if packed else max(lengths))
    bounds = batch.even_bounds(dp)
    assert len(bounds) == dp + 1 and bounds[0] == 0 and bounds[-1] == len(lengths) and list(bounds) == sorted(bounds)
    if packed:
        sums = [sum(lengths[first:last]) for first, last in pairwise(bounds)]
        assert max(sums) <= sum(lengths) / dp + max(lengths)
    else:
        sizes = [last - first for first, last in pairwise(bounds)]
        assert max(sizes) - min(sizes) <= 1


def test_shares_may_be_unequal() -> None:
    padded = MicroBatch(0, tuple(range(9)), "padded", (4,) * 9, row_length=4)
    assert padded.even_bounds(3, (1.0, 0.5, 0.5)) == (0, 5, 7, 9) and padded.even_bounds(2, (1.0, 0.01)) == (0, 9, 9)
    packed = MicroBatch(0, tuple(range(4)), "packed", (10, 20, 30, 60))
    assert packed.even_bounds(2, (0.5, 0.5)) == packed.even_bounds(2) == (0, 3, 4)
    assert packed.even_bounds(2, (1.0, 3.0)) == (0, 2, 4)
    assert MicroBatch(0, (0, 1), "packed", (5, 3)).even_bounds(2) == (0, 1, 2)  # nearest to its share, not below it


def test_rows_of_several_samples_are_shared_whole() -> None:
    batch = MicroBatch(0, (0, 1, 2, 3, 4), "padded", (5, 5, 9, 4, 4), row_length=10, row_sizes=(2, 1, 2))
    assert batch.shape() == Shape.padded(3, 10) and batch.num_rows == 3 and replace(batch, row_sizes=()).num_rows == 5
    assert batch.even_bounds(2) == (0, 3, 5)
    assert [replace(batch, bounds={2: (0, 3, 5)}).shape(2, index) for index in range(2)] == [Shape.padded(2, 10), Shape.padded(1, 10)]


def test_tokens_of_both_sides_are_shared_evenly() -> None:
    micro = MicroBatch(0, (0, 1, 2, 3), "packed", (1, 1, 1, 9), (9, 1, 1, 1))
    assert micro.even_bounds(2) == (0, 2, 4)  # 10 + 2 and 2 + 10
