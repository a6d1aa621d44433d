"""Small linear programmes, against a solver."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from penstock.search.partition.simplex_kernels import largest


@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 12), num=st.integers(1, 6))
def test_it_finds_what_a_solver_finds(seed: int, num_rows: int, num: int) -> None:
    """Bounded ones; where several corners are equally good, as with many zeros, any of them."""
    numbers = np.random.default_rng(seed)
    rows = np.concatenate([np.where(numbers.random((num_rows, num)) < 0.3, 0.0, numbers.normal(size=(num_rows, num))), np.eye(num)])
    right = np.concatenate([np.where(numbers.random(num_rows) < 0.3, 0.0, numbers.random(num_rows)), np.full(num, 5.0)])
    goal = numbers.normal(size=num)
    found = largest(goal, rows, right, 200)
    assert (found >= 0).all() and (rows @ found <= right + 1e-7).all()
    assert goal @ found == pytest.approx(-linprog(-goal, rows, right).fun, abs=1e-7)


def test_it_stops_after_so_many_steps() -> None:
    assert largest(np.ones(2), np.eye(2), np.ones(2), 1).tolist() == [1.0, 0.0]
