"""Micro-batch sizes that a search tries: whatever divides a replica's share, so that no plan of another size is below its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.search import search_plans
from penstock.search.space.request import micro_batch_sizes


def test_all_sizes_that_divide_the_share() -> None:
    assert micro_batch_sizes(60, 1, ()) == [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]
    assert micro_batch_sizes(60, 4, ()) == [1, 3, 5, 15] and micro_batch_sizes(60, 7, ()) == []
    assert micro_batch_sizes(64, 2, ()) == [1, 2, 4, 8, 16, 32]
    assert micro_batch_sizes(60, 1, (8, 5, 5, 20)) == [5, 20]


@given(st.integers(1, 10**6))
def test_of_many_sizes_none_is_far_from_one_that_is_tried(batch: int) -> None:
    sizes, every = micro_batch_sizes(batch, 1, ()), [size for size in range(1, min(batch, 3000) + 1) if batch % size == 0]
    assert sizes == sorted(set(sizes)) and all(batch % size == 0 for size in sizes) and sizes[0] == 1
    assert all(any(size / 1.3 < tried < size * 1.3 for tried in sizes) for size in every)
    assert {size for size in every if size.bit_count() == 1} <= set(sizes)


@pytest.mark.parametrize(("model", "cluster", "batch", "size"), [("gpt2", "3xa100-40gb", 60, 20), ("bert-large", "4xa100-40gb", 60, 15)])
def test_no_size_that_might_be_given_beats_the_search_without_it(model: str, cluster: str, batch: int, size: int) -> None:
    free, told = search_plans(model, cluster, batch, top=1), search_plans(model, cluster, batch, micro_batches=(size,), top=1)
    assert free.choices[0].estimate.time_s <= told.choices[0].estimate.time_s * 1.001
    assert free.bound_s <= told.formula_s
