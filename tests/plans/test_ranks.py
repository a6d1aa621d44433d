"""Stages of replicas on ranks, in both orders, and found again from a plan."""

from __future__ import annotations

import pytest

from penstock.plans.build import uniform_plan
from penstock.plans.degrees import parts_of
from penstock.plans.plan import Plan
from penstock.plans.ranks import Seat, groups_of, holders, pairs_of, seats_of, stage_ranks


@pytest.fixture
def plan() -> Plan:
    """Two stages, two replicas, tp 2, as drawn."""
    return uniform_plan("gpt-tiny", "8xa100-40gb", pp=2, tp=2, replicas=2, global_batch=8, micro_batch=1)


def test_the_two_drawn_orders(plan: Plan) -> None:
    assert [stage.devices for stage in plan.stages] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert [stage_ranks(start, 2, 2) for start in (0, 2)] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert [stage_ranks(start, 2, 2, replica_size=4) for start in (0, 2)] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]


def test_every_rank_is_found_where_the_plan_has_it(plan: Plan) -> None:
    seats = seats_of(plan)
    assert sorted(seats) == list(range(8)) and seats[6] == [Seat(1, 1, 0)] and seats[3] == [Seat(0, 1, 1)]
    chunked = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, global_batch=8, micro_batch=1, schedule="interleaved")
    assert seats_of(chunked)[1] == [Seat(1, 0, 0), Seat(3, 0, 0)]


def test_groups_and_pairs_that_communicate(plan: Plan) -> None:
    first = plan.stages[0]
    assert [holders(first, parts_of(first)[0], index) for index in (0, 1)] == [(0, 2), (1, 3)]
    assert groups_of(plan) == [(0, 1), (2, 3), (0, 2), (1, 3), (4, 5), (6, 7), (4, 6), (5, 7)]
    assert pairs_of(plan) == [(0, 4), (0, 5), (1, 4), (1, 5), (2, 6), (2, 7), (3, 6), (3, 7)]
