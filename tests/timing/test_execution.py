"""The whole simulator against its slow twin, the fast path, and cases computed by hand."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import numpy as np
import pytest
from counted_work import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.events import SlowPipeline

from penstock.errors import InputError
from penstock.schedules.actions import Schedule, parse_schedule
from penstock.schedules.orders import gpipe, one_forward_one_backward
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import event_arrays, execute
from penstock.timing.order_memory import order_peak_bytes
from penstock.timing.simulator import simulate
from penstock.timing.workload import Workload, links_of, read_only, workload_of


def random_case(seed: int) -> tuple[Schedule, Workload]:
    """A random schedule of a random pipeline; times are often equal, often zero, and the order sometimes deadlocks."""
    source, numbers = random.Random(seed), np.random.default_rng(seed)
    devices, chunks, count = source.randint(1, 4), source.choice([1, 1, 2, 3]), source.randint(1, 6)
    name = source.choice(["interleaved"] if chunks > 1 else ["gpipe", "1f1b", "zero-bubble"])
    stages = devices * chunks
    schedule = list(schedule_of(name, stages, count, chunks))
    if source.random() < 0.15:
        device = source.randrange(devices)
        schedule[device] = tuple(source.sample(schedule[device], len(schedule[device])))

    def draw(*shape: int) -> np.ndarray:
        return numbers.random(shape) if source.random() < 0.5 else numbers.integers(0, 3, shape).astype(float)

    placement = [stage % devices for stage in range(stages)]
    stored = draw(stages, count)
    links = links_of(placement, source.choice(["none", "pair", "device"]))
    if source.random() < 0.3:
        links = numbers.integers(-1, max(1, links.size), links.shape)
    return tuple(schedule), workload_of(
        draw(4, stages, count), draw(2, stages - 1, count), devices=placement, contention=links,
        overlap=source.random() < 0.6, after_s=draw(stages), stored_bytes=stored, waiting_bytes=stored * 0.5,
        workspace_bytes=draw(4, stages, count), message_bytes=draw(2, stages - 1, count), base_bytes=draw(devices),
        limit_bytes=1 + 4 * draw(devices),
    )  # fmt: skip


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=400, deadline=None)
def test_equals_the_slow_twin(seed: int) -> None:
    schedule, workload = random_case(seed)
    slow = SlowPipeline(schedule, workload).run()
    if len(slow.spans) < sum(map(len, schedule)):
        with pytest.raises(InputError, match="deadlocks"):
            execute(schedule, workload)
        return
    found = execute(schedule, workload)
    assert {action: found.span_s(action) for actions in schedule for action in actions} == slow.spans
    assert {where: (found.transfer_start_s[where], found.transfer_end_s[where]) for where in slow.transfers} == slow.transfers
    assert int(np.isfinite(found.transfer_end_s).sum()) == len(slow.transfers)
    assert {stage: (found.after_start_s[stage], found.after_end_s[stage]) for stage in range(workload.num_stages)} == slow.after
    assert list(zip(found.memory_device, found.memory_time_s, found.memory_bytes, strict=True)) == slow.memory
    above = [(d, t, held) for d, t, held in slow.memory if held > workload.limit_bytes[d] * (1 + 1e-9)]
    assert (found.violation is None) == (not above)
    if found.violation is not None:
        assert found.violation[:3] == above[0]
    assert found.peak_bytes.tolist() == [max(held for d, _, held in slow.memory if d == device) for device in range(len(schedule))]


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_without_contention_it_is_the_fast_path(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    stages, count = int(numbers.integers(1, 7)), int(numbers.integers(1, 9))
    name = str(numbers.choice(["gpipe", "1f1b", "zero-bubble"]))
    durations, transfers = numbers.random((4, stages, count)), numbers.random((2, stages - 1, count))
    schedule = schedule_of(name, stages, count)
    whole, fast = execute(schedule, workload_of(durations, transfers)), simulate(schedule, durations, transfers)
    assert np.array_equal(whole.start_s, fast.start_s) and np.array_equal(whole.end_s, fast.end_s)
    assert whole.makespan_s == fast.makespan_s


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_without_messages_peaks_are_those_of_the_order(seed: int) -> None:
    schedule, workload = random_case(seed)
    workload = dataclasses.replace(workload, message_bytes=read_only(np.zeros_like(workload.message_bytes)))
    try:
        found = execute(schedule, workload)
    except InputError:
        return
    assert found.peak_bytes == pytest.approx(order_peak_bytes(schedule, workload), rel=1e-9, abs=1e-9)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_transfers_of_one_link_never_overlap_and_all_memory_is_given_back(seed: int) -> None:
    schedule, workload = random_case(seed)
    try:
        found = execute(schedule, workload)
    except InputError:
        return
    for link in range(int(workload.links.max(initial=-1)) + 1):
        chosen = workload.links == link
        spans = sorted(zip(found.transfer_start_s[chosen].ravel(), found.transfer_end_s[chosen].ravel(), strict=True))
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    last = dict(zip(found.memory_device, found.memory_bytes, strict=True))
    assert [last[device] for device in range(workload.num_devices)] == pytest.approx(workload.base_bytes, abs=1e-9)
    assert found.device_busy_s().sum() == pytest.approx(found.busy_s().sum())


def test_a_shared_link_is_waited_for() -> None:
    """Two activations over one link: the second waits until the first has arrived."""
    workload = workload_of(np.ones((2, 2, 2)), np.full((2, 1, 2), 3.0), contention="pair")
    found = execute(gpipe(2, 2), workload)
    assert found.transfer_start_s[0, 0].tolist() == [1.0, 4.0] and found.transfer_end_s[0, 0].tolist() == [4.0, 7.0]
    free = execute(gpipe(2, 2), workload_of(np.ones((2, 2, 2)), np.full((2, 1, 2), 3.0)))
    assert free.transfer_start_s[0, 0].tolist() == [1.0, 2.0]


def test_what_stays_on_a_device_is_not_sent() -> None:
    """Stages 0 and 1 are on one device, stage 2 on another: between 1 and 2 each device sends once, between 0 and 1 none."""
    workload = workload_of(np.ones((2, 3, 1)), np.full((2, 2, 1), 2.0), devices=(0, 0, 1))
    found = execute(parse_schedule("0F0 1F0 1B0 0B0\n2F0 2B0"), workload)
    assert found.sending_s().tolist() == [2.0, 2.0]


def test_a_device_sends_what_it_has_made() -> None:
    """The first device an activation of three seconds, the second a gradient of one."""
    found = execute(gpipe(2, 1), workload_of(np.ones((2, 2, 1)), np.array([[[3.0]], [[1.0]]])))
    assert found.sending_s().tolist() == [3.0, 1.0]


def test_blocking_sends_hold_the_sender() -> None:
    """0F1 starts once the activation of 0F0 has arrived; the last gradient holds stage 1."""
    found = execute(gpipe(2, 2), workload_of(np.ones((2, 2, 2)), np.full((2, 1, 2), 2.0), overlap=False))
    assert found.start_s[0, 0].tolist() == [0.0, 3.0] and found.end_s[0, 1].tolist() == [4.0, 7.0]
    assert found.start_s[1, 1].tolist() == [7.0, 10.0] and found.makespan_s == 14.0
    assert found.sending_s().tolist() == [4.0, 4.0] and found.device_busy_s().tolist() == [4.0, 4.0]


def test_memory_over_time_and_the_first_violation() -> None:
    """One device, GPipe: two micro-batches of 3 bytes above 10; a workspace of 2 exceeds 17 in the second forward pass."""
    workload = workload_of(np.ones((2, 1, 2)), stored_bytes=3, workspace_bytes=2, base_bytes=10, limit_bytes=17)
    found = execute(gpipe(1, 2), workload)
    assert found.memory_bytes.tolist() == [10, 15, 13, 18, 16, 18, 13, 15, 10]
    assert found.memory_time_s.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert found.violation == (0, 1.0, 18.0, 17.0) and "device 0 holds 18 bytes at 1 s" in str(found.violation)
    assert execute(one_forward_one_backward(1, 2), workload).violation is None


def test_a_split_backward_pass_frees_in_two_steps() -> None:
    workload = workload_of(np.ones((4, 1, 1)), stored_bytes=8, waiting_bytes=3)
    assert execute(parse_schedule("0F0 0I0 0W0"), workload).memory_bytes.tolist() == [0, 8, 8, 8, 3, 3, 0]


def test_messages_wait_at_the_receiver() -> None:
    """Stage 1 is slow: three activations pile up before it."""
    durations = np.array([[[1.0] * 4, [9.0] * 4], [[1.0] * 4, [1.0] * 4]])
    found = execute(gpipe(2, 4), workload_of(durations, message_bytes=5))
    assert found.peak_bytes.tolist() == [5.0, 15.0]


def test_work_after_the_last_backward_pass() -> None:
    """Two chunks on one device: the later stage ends first and is reduced beside the earlier one's backward pass."""
    schedule = parse_schedule("0F0 1F0 1B0 0B0")
    beside = execute(schedule, workload_of(np.ones((2, 2, 1)), devices=[0, 0], after_s=[5, 5]))
    assert beside.after_start_s.tolist() == [8.0, 3.0] and beside.makespan_s == 13.0
    blocking = execute(schedule, workload_of(np.ones((2, 2, 1)), devices=[0, 0], after_s=[5, 5], overlap=False))
    assert blocking.start_s[1, 0, 0] == 8.0 and blocking.makespan_s == 14.0


