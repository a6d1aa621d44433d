"""Texts of ranks and ops: literals, round trips, refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.models import resolve_model
from penstock.plans.texts import described_ops, format_counts, format_ops, format_ranks, parse_op_range, parse_ops, parse_ranks

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


def test_ops_are_described_in_the_words_of_their_model() -> None:
    model = resolve_model("gpt-1.3b")  # the embedding, then 24 layers of 8 ops, then the head's three
    attention = [1 + 8 * layer + 2 for layer in range(3, 20)]
    assert described_ops(model, attention) == "layers 3–19: attention"
    assert described_ops(model, range(1, 1 + 8 * 24)) == "layers 0–23"
    assert described_ops(model, [*range(17, 24), *range(25, 32), 193]) == "layers 2–3: all but down; head: norm"
    assert described_ops(model, [0, *range(9, 17)]) == "embedding; layers 1"
    assert described_ops(model, []) == ""
    scattered = [1 + 8 * layer for layer in range(0, 24, 2)]  # no two layers in a row
    assert described_ops(model, scattered) == "layers 0: norm1; layers 2: norm1; layers 4: norm1; layers 6: norm1; 8 more ops"
