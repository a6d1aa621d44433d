"""Timed devices take the time that the simulator says, whatever the schedule, and are slower where told so."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from training_jobs import run_timed
from worker_jobs import run_stalled

from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.programs.instructions import Part, Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.timed import MOST_PAYLOAD_BYTES, _payload_bytes
from penstock.runtime.workers import WorkerPool
from penstock.schedules.actions import Schedule
from penstock.schedules.rules import schedule_of
from penstock.timing.disturbance import Disturbance
from penstock.timing.execution import execute
from penstock.timing.workload import Workload, workload_of

MICRO_BATCHES = 8
LENIENT = ClockSettings(forgiven_s=math.inf)
"""However late the machine lets a rank run, its device was not: by its clock all is as simulated."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_s=250) as workers:
        yield workers


def pipeline(schedule: str, stages: int, chunks: int = 1, replicas: int = 1) -> tuple[Plan, Model, Schedule]:
    plan = uniform_plan("gpt-small", "16xcpu", global_batch=MICRO_BATCHES * replicas, micro_batch=1, pp=stages // chunks, chunks=chunks,
                        replicas=replicas, schedule=schedule, precision="fp32")  # fmt: skip
    return plan, model_of(plan), schedule_of(schedule, stages, MICRO_BATCHES, chunks)


def programs_of(plan: Plan, model: Model, schedule: Schedule, count: int, own: Workload | None = None) -> list[tuple[Program, ...]]:
    """With a workload, transfers are ordered by its times: by equal ones, buffers would hold up unequal micro-batches."""
    times = None if own is None else own.durations_s.tolist()
    work = []
    for replica in range(plan.num_replicas):
        ids = range(replica * MICRO_BATCHES, (replica + 1) * MICRO_BATCHES)
        micros = tuple(MicroBatch(m, (sample,), "padded", (128,), row_length=128) for m, sample in enumerate(ids))
        work.append(ReplicaWork(micros, schedule, durations_s=times))
    return [lower(plan, model, work, iteration) for iteration in range(count)]


def workload(plan: Plan, seed: int = 0, unit_s: float = 0.005) -> Workload:
    """Unequal micro-batches and links that are not free."""
    generator = np.random.default_rng(seed)
    kinds = np.array([1.0, 2.0, 1.0, 1.0])[:, None, None]
    sizes = generator.uniform(0.5, 1.5, (1, plan.num_stages, MICRO_BATCHES))
    groups = plan.num_groups
    devices = [stage % groups for stage in range(plan.num_stages)]
    return workload_of(kinds * sizes * unit_s, 0.2 * unit_s, devices=devices, contention="pair", after_s=unit_s)


@pytest.mark.parametrize(("schedule", "stages", "chunks"), [("1f1b", 8, 1), ("gpipe", 4, 1), ("zero-bubble", 4, 1), ("interleaved", 8, 2)])
def test_the_measured_iteration_is_the_simulated_one(pool: WorkerPool, schedule: str, stages: int, chunks: int) -> None:
    plan, model, order = pipeline(schedule, stages, chunks)
    work = workload(plan)
    expected = execute(order, work).makespan_s
    measured = pool.run(run_timed, plan, programs_of(plan, model, order, 2, work), [work], LENIENT)[0]
    assert [device_s for _, device_s in measured] == pytest.approx([expected] * 2, rel=1e-6)
    assert min(wall_s for wall_s, _ in measured) > 0.99 * expected  # the waits are real ones


def test_replicas_wait_for_each_other(pool: WorkerPool) -> None:
    plan, model, order = pipeline("1f1b", 4, replicas=2)
    quick, slow = workload(plan, unit_s=0.005), workload(plan, unit_s=0.02)
    ((_, device_s),) = pool.run(run_timed, plan, programs_of(plan, model, order, 1), [quick, slow], LENIENT)[0]
    assert device_s == pytest.approx(execute(order, slow).makespan_s, rel=0.01)


def test_a_slow_device_slows_the_pipeline(pool: WorkerPool) -> None:
    plan, model, order = pipeline("1f1b", 4)
    work = workload(plan, unit_s=0.01)
    programs = programs_of(plan, model, order, 1)
    slowed = work.durations_s.copy()
    slowed[:, 2] *= 3.0
    expected = execute(order, workload_of(slowed, work.transfers_s, contention="pair", after_s=work.after_s)).makespan_s
    ((_, device_s),) = pool.run(run_timed, plan, programs, [work], replace(LENIENT, disturbance=Disturbance.of_ranks({2: 3.0})))[0]
    assert device_s == pytest.approx(expected, rel=0.01)


def test_time_that_is_really_lost_counts(pool: WorkerPool) -> None:
    """Were moments only handed on, the ranks would repeat the simulation whatever the executor does. A busy machine loses more."""
    plan, model, order = pipeline("1f1b", 4)
    work = workload(plan, unit_s=0.01)
    expected = execute(order, work).makespan_s
    measured = pool.run(run_stalled, plan, programs_of(plan, model, order, 1), [work], 2, 0.4)[0]
    assert measured[0] > expected + 0.25


def test_noise_changes_times_alike_for_one_seed(pool: WorkerPool) -> None:
    plan, model, order = pipeline("1f1b", 4)
    work = workload(plan, unit_s=0.01)
    programs = programs_of(plan, model, order, 1)
    calm, noisy, again = (
        pool.run(run_timed, plan, programs, [work], settings)[0][0][1]
        for settings in (LENIENT, replace(LENIENT, noise=0.5, seed=1), replace(LENIENT, noise=0.5, seed=1))
    )
    assert abs(noisy - calm) > 0.03 * calm and noisy == pytest.approx(again, rel=1e-6)


def test_messages_are_as_large_as_their_parts_within_limits() -> None:
    part, half = Part("hidden", "bf16", (100, 8)), Part("residual", "fp32", (100, 8), rows=(0, 50))
    assert _payload_bytes([part, half]) == 100 * 8 * 2 + 50 * 8 * 4
    assert _payload_bytes([]) == 8  # the moment at which it was sent is always in it
    assert _payload_bytes([part] * 1000) == MOST_PAYLOAD_BYTES
