"""Schedules against tables drawn by hand, and what any schedule must hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.ordering.injection import pyramid, reordered
from penstock.schedules.actions import FORWARD, Action, Schedule, format_schedule, parse_schedule
from penstock.schedules.in_flight import warm_up
from penstock.schedules.orders import gpipe, one_forward_one_backward, with_depths
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.order_memory import in_flight, order_peak_bytes
from penstock.timing.simulator import simulate
from penstock.timing.workload import workload_of

names = st.sampled_from(list(SCHEDULES))


def test_1f1b_is_the_drawn_table() -> None:
    assert format_schedule(one_forward_one_backward(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    )


def test_gpipe_is_the_drawn_table() -> None:
    assert format_schedule(gpipe(2, 3)) == "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2"


def test_interleaved_is_the_drawn_table() -> None:
    assert format_schedule(schedule_of("interleaved", 4, 4, 2)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


def test_zero_bubble_is_the_drawn_table() -> None:
    assert format_schedule(schedule_of("zero-bubble", 3, 5)) == (
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0I3 0W3 0I4 0W4\n"
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1F4 1I3 1W2 1I4 1W3 1W4\n"
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2F4 2I4 2W2 2W3 2W4"
    )


def test_depths_give_1f1b_gpipe_and_what_lies_between() -> None:
    assert with_depths([3, 2, 1], 6) == one_forward_one_backward(3, 6) and with_depths([9, 9, 6], 6) == gpipe(3, 6)
    assert format_schedule(with_depths([3, 1], 4)) == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"
    for wrong in ([1, 2], [2, 0], [3, 1, 2]):
        with pytest.raises(InputError, match="never grow along the pipeline"):
            with_depths(wrong, 4)


def assert_complete(schedule: Schedule, num_stages: int, num_micro_batches: int, kinds: tuple[int, ...]) -> None:
    """Every action once, and none waits for ever."""
    actions = [action for device in schedule for action in device]
    assert sorted(actions) == sorted(Action(s, k, m) for s in range(num_stages) for k in kinds for m in range(num_micro_batches))
    shape = num_stages, num_micro_batches
    assert simulate(schedule, np.ones((4, *shape)), np.zeros((2, shape[0] - 1, shape[1]))).makespan_s > 0


@given(name=names, devices=st.integers(1, 7), chunks=st.integers(1, 4), micro_batches=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_every_action_once_never_stuck_and_text_round_trips(name: str, devices: int, chunks: int, micro_batches: int) -> None:
    chunks = chunks if name == "interleaved" else 1
    schedule = schedule_of(name, devices * chunks, micro_batches, chunks)
    assert_complete(schedule, devices * chunks, micro_batches, (0, 2, 3) if name == "zero-bubble" else (0, 1))
    assert len(schedule) == devices and parse_schedule(format_schedule(schedule)) == schedule
    for device, actions in enumerate(schedule):
        assert {action.stage for action in actions} == set(range(device, devices * chunks, devices))


@given(depths=st.lists(st.integers(1, 12), min_size=1, max_size=6), micro_batches=st.integers(1, 12))
def test_falling_depths_are_held_and_never_stuck(depths: list[int], micro_batches: int) -> None:
    falling = sorted(depths, reverse=True)
    schedule = with_depths(falling, micro_batches)
    assert_complete(schedule, len(depths), micro_batches, (0, 1))
    assert in_flight(schedule).by_stage == tuple(min(depth, micro_batches) for depth in falling)


@given(name=st.sampled_from(["gpipe", "1f1b"]), stages=st.integers(1, 9), micro_batches=st.integers(1, 12))
def test_micro_batches_in_flight_are_as_planned(name: str, stages: int, micro_batches: int) -> None:
    wanted = tuple(SCHEDULES[name].in_flight(stages, stage, micro_batches, 1)[0] for stage in range(stages))
    assert in_flight(schedule_of(name, stages, micro_batches)).by_stage == wanted


@given(devices=st.integers(1, 7), chunks=st.integers(2, 4), micro_batches=st.integers(1, 20))
def test_interleaved_holds_no_more_than_planned(devices: int, chunks: int, micro_batches: int) -> None:
    """Exactly as much where micro-batches fill all rounds; a last round that is not full holds less."""
    held = in_flight(schedule_of("interleaved", devices * chunks, micro_batches, chunks))
    for device in range(devices):
        bound = min(micro_batches * chunks, warm_up(devices, device, chunks) + 1)
        by_chunk = SCHEDULES["interleaved"].in_flight(devices, device, micro_batches, chunks)
        assert held.by_device[device] <= bound and all(a <= b for a, b in zip(held.by_stage[device::devices], by_chunk, strict=True))
        if micro_batches % devices == 0:
            assert held.by_device[device] == bound and held.by_stage[device::devices] == by_chunk


@given(stages=st.integers(1, 8), micro_batches=st.integers(1, 20))
def test_zero_bubble_holds_what_1f1bs_first_stage_does(stages: int, micro_batches: int) -> None:
    held = in_flight(schedule_of("zero-bubble", stages, micro_batches))
    assert held.by_stage == (min(stages, micro_batches),) * stages
    assert held.waiting == tuple(min(stage + 1, micro_batches) for stage in range(stages))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_bytes_of_an_order_follow_its_actions(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    stages, count, name = int(numbers.integers(1, 6)), int(numbers.integers(1, 9)), str(numbers.choice(["gpipe", "1f1b", "zero-bubble"]))
    stored = numbers.random((stages, count))
    workload = workload_of(
        np.ones((4, stages, count)), stored_bytes=stored, waiting_bytes=stored / 3, workspace_bytes=numbers.random((4, stages, count)),
        base_bytes=numbers.random(stages),
    )  # fmt: skip
    schedule = schedule_of(name, stages, count)
    for actions, base, found in zip(schedule, workload.base_bytes, order_peak_bytes(schedule, workload), strict=True):
        level = peak = base
        for stage, kind, m in actions:
            level += stored[stage, m] if kind == FORWARD else 0.0
            peak = max(peak, level + workload.workspace_bytes[kind, stage, m])
            level -= stored[stage, m] * [0, 1, 2 / 3, 1 / 3][kind]
        assert found == pytest.approx(peak)


def test_micro_batches_change_places() -> None:
    assert format_schedule(reordered(gpipe(1, 3), [2, 0, 1])) == "0F2 0F0 0F1 0B2 0B0 0B1"
    times = np.array([[[5.0, 1.0, 3.0, 2.0, 4.0]]] * 2)
    assert pyramid(workload_of(times)) == [1, 2, 0, 4, 3]  # 1 3 5 4 2


def test_bad_texts_are_refused() -> None:
    for text in ("2X0", "F0", "1F", "1F-1", "١F٢", "1f0", "99999999999F0"):
        with pytest.raises(InputError, match="is not an action"):
            parse_schedule(f"0F0 {text}")


def test_idle_devices_and_blank_lines_survive_the_text() -> None:
    schedule = (one_forward_one_backward(1, 1)[0], ())
    assert format_schedule(schedule) == "0F0 0B0\n-" and parse_schedule("\n 0F0  0B0\n\n-\n") == schedule
