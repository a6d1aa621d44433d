"""Generations of process groups: made and dropped in the same processes, again and again, without a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from generation_jobs import close_amid_transfers, policies, train_generations, wake_from_a_thread
from runtime_cases import Case, Choice, make_case
from training_jobs import train_programs

from penstock.errors import InputError
from penstock.plans.plan import Plan
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.generations import Generation
from penstock.runtime.transport.world import ProcessGroups, World
from penstock.runtime.workers import WorkerPool

ROUNDS = 8
ONE: Choice = {"family": "gpt", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=250) as workers:
        yield workers


def on_devices(plan: Plan, *devices: int) -> Plan:
    """The plan with its ranks 0, 1, 2 … on these devices."""
    return replace(
        plan, stages=tuple(replace(one, devices=tuple(tuple(devices[r] for r in own) for own in one.devices)) for one in plan.stages)
    )


def moved(case: Case, *devices: int) -> Case:
    """The case with its ranks on these devices."""
    return replace(case, plan=on_devices(case.plan, *devices))


def test_rounds_leave_nothing(pool: WorkerPool) -> None:
    """All four devices, then two of them in turn: the same losses each time, no thread, no open file, nobody listening."""
    cases = [make_case(ONE | {"pp": 2, "tp": 2}, 3, iterations=1), moved(make_case(ONE | {"dp": 2, "zero": 1}, 4, iterations=1), 1, 3)]
    parts = [(case.plan, case.programs()[0]) for case in cases]
    for rank, (found, losses, number) in enumerate(pool.run(train_generations, parts, TrainingSettings(), ROUNDS)):
        assert found[1:] == found[1:2] * (ROUNDS - 1) and found[1][2] == 0, found
        own = 2 if rank in cases[1].plan.ranks else 1
        assert len(losses) == own * ROUNDS and losses == losses[:own] * ROUNDS
        assert number >= 3 * ROUNDS - 1


def test_threads_of_gloo_push_nobody_off_a_core(pool: WorkerPool) -> None:
    assert pool.run(policies) == [(os.SCHED_OTHER, {os.SCHED_BATCH})] * 4


def test_what_waits_for_others_does_not_hold_it_up(pool: WorkerPool) -> None:
    for found, sums in pool.run(close_amid_transfers, 4):
        assert found == found[:1] * 4 and found[0][2] == 0, found
        assert sums == [4.0] * 4


def test_a_thread_wakes_who_waits(pool: WorkerPool) -> None:
    assert all("onnection" in told for told in pool.run(wake_from_a_thread))


def test_a_plan_that_leaves_devices_out_trains_as_one_that_does_not(pool: WorkerPool) -> None:
    case = make_case(ONE | {"pp": 3}, 5)
    other = moved(case, 3, 0, 2)
    wanted, found = (pool.run(train_programs, one.plan, one.programs(), TrainingSettings()) for one in (case, other))
    assert [bool(one.losses) for one in found] == [True, False, True, True]
    assert found[0].losses == wanted[0].losses
    for rank, device in enumerate((3, 0, 2)):
        pairs = zip(found[device].weights, wanted[rank].weights, strict=True)
        assert all(a.name == b.name and torch.equal(a.values, b.values) for a, b in pairs)


def test_a_plan_for_more_processes_than_there_are_is_refused() -> None:
    plan = on_devices(make_case(ONE, 3, iterations=1).plan, 2)
    with pytest.raises(InputError, match=r"rank 2 has no process\. Start one for each rank"):
        World(plan, ProcessGroups())


def test_nobody_meets_in_a_closed_one() -> None:
    alone = Generation(3, (0,), 0)
    assert alone.group((0,)) is None and alone.prefix == "generation/3"
    following = alone.next()
    assert (following.number, following.members, alone.is_closed) == (4, (0,), True)
    with pytest.raises(RuntimeError, match="generation 3 is closed"):
        alone.group((0, 1))


def test_a_world_has_a_process_for_every_rank_and_a_gpu_for_every_part_of_an_op() -> None:
    case = make_case(ONE | {"tp": 2}, 3)
    with pytest.raises(InputError, match=r"the plan has ranks 0-1, but rank 1 has no process"):
        World(case.plan, ProcessGroups())
    alone = World(make_case(ONE, 3).plan, ProcessGroups(staged=True))
    assert alone.tensor_parallel([0]).size == 1
    with pytest.raises(InputError, match=r"ranks \(0, 1\) share one GPU, .* Use tp 1 there"):
        alone.tensor_parallel([0, 1])
