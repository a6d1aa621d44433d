"""Greedy and adaptive schedules: against a slow twin, complete, within memory, and as short as they should be."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.greedy import SlowGreedy

from penstock.errors import InfeasibleError, InputError
from penstock.ordering.adaptive import adaptive
from penstock.ordering.greedy import Greed, _as_schedule, _run, best_greedy, checked_order, greedy
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule, format_schedule
from penstock.schedules.orders import one_forward_one_backward, with_depths
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import execute
from penstock.timing.order_memory import in_flight, order_peak_bytes
from penstock.timing.simulator import simulate
from penstock.timing.workload import Workload, split_backward, workload_of


def random_workload(seed: int) -> Workload:
    """Any placement, any times; limits hold at least one micro-batch at a time, whichever it is."""
    source, numbers = random.Random(seed), np.random.default_rng(seed)
    devices, count = source.randint(1, 4), source.randint(1, 7)
    stages = devices * source.choice([1, 1, 2, 3])
    placement = [*range(devices), *(source.randrange(devices) for _ in range(stages - devices))]
    source.shuffle(placement)
    whole = numbers.integers(0, 2) == 0

    def draw(*shape: int) -> np.ndarray:
        return numbers.integers(0, 4, shape).astype(float) if whole else numbers.random(shape)

    stored, workspace, base = draw(stages, count), draw(4, stages, count) / 4, draw(devices)
    alone = np.zeros((devices, count))
    np.add.at(alone, placement, stored)
    largest = np.array([workspace[:, [s for s, own in enumerate(placement) if own == d]].max(axis=1).max(axis=0) for d in range(devices)])
    limit = base + (alone + largest).max(axis=1) + source.choice([0.0, 0.5, 2.0])
    return workload_of(
        draw(4, stages, count), draw(2, stages - 1, count), devices=placement, stored_bytes=stored, waiting_bytes=stored / 2,
        workspace_bytes=workspace, base_bytes=base, limit_bytes=limit,
    )  # fmt: skip


def random_greed(seed: int, workload: Workload) -> Greed:
    source = random.Random(seed + 1)
    depths = tuple(source.randint(1, 4) for _ in range(workload.num_stages)) if source.random() < 0.4 else ()
    first, weights = source.choice(["forward", "backward", "alternate"]), source.choice(["soon", "last", "for memory"])
    return Greed(source.random() < 0.6, first, weights, source.choice([0.0, 0.3, 2.0]), depths)  # type: ignore[arg-type]


def assert_complete(schedule: Schedule, workload: Workload, kinds: tuple[int, ...]) -> None:
    """Every action once, on the device of its stage, within memory, and nothing waits for ever."""
    actions = sorted(action for device in schedule for action in device)
    stages, count = range(workload.num_stages), range(workload.num_micro_batches)
    assert actions == sorted(Action(stage, kind, m) for stage in stages for kind in kinds for m in count)
    assert (order_peak_bytes(schedule, workload) <= workload.limit_bytes * (1 + 1e-9)).all()
    assert execute(schedule, workload).violation is None


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_greedy_equals_the_slow_twin(seed: int) -> None:
    workload = random_workload(seed)
    greed, order = random_greed(seed, workload), random.Random(seed).sample(range(workload.num_micro_batches), workload.num_micro_batches)
    for reserve in (False, True):
        found, slow = _run(workload, greed, checked_order(order, len(order)), reserve), SlowGreedy(workload, greed, order, reserve)
        assert (None if found is None else _as_schedule(found)) == slow.run()
        assert found is None or found.makespan_s == max(slow.free) == _time(_as_schedule(found), workload)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_greedy_is_complete_and_within_memory(seed: int) -> None:
    workload = random_workload(seed)
    greed = random_greed(seed, workload)
    kinds = (FORWARD, INPUT_GRAD, WEIGHT_GRAD) if greed.split else (FORWARD, BACKWARD)
    assert_complete(greedy(workload, greed), workload, kinds)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=150, deadline=None)
def test_adaptive_is_complete_and_within_memory(seed: int) -> None:
    workload = random_workload(seed)
    order = random.Random(seed).sample(range(workload.num_micro_batches), workload.num_micro_batches)
    schedule = adaptive(workload, order)
    assert_complete(schedule, workload, (FORWARD, BACKWARD))
    first = [action.micro_batch for action in schedule[workload.devices[0]] if action[:2] == (0, FORWARD)]
    assert first == order


def test_adaptive_is_the_drawn_table() -> None:
    assert format_schedule(adaptive(workload_of(np.ones((2, 3, 5))))) == (
        "0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4\n1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4"
    )


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_adaptive_runs_ahead_nearly_twice_as_far_as_1f1b(stages: int) -> None:
    schedule, depths = adaptive(workload_of(np.ones((2, stages, 40)))), [2 * left - 1 for left in range(stages, 0, -1)]
    assert schedule == with_depths(depths, 40) and in_flight(schedule).by_stage == tuple(depths)


def test_adaptive_within_1f1b_memory_holds_no_more() -> None:
    limits = [4.0, 3.0, 2.0, 1.0]
    schedule = adaptive(workload_of(np.ones((2, 4, 9)), stored_bytes=1, limit_bytes=limits))
    assert in_flight(schedule).by_stage == (4, 3, 2, 1)


def test_adaptive_hides_unequal_costs_better_than_1f1b() -> None:
    wins = 0
    for seed in range(20):
        times = np.tile(np.random.default_rng(seed).lognormal(0, 0.6, 32), (4, 1))
        workload = workload_of(np.stack([times, 2 * times]))
        strict, loose = one_forward_one_backward(4, 32), adaptive(workload)
        wins += _time(loose, workload) < _time(strict, workload)
    assert wins >= 16


def _time(schedule: Schedule, workload: Workload) -> float:
    return simulate(schedule, workload.durations_s, workload.transfers_s).makespan_s


@given(stages=st.integers(2, 6), count=st.integers(1, 14), forward=st.floats(0.5, 2), inputs=st.floats(0.5, 2), weights=st.floats(0.2, 1))
@example(stages=3, count=4, forward=2.0, inputs=1.0, weights=0.25)
@settings(max_examples=60, deadline=None)
def test_zero_bubble_beats_1f1b_with_its_memory(stages: int, count: int, forward: float, inputs: float, weights: float) -> None:
    """Equal stages, weight gradients no longer than the rest: within 1F1B's fullest stage everywhere, the fixed order is shorter, and what
    is made greedily, which looks no further than the next action, at least not longer."""
    ones = np.ones((stages, count))
    durations = split_backward(np.stack([forward * ones, (inputs + weights) * ones]), weights)
    workload = workload_of(durations, stored_bytes=1, limit_bytes=min(stages, count))
    strict = _time(one_forward_one_backward(stages, count), workload)
    fixed, made = schedule_of("zero-bubble", stages, count), best_greedy(workload)
    assert order_peak_bytes(fixed, workload).max() <= min(stages, count) and order_peak_bytes(made, workload).max() <= min(stages, count)
    assert _time(fixed, workload) < strict - 1e-9 and _time(made, workload) <= strict + 1e-9


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 6, 8])
def test_more_memory_never_makes_greedy_longer(limit: int) -> None:
    ones = np.ones((4, 8))
    durations = split_backward(np.stack([ones, 2 * ones]), 1.0)
    times = [_time(best_greedy(workload_of(durations, stored_bytes=1, limit_bytes=held)), workload_of(durations)) for held in (limit, 8)]
    assert times[0] >= times[1] and (limit < 4 or times[0] == 3 * 8 + 3)


def test_what_never_fits_is_told_with_its_numbers() -> None:
    workload = workload_of(np.ones((2, 2, 3)), stored_bytes=[[1, 5, 1], [1, 2, 1]], base_bytes=2, limit_bytes=6)
    for make in (greedy, adaptive):
        with pytest.raises(InfeasibleError, match="device 0 needs 7 bytes for micro-batch 1 alone, its limit is 6"):
            make(workload)


def test_wrong_orders_and_missing_times_are_refused() -> None:
    workload = workload_of(np.ones((2, 2, 3)))
    with pytest.raises(InputError, match="each of 3 micro-batches once"):
        adaptive(workload, [0, 1, 1])
    with pytest.raises(InputError, match="F and B alone"):
        greedy(workload, Greed(split=True))
    for depths in ((0, 1), (1, 1, 1)):
        with pytest.raises(InputError, match="for each of 2 stages"):
            greedy(workload, Greed(depths=depths))


def test_a_split_backward_pass_may_fit_where_a_whole_one_does_not() -> None:
    """The workspace of B is above the limit, those of I and W are not."""
    workspace = np.array([1.0, 5.0, 2.0, 2.0])[:, None, None]
    workload = workload_of(np.ones((4, 2, 3)), stored_bytes=1, workspace_bytes=workspace, limit_bytes=4)
    assert_complete(best_greedy(workload), workload, (FORWARD, INPUT_GRAD, WEIGHT_GRAD))
    with pytest.raises(InfeasibleError):
        greedy(workload)


def test_what_fits_nowhere_is_told_with_all_that_it_needs() -> None:
    """Weights, what a micro-batch holds on all stages of its device, and the fullest moment of a pass."""
    stored, workspace = np.array([[1.0, 5.0], [2.0, 6.0]]), np.zeros((4, 2, 2))
    workspace[1, 1, 1] = 30.0
    workload = workload_of(np.ones((2, 2, 2)), np.zeros((2, 1, 2)), devices=[0, 0], stored_bytes=stored, workspace_bytes=workspace,
                           base_bytes=np.array([100.0]), limit_bytes=np.array([120.0]))  # fmt: skip
    with pytest.raises(InfeasibleError, match="device 0 needs 141 bytes for micro-batch 1 alone, its limit is 120"):
        greedy(workload)