def test_what_does_not_fit_is_refused() -> None:
    workload = workload_of(np.ones((2, 2, 2)))
    with pytest.raises(InputError, match="1F0 is on device 0"):
        execute(parse_schedule("1F0 0F0\n1F1"), workload)
    with pytest.raises(InputError, match="for 3 devices"):
        execute(gpipe(3, 2), workload_of(np.ones((2, 3, 2)), devices=[0, 1, 0]))
    with pytest.raises(InputError, match="0F0 is twice"):
        execute(parse_schedule("0F0 0F0\n-"), workload)
    with pytest.raises(InputError, match="splits backward"):
        execute(schedule_of("zero-bubble", 2, 2), workload)
    with pytest.raises(InputError, match=r"0B0 waits for 1B0, .*; action 1B0 waits for 1F0, which is on device 1 behind 1B0"):
        execute(parse_schedule("0F0 0B0\n1B0 1F0"), workload)
    with pytest.raises(InputError, match="1F1 waits for 0F1, which is on no device"):
        execute(parse_schedule("0F0 0B0\n1F1 1F0 1B0"), workload)


@pytest.mark.parametrize("wrong", [
    {"devices": [0, 2]}, {"devices": [0]}, {"stored_bytes": -1.0}, {"after_s": [1.0, np.nan]}, {"transfers_s": np.ones((2, 2, 2))},
    {"waiting_bytes": 1.0}, {"contention": [[5], [0]]}, {"contention": "links"}, {"base_bytes": np.inf},
])  # fmt: skip
def test_workloads_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        workload_of(np.ones((2, 2, 2)), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="durations have shape"):
        workload_of(np.ones((3, 2, 2)))


def test_no_event_is_left_to_python() -> None:
    """With contention and the memory timeline too: more micro-batches, the same calls; `benchmarks/simulator.py` says how many a second."""
    from penstock.timing.event_clock import run_events

    def calls(count: int) -> int:
        numbers = np.random.default_rng(0)
        load = workload_of(
            numbers.random((2, 8, count)), numbers.random((2, 7, count)) / 4, contention="pair", stored_bytes=1, message_bytes=1,
            limit_bytes=3,
        )  # fmt: skip
        arrays = event_arrays(one_forward_one_backward(8, count), load)
        return counted_calls(lambda: run_events(*arrays))

    assert calls(2048) == calls(4) < 10
