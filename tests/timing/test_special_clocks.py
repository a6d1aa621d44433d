"""Clocks for special cases tell what the two clocks tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedules.orders import one_forward_one_backward, with_depths
from penstock.timing.execution import execute
from penstock.timing.simulator import simulate
from penstock.timing.special_clocks import run_ahead, run_alike
from penstock.timing.workload import workload_of


@given(st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=150, deadline=None)
def test_running_ahead_is_the_event_clock(seed: int, slow_links: bool) -> None:
    numbers = np.random.default_rng(seed)
    count, stages = int(numbers.integers(1, 9)), int(numbers.integers(1, 6))
    ahead = np.sort(numbers.integers(1, 8, stages))[::-1].copy()
    forward, backward = numbers.random((2, count, stages))
    hop = numbers.random((count, 2, max(stages - 1, 1))) * (3.0 if slow_links else 0.3)
    found = run_ahead(count, ahead, forward, backward, hop, np.empty((count, 2, stages)))
    work = workload_of(np.stack([forward.T, backward.T]), np.moveaxis(hop[:, :, : stages - 1], 0, 2), contention="device")
    assert found == pytest.approx(execute(with_depths(ahead.tolist(), count), work).pipeline_s, rel=1e-12)


@given(
    st.lists(st.floats(0.01, 5), min_size=1, max_size=7), st.lists(st.floats(0, 3), min_size=6, max_size=6), st.integers(1, 12),
)  # fmt: skip
@settings(deadline=None)
def test_micro_batches_alike_are_the_fixed_order_clock(compute: list[float], hops: list[float], count: int) -> None:
    stages, ends = len(compute), np.zeros(len(compute))
    run_alike(np.array(compute), np.array(hops[:stages]), count, ends)
    passes = np.array([[time / 3, 2 * time / 3] for time in compute]).T
    transfers = np.array([hops[: stages - 1]] * 2).reshape(2, stages - 1)
    timeline = simulate(
        one_forward_one_backward(stages, count), np.repeat(passes[:, :, None], count, axis=2),
        np.repeat(transfers[:, :, None], count, axis=2),
    )  # fmt: skip
    assert ends == pytest.approx(timeline.end_s[1].max(axis=1), rel=1e-12)
