"""Stages of replicas on ranks, in both orders, and found again from a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.clusters import resolve_cluster
from penstock.plans.build import uniform_plan
from penstock.plans.degrees import parts_of
from penstock.plans.plan import OpRun, Plan
from penstock.plans.ranks import Seat, groups_of, holders, packed_replicas, pairs_of, seats_of, stage_ranks


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


def test_ops_with_degrees_of_their_own_have_groups_of_their_own() -> None:
    """Two ranks divide samples, and ops 9 to 17 instead: those are summed by nobody else, and their collectives need a group."""
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", dp=2, replicas=2, global_batch=8, micro_batch=2)
    mixed = replace(plan, stages=(replace(plan.stages[0], runs=(OpRun(9, 17, 2, 1),)),))
    assert groups_of(plan) == [(0, 1, 2, 3)]
    assert sorted(groups_of(mixed)) == [(0, 1), (0, 1, 2, 3), (0, 2), (1, 3), (2, 3)]


def test_replicas_of_what_nodes_and_kinds_have_left() -> None:
    """Three of one kind and five of another, two groups deep: one inside each node at least, and one of both kinds."""
    cluster = resolve_cluster("3xa100-40gb+5xv100-32gb")
    kinds = (range(3), range(3, 8))
    assert packed_replicas(cluster, kinds, 1, 2) == (((0,), (1,)), ((3,), (4,)), ((5,), (6,)), ((2,), (7,)))
    assert packed_replicas(cluster, kinds, 2, 1) == (((0, 1),), ((3, 4),), ((5, 6),))
