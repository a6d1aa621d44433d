"""Texts of ranks and ops: literals, round trips, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.plans.texts import format_counts, format_ops, format_ranks, parse_op_range, parse_ops, parse_ranks

RANKS = st.lists(st.integers(0, 50) | st.integers(0, 999_999), min_size=1, max_size=40)


@pytest.mark.parametrize(
    ("text", "ranks"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("4-5,0-1", (4, 5, 0, 1)), ("3,2,1", (3, 2, 1)), ("7,7", (7, 7))]
)
def test_ranks(text: str, ranks: tuple[int, ...]) -> None:
    assert parse_ranks(text) == ranks
    assert format_ranks(ranks) == text


@given(RANKS)
def test_ranks_round_trip(ranks: list[int]) -> None:
    assert parse_ranks(format_ranks(ranks)) == tuple(ranks)


@pytest.mark.parametrize(
    "text", ["", "a", "3-1", "-1", "0-", "0--1", "1,", " 1", "1.5", "0-9999999", "99999999", "٣", "1\n", 3, None, ["0"]]
)
def test_wrong_ranks_are_refused(text: object) -> None:
    with pytest.raises(InputError):
        parse_ranks(text)


def test_counts() -> None:
    assert format_counts((12, 12, 4)) == "2 × 12 + 1 × 4" and format_counts((3, 1, 3)) == "1 × 3 + 1 × 1 + 1 × 3"
    assert format_counts((8,)) == "1 × 8"


def test_ops() -> None:
    assert parse_op_range("0:49") == (0, 49)
    assert parse_ops("1:9,9:17") == ((1, 9), (9, 17))
    assert parse_ops("") == ()
    assert format_ops((1, 9), (9, 17)) == "1:9,9:17"
    assert format_ops() == ""


@pytest.mark.parametrize("text", ["0-49", "0", ":", "0:", "0:1:2", "-1:3", "0:1,", [0, 49], 7, None])
def test_wrong_ops_are_refused(text: object) -> None:
    with pytest.raises(InputError, match="FIRST:END"):
        parse_ops(text)
    with pytest.raises(InputError, match="FIRST:END"):
        parse_op_range(text)
