"""What a planned batch holds at its fullest moment, counted by hand."""

from __future__ import annotations

import numpy as np

from penstock.batching.result import peak_bytes
from penstock.schedules.orders import one_forward_one_backward


def test_the_fullest_moment_of_each_stage() -> None:
    """F0 F1 B0 B1 on stage 0, F0 B0 F1 B1 on stage 1; (stored, peak of the forward, of the backward pass) are alike on both."""
    chosen = np.zeros((2, 2, 5))
    chosen[:, 0, 2:], chosen[:, 1, 2:] = (10, 12, 15), (20, 21, 40)
    # 1000 + 10 + 20 before B0, which adds at most 15 to the 20 of the other; then 40 for B1 alone.
    assert peak_bytes(one_forward_one_backward(2, 2), chosen, np.array([1000.0, 500.0])) == (1040, 540)
    chosen[:, 1, 2:] = (20, 33, 10)
    assert peak_bytes(one_forward_one_backward(2, 2), chosen, np.array([1000.0, 500.0])) == (1000 + 10 + 33, 500 + 33)
