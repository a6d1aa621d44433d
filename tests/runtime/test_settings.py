"""Learning rates: the rise, the fall, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.errors import InputError
from penstock.runtime.settings import LearningRate


def test_it_rises_then_stays() -> None:
    rate = LearningRate(2.0, warmup_steps=4)
    assert [rate.at(step) for step in (0, 1, 3, 4, 1000)] == [0.5, 1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_it_falls_to_its_end_and_stays_there(decay: str) -> None:
    rate = LearningRate(1.0, warmup_steps=2, total_steps=12, decay=decay, end_share=0.1)  # type: ignore[arg-type]
    values = [rate.at(step) for step in range(2, 15)]
    assert values[0] == 1.0 and values[5] == pytest.approx(0.55) and values[10:] == pytest.approx([0.1] * 3)
    assert all(a >= b for a, b in pairwise(values))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InputError, match="learning rate is 0"):
        LearningRate(0.0)
    with pytest.raises(InputError, match=r"falls \(linear\) until step 5, but rises until step 5"):
        LearningRate(1.0, warmup_steps=5, total_steps=5, decay="linear")
