"""What errors are worded with."""

from __future__ import annotations

import pytest

from penstock.errors import plural


@pytest.mark.parametrize(
    ("number", "noun", "told"),
    [
        (1, "micro-batch", "1 micro-batch"), (2, "micro-batch", "2 micro-batches"), (0, "more entry", "0 more entries"),
        (1_536, "sample", "1,536 samples"), (3, "process", "3 processes"),
    ],
)  # fmt: skip
def test_numbers_are_told_with_their_noun_in_the_singular_or_the_plural(number: int, noun: str, told: str) -> None:
    assert plural(number, noun) == told
