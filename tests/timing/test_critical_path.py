"""The critical path: without a gap from the begin to the end, and what is on it holds the iteration up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedules.actions import KINDS
from penstock.schedules.rules import schedule_of
from penstock.timing.critical_path import critical_path
from penstock.timing.execution import execute
from penstock.timing.workload import Workload, workload_of


def a_workload(name: str, seed: int, **more: object) -> Workload:
    rng = np.random.default_rng(seed)
    stages = 6 if name == "interleaved" else 3
    devices = tuple(stage % 3 for stage in range(stages))
    kinds = 4 if name == "zero-bubble" else 2
    after = rng.random(stages)
    return workload_of(rng.random((kinds, stages, 6)), rng.random((2, stages - 1, 6)), devices=devices, after_s=after, **more)  # type: ignore[arg-type]


@given(name=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]), seed=st.integers(0, 999), overlap=st.booleans(),
       contention=st.sampled_from(["none", "pair", "device"]))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_its_steps_follow_each_other_to_the_end(name: str, seed: int, overlap: bool, contention: str) -> None:
    work = a_workload(name, seed, overlap=overlap, contention=contention)
    run = execute(schedule_of(name, work.num_stages, 6, 2 if name == "interleaved" else 1), work)
    path = critical_path(run)
    assert path[0].start_s == 0.0 and path[-1].end_s == pytest.approx(run.makespan_s)
    assert all(one.end_s == pytest.approx(other.start_s) for one, other in pairwise(path))
    if contention == "none" and overlap:
        assert not [one for one in path if one.cause == "wait"]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_what_is_on_it_holds_the_iteration_up(name: str) -> None:
    """Every pass and transfer of it that takes longer makes the iteration as much longer, and none can end it earlier than the rest."""
    work = a_workload(name, 3)
    schedule = schedule_of(name, 3, 6)
    before = execute(schedule, work)
    for step in critical_path(before):
        durations, transfers, after = work.durations_s.copy(), work.transfers_s.copy(), work.after_s.copy()
        if step.cause in KINDS:
            durations[KINDS.index(step.cause), step.stage, step.micro_batch] += 0.25
        elif step.cause == "after":
            after[step.stage] += 0.25
        else:
            transfers[int(step.cause == "gradient"), step.stage, step.micro_batch] += 0.25
        longer = execute(schedule, replace(work, durations_s=durations, transfers_s=transfers, after_s=after))
        assert longer.makespan_s == pytest.approx(before.makespan_s + 0.25), step


def test_one_device_is_all_computing() -> None:
    run = execute(schedule_of("1f1b", 1, 4), workload_of(np.ones((2, 1, 4)), np.zeros((2, 0, 4))))
    assert Counter(one.cause for one in critical_path(run)) == {"F": 4, "B": 4}


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"contention": "pair"}, "F00 activation00 activation01 F11 B10 B11 gradient01 B01"),
        ({"overlap": False}, "F00 activation00 F01 activation01 F11 B10 gradient00 B11 gradient01 B01"),
    ],
    ids=["the link was taken", "the device was sending"],
)
def test_what_held_up_a_message_or_a_pass_by_hand(more: dict[str, Any], expected: str) -> None:
    """Two stages, two micro-batches, passes of a second, messages of five there and a quarter back: by cause, stage, micro-batch."""
    work = workload_of(np.ones((2, 2, 2)), np.array([[[5.0, 5.0]], [[0.25, 0.25]]]), **more)
    path = critical_path(execute(schedule_of("gpipe", 2, 2), work))
    assert " ".join(f"{one.cause}{one.stage}{one.micro_batch}" for one in path) == expected
