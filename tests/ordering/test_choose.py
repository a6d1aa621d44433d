"""Orders by name, and the one that the event clock prefers."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.ordering.annealing import Candidate
from penstock.ordering.choose import MADE, ORDERS, better_order, order_of
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, schedule_of
from penstock.timing.execution import execute
from penstock.timing.workload import Workload, split_backward, workload_of


def unequal(limit_bytes: float = np.inf, transfer_s: float = 0.0) -> Workload:
    """Four stages, twelve micro-batches of one to six seconds."""
    forward = np.tile(1 + 5 * np.random.default_rng(1).random(12), (4, 1))
    durations = split_backward(np.stack([forward, 2 * forward]), forward)
    return workload_of(durations, np.full((2, 3, 12), transfer_s), contention="device", stored_bytes=forward, limit_bytes=limit_bytes)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_by_its_name(name: str) -> None:
    work = unequal()
    chunked = name in SCHEDULES and SCHEDULES[name].chunked
    if chunked:
        work = workload_of(work.durations_s, devices=[0, 1, 0, 1])
    schedule = order_of(name, work)
    assert execute(schedule, work).makespan_s > 0 and len(schedule) == (2 if chunked else 4)
    if name in SCHEDULES:
        assert schedule == schedule_of(name, 4, 12, 2 if chunked else 1)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="'adaptive'"):
        order_of("adaptiv", unequal())


def test_orders_made_for_the_workload_are_shorter_and_fit() -> None:
    work = unequal(limit_bytes=15.0)
    plain = execute(schedule_of(DEFAULT_SCHEDULE, 4, 12), work).makespan_s
    for name in MADE:
        assert execute(order_of(name, work), work).violation is None
    assert execute(order_of("search", work), work).makespan_s < execute(order_of("greedy", work), work).makespan_s * 1.001 < plain


def test_a_better_order_is_better_by_the_event_clock() -> None:
    work = unequal(limit_bytes=20.0, transfer_s=0.3)
    own = schedule_of(DEFAULT_SCHEDULE, 4, 12)
    found = better_order(work, own, 2000)
    assert found is not None
    run = execute(found.schedule, work)
    assert run.violation is None and run.makespan_s < execute(own, work).makespan_s and found.makespan_s == run.pipeline_s
    assert better_order(work, own, 2000) == found
    assert better_order(work, found.schedule, 0) is None


def test_an_order_that_does_not_fit_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of all orders by time holds more than there is room for, as one that is made by another clock may."""
    roomy, tight = unequal(), unequal(limit_bytes=15.0)
    quick, own = order_of("search", roomy), order_of("adaptive", tight)
    assert execute(quick, tight).violation is not None and execute(quick, tight).makespan_s < execute(own, tight).makespan_s
    monkeypatch.setattr("penstock.ordering.choose.candidates", lambda workload: [Candidate("quick", quick, 0.0)])
    assert better_order(tight, own, 0) is None
    found = better_order(roomy, own, 0)
    assert found is not None and found.name == "quick"


def test_equal_micro_batches_of_one_stage_leave_nothing_to_gain() -> None:
    work = workload_of(np.ones((2, 1, 5)))
    assert better_order(work, schedule_of(DEFAULT_SCHEDULE, 1, 5), 100) is None
