"""The shuffle with random access: a bijection, another one for each seed, without a pattern."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.permutation import shuffled


@given(size=st.integers(1, 3000), seeds=st.lists(st.integers(-(2**70), 2**70), max_size=3))
def test_every_value_comes_once_whatever_is_asked_for(size: int, seeds: list[int]) -> None:
    order = shuffled(np.arange(size), size, *seeds)
    assert sorted(order.tolist()) == list(range(size))
    some = np.arange(0, size, 7)[::-1]
    assert (shuffled(some, size, *seeds) == order[some]).all()


def test_orders_differ_by_seed_and_epoch() -> None:
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_orders_are_the_same_for_ever() -> None:
    assert shuffled(np.arange(10), 10, 1, 2).tolist() == shuffled(range(10), 10, 1, 2).tolist()
    assert shuffled(np.arange(6), 10**12, 7).tolist() == FIRST_OF_A_TRILLION


def test_every_place_is_as_likely_for_every_value() -> None:
    counts = np.zeros((7, 7))
    for seed in range(4000):
        counts[np.arange(7), shuffled(np.arange(7), 7, seed)] += 1
    expected = 4000 / 7
    assert ((counts - expected) ** 2 / expected).sum() < 80  # 36 degrees of freedom: beyond 80 once in 30 thousand


def test_neighbours_are_not_related() -> None:
    order = shuffled(np.arange(100_000), 100_000, 3)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


FIRST_OF_A_TRILLION = [295385436540, 144521338547, 873009209516, 410571390254, 77124923422, 198832643933]
