"""Positions that samples fill, and what a longest length cuts off, counted sample by sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock.data.filled import filled_positions
from penstock.data.forms import SampleForm


@dataclass
class Lengths:
    """A data set of which only lengths are asked."""

    lengths: list[Any] = field(default_factory=list)


INPUTS, TARGETS = np.array([5, 50, 8, 1]), np.array([3, 2, 30, 4])


@pytest.mark.parametrize(
    ("form", "sides", "longest", "own", "lost"),
    [
        (SampleForm("decoder", paired=False), [INPUTS], 20, [4, 20, 7, 0], 29),  # 21 tokens stay of 50
        (SampleForm("masked"), [INPUTS], 20, [5, 20, 8, 1], 30),
        (SampleForm("decoder"), [INPUTS, TARGETS], 20, [7, 20, 20, 4], (52 - 21) + (38 - 21)),
        (SampleForm("encoder-decoder"), [INPUTS, TARGETS], 20, [5, 20, 8, 1], (50 - 20) + (30 - 6)),
    ],
)
def test_what_is_filled_and_lost(form: SampleForm, sides: list[Any], longest: int, own: list[int], lost: int) -> None:
    found = filled_positions(form, Lengths(sides), longest, 6)  # type: ignore[arg-type]
    assert found.own.tolist() == own
    assert (found.tokens_lost, found.tokens) == (lost, sum(int(side.sum()) for side in sides))
    assert found.num_truncated == (2 if len(sides) == 2 else 1)
    if form.kind == "encoder-decoder":
        assert found.dec.tolist() == [3, 2, 6, 4]


def test_nothing_is_lost_where_all_fit() -> None:
    found = filled_positions(SampleForm("decoder", paired=False), Lengths([INPUTS]), 49, 0)  # type: ignore[arg-type]
    assert (found.num_truncated, found.tokens_lost, found.mean) == (0, 0, (4 + 49 + 7 + 0) / 4)


def test_images_are_never_cut() -> None:
    found = filled_positions(SampleForm("images"), Lengths([np.ones(3, np.int32)]), 0, 0)  # type: ignore[arg-type]
    assert (found.own.tolist(), found.num_truncated, found.tokens_lost) == ([1, 1, 1], 0, 0)
