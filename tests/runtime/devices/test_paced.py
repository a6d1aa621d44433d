"""Paced devices learn what plain ones learn, to the bit, in the time that the simulator says, to the last digit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from runtime_cases import Case, Choice, make_case
from training_jobs import run_paced, train_programs

from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.workers import WorkerPool
from penstock.timing.disturbance import Disturbance, DisturbanceChange
from penstock.timing.execution import execute
from penstock.timing.workload import Workload, workload_of

STEPS = 3
UNIT_S = 0.004
ONE: Choice = {"family": "gpt", "pp": 2, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout_s=250) as workers:
        yield workers


def repeated(choice: Choice) -> tuple[Case, ReplicaWork, Workload]:
    """The same micro-batches in every iteration, with unequal times and a link that is not free; programs are ordered by these times."""
    case = make_case(choice, 3, iterations=STEPS)
    (first,) = case.works[0]
    count, stages = len(first.micro_batches), case.plan.num_stages
    kinds = np.array([1.0, 2.0, 1.0, 1.0])[:, None, None]
    times = kinds * np.random.default_rng(0).uniform(0.5, 1.5, (1, stages, count)) * UNIT_S
    own = replace(first, durations_s=times.tolist())
    return replace(case, works=((own,),) * STEPS), own, workload_of(times, 0.3 * UNIT_S, contention="pair", after_s=UNIT_S)


def simulated(work: ReplicaWork, times: Workload, compute: float = 1.0, link: float = 1.0) -> float:
    """With the second stage, or the link, so many times as slow."""
    durations = times.durations_s.copy()
    durations[:, 1] *= compute
    return execute(work.schedule, workload_of(durations, times.transfers_s * link, contention="pair", after_s=times.after_s)).makespan_s


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_losses_are_real_and_times_are_simulated(pool: WorkerPool, schedule: str) -> None:
    case, work, times = repeated(ONE | {"schedule": schedule})
    found = pool.run(run_paced, case.plan, case.programs(), [times], ClockSettings())
    plain = pool.run(train_programs, case.plan, case.programs(), TrainingSettings())
    for (times_s, paced), wanted in zip(found, plain, strict=True):
        assert times_s == pytest.approx([simulated(work, times)] * STEPS, rel=1e-6)
        assert paced.losses == wanted.losses
        assert all(torch.equal(a.values, b.values) for a, b in zip(paced.weights, wanted.weights, strict=True))


Expected = Callable[[ReplicaWork, Workload], list[float]]
DISTURBED: dict[str, tuple[DisturbanceChange, Expected]] = {
    "a rank": (DisturbanceChange((1,), 3.0, "pulse", 1, 1),
               lambda work, times: [simulated(work, times), simulated(work, times, compute=3.0), simulated(work, times)]),
    "a link": (DisturbanceChange((1, 0), 9.0, first=2),
               lambda work, times: [simulated(work, times), simulated(work, times), simulated(work, times, link=9.0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTURBED)
def test_what_is_disturbed_takes_longer_in_its_steps_alone(pool: WorkerPool, name: str) -> None:
    change, expected = DISTURBED[name]
    case, work, times = repeated(ONE)
    settings = ClockSettings(disturbance=Disturbance((change,)))
    found = pool.run(run_paced, case.plan, case.programs(), [times], settings)
    plain = pool.run(train_programs, case.plan, case.programs(), TrainingSettings())
    assert found[0][0] == pytest.approx(expected(work, times), rel=1e-6) and len(set(np.round(found[0][0], 6))) == 2
    assert found[0][1].losses == plain[0].losses


def test_slow_data_is_waited_for(pool: WorkerPool) -> None:
    """Loading runs beside the step before; what is left of it then delays all passes of the step."""
    case, work, times = repeated(ONE)
    calm_s = simulated(work, times)
    settings = ClockSettings(disturbance=Disturbance((DisturbanceChange((), 20.0, first=1),)))
    first, second, third = pool.run(run_paced, case.plan, case.programs(), [times], settings)[0][0]
    loading_s = 20.0 * times.durations_s[:2, 0].sum()  # of the first stage, which everybody waits for
    assert first == pytest.approx(calm_s, rel=1e-6)
    assert second >= loading_s - calm_s and third < second  # the next batch was loaded beside a longer step


def test_tensor_parallel_ranks_wait_for_the_slower(pool: WorkerPool) -> None:
    case = make_case(ONE | {"pp": 1, "tp": 2}, 3, iterations=1)
    (work,) = case.works[0]
    times = workload_of(np.full((4, 1, len(work.micro_batches)), UNIT_S))
    for rank in range(2):
        settings = ClockSettings(disturbance=Disturbance.of_ranks({rank: 2.0}))
        ((found_s,), _), _ = pool.run(run_paced, case.plan, [lower(case.plan, case.model, (work,), 0)], [times], settings)
        assert found_s == pytest.approx(2 * 2 * UNIT_S * len(work.micro_batches), rel=1e-6)
