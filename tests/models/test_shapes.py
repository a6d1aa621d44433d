"""Sizes of micro-batches, and amounts that are linear in them: what is divided among tensor-parallel ranks, and what is not."""

from __future__ import annotations

import pytest

from penstock.models.shapes import Form, Quantity, Shape


def test_squares_of_each_side_and_across() -> None:
    assert Shape.padded(2, 3, 5) == Shape(2, 6, 18, 10, 50, 30)
    assert Shape.packed([2, 3], [5, 1]) == Shape(2, 5, 13, 6, 26, 13, "packed")
    assert Shape.images(7).features == (1, 7, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_every_rank_has_is_not_divided(tp: int) -> None:
    """However it is asked for."""
    shape = Shape.padded(2, 8)
    amount = Quantity(whole=Form.of(tokens=3.0), split=Form.of(squares=4.0)) * 2 + Quantity(whole=Form.of(samples=1.0))
    assert amount.at(shape, tp) == amount.form(tp)(shape) == 2 * 3 * 16 + 2 + 2 * 4 * 128 / tp
