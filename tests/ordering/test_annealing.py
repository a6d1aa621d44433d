"""The schedule search: never worse than its start, within memory, the same for the same seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.simulator import simulate_slowly

from penstock.errors import InfeasibleError, InputError
from penstock.ordering.annealing import best_schedule, candidates, refine
from penstock.ordering.injection import reordered
from penstock.schedules.actions import Action, Schedule
from penstock.schedules.orders import gpipe
from penstock.schedules.rules import schedule_of
from penstock.timing.order_memory import order_peak_bytes
from penstock.timing.simulator import as_arrays, simulate
from penstock.timing.workload import Workload, split_backward, workload_of


def unequal(seed: int, num_stages: int = 4, count: int = 12, split: bool = False, limit: float = np.inf, chunks: int = 1) -> Workload:
    """Micro-batches of very unequal cost, which hold bytes in proportion."""
    numbers = np.random.default_rng(seed)
    times = np.tile(numbers.lognormal(0, 0.7, count), (num_stages * chunks, 1)) * numbers.uniform(0.8, 1.2, (num_stages * chunks, 1))
    durations = np.stack([times, 2 * times])
    return workload_of(
        split_backward(durations, times) if split else durations, times[1:] / 10, stored_bytes=times, limit_bytes=limit * times.mean(),
        devices=[stage % num_stages for stage in range(num_stages * chunks)],
    )  # fmt: skip


def time_of(schedule: Schedule, workload: Workload) -> float:
    return simulate(schedule, workload.durations_s, workload.transfers_s).makespan_s


@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 2), st.sampled_from([3.5, 6.0, np.inf]))
@settings(max_examples=40, deadline=None)
def test_never_worse_than_its_start_within_memory_and_complete(seed: int, split: bool, chunks: int, limit: float) -> None:
    workload = unequal(seed, 3, 7, split, limit * chunks, chunks)
    try:
        known = candidates(workload)
    except InfeasibleError:
        return
    found = best_schedule(workload, num_steps=300, seed=seed)
    assert found.makespan_s <= known[0].makespan_s == min(candidate.makespan_s for candidate in known)
    assert found.makespan_s == time_of(found.schedule, workload)
    assert (order_peak_bytes(found.schedule, workload) <= workload.limit_bytes * (1 + 1e-9)).all()
    before, after = (sorted(a for device in schedule for a in device) for schedule in (known[0].schedule, found.schedule))
    assert before == after
    bound = max(
        workload.durations_s[:2, workload.stages_of(device)].sum() for device in range(workload.num_devices)
    )  # fmt: skip
    assert found.makespan_s >= bound - 1e-9


def test_is_the_same_for_the_same_seed_only() -> None:
    workload = unequal(5)
    start = schedule_of("1f1b", 4, 12)
    first, again, other = (refine(start, workload, 2000, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_more_steps_help_and_no_steps_change_nothing() -> None:
    workload = unequal(7, count=24)
    start = schedule_of("1f1b", 4, 24)
    times = [time_of(refine(start, workload, steps), workload) for steps in (0, 500, 20_000)]
    assert refine(start, workload, 0) == start and times[2] < times[1] < times[0] and times[2] < 0.93 * times[0]


def test_orders_of_actions_are_searched_too() -> None:
    """Equal micro-batches: no order of injection helps, but GPipe's order of actions can be left where memory forbids nothing."""
    durations = np.ones((2, 3, 6))
    durations[0, 0], durations[1, 2] = 2.0, 3.0
    workload = workload_of(durations)
    start = gpipe(3, 6)
    assert time_of(refine(start, workload, 5000), workload) < time_of(start, workload)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(0.5, 2.0))
@settings(max_examples=60, deadline=None)
def test_the_clock_renames_micro_batches_and_gives_up_at_a_bound(seed: int, split: bool, share: float) -> None:
    from penstock.timing.clock import Orders, run_orders

    workload = unequal(seed, 3, 5, split)
    schedule = schedule_of("zero-bubble" if split else "1f1b", 3, 5)
    labels = np.random.default_rng(seed).permutation(5)
    slow = simulate_slowly(reordered(schedule, labels.tolist()), workload.durations_s.tolist(), workload.transfers_s.tolist())
    expected, end = max(end for _, end in slow.values()), np.empty(workload.durations_s.shape)
    times = Orders(*as_arrays(schedule)), workload.durations_s, workload.transfers_s, None, end, labels
    assert run_orders(*times, np.inf) == (-1, pytest.approx(expected, rel=1e-12))
    assert run_orders(*times, share * expected)[1] == (pytest.approx(expected, rel=1e-12) if share > 1 else np.inf) or share == 1


@pytest.mark.parametrize(("split", "chunks", "wanted"), [
    (False, 1, {"1f1b", "gpipe", "1f1b, deeper", "adaptive", "greedy"}),
    (True, 1, {"1f1b", "gpipe", "1f1b, deeper", "adaptive", "greedy", "zero-bubble"}),
    (False, 2, {"interleaved", "adaptive", "greedy"}),
])  # fmt: skip
def test_starts_from_every_kind(split: bool, chunks: int, wanted: set[str]) -> None:
    found = {candidate.name for candidate in candidates(unequal(3, split=split, chunks=chunks))}
    assert found >= wanted | {f"{name}, pyramid" for name in wanted} and ("zero-bubble" in found) == ("zero-bubble" in wanted)


def test_placements_without_a_named_schedule_have_candidates() -> None:
    """An encoder on devices 0 and 1, the decoder back from 1 to 0."""
    workload = workload_of(np.ones((2, 4, 6)), devices=[0, 1, 1, 0], stored_bytes=1, limit_bytes=6)
    assert {candidate.name for candidate in candidates(workload)} == {"adaptive", "greedy", "adaptive, pyramid", "greedy, pyramid"}
    assert best_schedule(workload, 500).makespan_s < 2 * 4 * 6


def test_limits_leave_out_what_does_not_fit() -> None:
    tall = np.array([1.0, 5.0, 2.0, 2.0])[:, None, None]  # of a whole backward pass
    split_only = workload_of(np.ones((4, 2, 3)), stored_bytes=1, workspace_bytes=tall, limit_bytes=4)
    assert {candidate.name for candidate in candidates(split_only)} == {"zero-bubble", "greedy", "zero-bubble, pyramid", "greedy, pyramid"}
    workload = workload_of(np.ones((2, 4, 8)), stored_bytes=1, limit_bytes=4)
    assert "gpipe" not in {candidate.name for candidate in candidates(workload)}
    with pytest.raises(InfeasibleError, match="alone"):
        best_schedule(workload_of(np.ones((2, 2, 2)), stored_bytes=2, limit_bytes=1))
    with pytest.raises(InputError, match="exceeds the memory limit of device 0"):
        refine(gpipe(4, 8), workload)
    with pytest.raises(InputError, match="deadlocks"):
        refine(((Action(0, 1, 0), Action(0, 0, 0)),), workload_of(np.ones((2, 1, 1))))
