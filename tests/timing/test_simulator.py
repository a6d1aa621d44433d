"""The compiled simulator against its slow twin, hand computations and bounds."""

from __future__ import annotations

import random

import numpy as np
import pytest
from counted_work import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.simulator import simulate_slowly

from penstock.errors import InputError
from penstock.schedules.actions import Schedule, parse_schedule
from penstock.schedules.orders import gpipe, one_forward_one_backward
from penstock.schedules.rules import schedule_of
from penstock.timing.simulator import as_arrays, simulate
from penstock.timing.workload import read_only


def random_case(seed: int) -> tuple[Schedule, np.ndarray, np.ndarray]:
    """A random order of a random pipeline, which may well deadlock; sometimes two stages share a device, or passes are split."""
    source = random.Random(seed)
    stages, micro_batches = source.randint(1, 5), source.randint(1, 6)
    name = source.choice(["gpipe", "1f1b", "zero-bubble"])
    schedule = list(schedule_of(name, stages, micro_batches))
    if stages > 1 and source.random() < 0.3:
        merged = schedule.pop() + schedule.pop()
        schedule.append(tuple(source.sample(merged, len(merged))))
    elif source.random() < 0.3:
        device = source.randrange(stages)
        schedule[device] = tuple(source.sample(schedule[device], len(schedule[device])))
    numbers = np.random.default_rng(seed)
    kinds = 4 if name == "zero-bubble" else source.choice([2, 4])
    return tuple(schedule), numbers.random((kinds, stages, micro_batches)), numbers.random((2, stages - 1, micro_batches))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_equals_the_slow_twin(seed: int) -> None:
    schedule, durations, transfers = random_case(seed)
    slow = simulate_slowly(schedule, durations.tolist(), transfers.tolist())
    if len(slow) < sum(map(len, schedule)):
        with pytest.raises(InputError, match="deadlocks"):
            simulate(schedule, durations, transfers)
        return
    timeline = simulate(schedule, durations, transfers)
    for (kind, stage, m), (start, end) in slow.items():
        assert (timeline.start_s[kind, stage, m], timeline.end_s[kind, stage, m]) == (start, end)


def equal_stages(num_stages: int, count: int, *seconds: float) -> np.ndarray:
    """The same durations of each kind everywhere."""
    return np.stack([np.full((num_stages, count), time_s) for time_s in seconds])


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 16), forward=st.floats(0.1, 9), backward=st.floats(0.1, 9))
def test_equal_stages_take_the_closed_formula(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    durations, transfers = equal_stages(stages, micro_batches, forward, backward), np.zeros((2, stages - 1, micro_batches))
    for schedule in (one_forward_one_backward(stages, micro_batches), gpipe(stages, micro_batches)):
        assert simulate(schedule, durations, transfers).makespan_s == pytest.approx((micro_batches + stages - 1) * (forward + backward))


@given(devices=st.integers(1, 6), chunks=st.integers(1, 4), rounds=st.integers(1, 4), forward=st.floats(0.1, 9), backward=st.floats(0.1, 9))
def test_interleaving_divides_the_bubble_by_the_chunks(devices: int, chunks: int, rounds: int, forward: float, backward: float) -> None:
    stages, count = devices * chunks, devices * rounds
    durations = equal_stages(stages, count, forward / chunks, backward / chunks)
    found = simulate(schedule_of("interleaved", stages, count, chunks), durations, np.zeros((2, stages - 1, count)))
    assert found.makespan_s == pytest.approx((count + (devices - 1) / chunks) * (forward + backward))


@given(stages=st.integers(1, 6), more=st.integers(0, 12), forward=st.floats(1, 9), inputs=st.floats(1, 9), weights=st.floats(0.1, 1))
def test_zero_bubble_takes_weights_out_of_the_bubble_twice(stages: int, more: int, forward: float, inputs: float, weights: float) -> None:
    count = stages + more
    durations = equal_stages(stages, count, forward, inputs + weights, inputs, weights)
    found = simulate(schedule_of("zero-bubble", stages, count), durations, np.zeros((2, stages - 1, count)))
    assert found.makespan_s == pytest.approx(count * (forward + inputs + weights) + (stages - 1) * (forward + inputs - weights))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_never_faster_than_its_bounds(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    stages, micro_batches = int(numbers.integers(1, 6)), int(numbers.integers(1, 9))
    durations, transfers = numbers.random((2, stages, micro_batches)), numbers.random((2, stages - 1, micro_batches))
    timeline = simulate(one_forward_one_backward(stages, micro_batches), durations, transfers)
    path = durations.sum(axis=(0, 1)) + transfers.sum(axis=(0, 1))
    assert timeline.makespan_s >= max(timeline.busy_s().max(), path.max()) - 1e-9
    assert np.allclose(timeline.busy_s(), durations.sum(axis=(0, 2)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    schedule = one_forward_one_backward(2, 2)
    with pytest.raises(InputError, match="expected"):
        simulate(schedule, np.ones((2, 2, 2)), np.ones((2, 2, 2)))
    with pytest.raises(InputError, match="beyond"):
        simulate(parse_schedule("5F0"), np.ones((2, 2, 2)), np.ones((2, 1, 2)))


def test_a_deadlock_names_the_action_that_waits() -> None:
    with pytest.raises(InputError, match="0B0"):
        simulate(parse_schedule("0B0 0F0"), np.ones((2, 1, 1)), np.ones((2, 0, 1)))


def test_no_action_is_left_to_python() -> None:
    """A thousand times the actions, and the same few calls; `benchmarks/simulator.py` says how many a second."""
    from penstock.timing.clock import Orders, run_orders

    def calls(count: int) -> int:
        orders = Orders(*as_arrays(one_forward_one_backward(8, count)))
        durations, transfers = read_only(np.ones((2, 8, count))), read_only(np.ones((2, 7, count)))
        start, end = np.full(durations.shape, np.inf), np.empty(durations.shape)
        return counted_calls(lambda: run_orders(orders, durations, transfers, start, end))

    assert calls(4096) == calls(4) < 10
