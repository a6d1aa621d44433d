"""What errors are worded with."""

from __future__ import annotations

import pytest

from penstock.errors import first_of, plural


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (1, "micro-batch", "1 micro-batch"), (2, "micro-batch", "2 micro-batches"), (0, "more entry", "0 more entries"),
        (1_536, "sample", "1,536 samples"), (3, "process", "3 processes"),
    ],
)  # fmt: skip
def test_numbers_are_told_with_their_noun_in_the_singular_or_the_plural(number: int, noun: str, told: str) -> None:
    assert plural(number, noun) == told


def test_of_many_texts_the_first_are_told_and_how_many_more_there_are() -> None:
    assert first_of(["a", "b", "c"], 2) == "a, b and 1 more" and first_of(["a", "b"], 2, "; ") == "a; b" and first_of([], 2) == ""
