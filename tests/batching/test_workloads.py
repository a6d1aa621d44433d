"""Planned batches as workloads: the simulator agrees with what the planner of batches predicted, time and memory alike."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.batching.example import small_costs
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_workload
from penstock.ordering.annealing import best_schedule
from penstock.timing.execution import execute


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_simulation_and_planner_agree(seed: int, stages: int) -> None:
    numbers = np.random.default_rng(seed)
    costs = small_costs(num_stages=stages, num_replicas=2, limit_bytes=6000)
    samples = [SampleLengths(k, int(numbers.integers(1, 40)), int(numbers.integers(0, 20))) for k in range(30)]
    batch = plan_batch(samples, costs)
    for replica, own in enumerate(batch.replicas):
        work = batch_workload(costs, own.micro_batches, replica)
        found = execute(own.schedule, work)
        assert found.end_s.max() == pytest.approx(own.predicted_s)
        assert found.peak_bytes == pytest.approx(own.peak_bytes) and found.violation is None


def test_free_orders_are_no_worse_than_the_planned_one() -> None:
    """The search takes transfers to be free of contention, and so must the comparison."""
    costs = small_costs(num_stages=4, limit_bytes=6000)
    samples = [SampleLengths(k, 1 + 7 * k % 40, k % 9) for k in range(30)]
    own = plan_batch(samples, costs).replicas[0]
    work = batch_workload(costs, own.micro_batches, 0)
    assert best_schedule(work, 2000).makespan_s <= own.predicted_s
