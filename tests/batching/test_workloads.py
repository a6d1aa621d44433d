"""Planned batches as workloads: the simulator agrees with what the planner of batches predicted, time and memory alike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from penstock.batching.costs import LayoutCosts
from penstock.batching.example import small_costs
from penstock.batching.fitting import fit_samples, positions
from penstock.batching.ordering import by_length
from penstock.batching.plan import BatchPlan, ReplicaBatch, SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_durations_s, batch_workload, require_priced
from penstock.errors import InfeasibleError, InputError
from penstock.models.micro_batch import MicroBatch
from penstock.ordering.annealing import best_schedule
from penstock.schedules.rules import schedule_of
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


def test_passes_and_workspace_by_hand() -> None:
    """A row of eight tokens on two stages, the second half as slow again; both halves of a backward pass are one."""
    costs = small_costs(num_stages=2, has_decoder=False)
    batch = MicroBatch(0, (3,), "padded", (7,), (), 8)
    durations = batch_durations_s(costs, [batch], 0)
    assert durations is not None
    assert np.array(durations)[:, :, 0] == pytest.approx(np.array([[1.08, 1.62], [2.16, 3.24], [1.08, 1.62], [1.08, 1.62]]))
    grid = costs.layouts["padded"]
    fuller = grid.values.copy()
    fuller[..., 4] = fuller[..., 2] + 50.0  # the other moment of a forward pass that may be the fullest
    for values, forward in ((grid.values, 8.0), (fuller, 50.0)):
        work = batch_workload(replace(costs, layouts={"padded": LayoutCosts(grid.axes, values)}), [batch], 0)
        assert (work.stored_bytes[0, 0], *work.workspace_bytes[:2, 0, 0]) == pytest.approx((80.0, forward, 16.0))


def test_packed_sequences_are_priced_by_what_their_tokens_attend_to() -> None:
    """Of four and twelve tokens, 160 pairs: ten on average."""
    costs = small_costs(num_stages=1, layouts=("packed",), has_decoder=False)
    grid = costs.layouts["packed"]
    values = np.zeros_like(grid.values)
    values[..., 0] = grid.axes[1][:, None, None, None, None]
    durations = batch_durations_s(
        replace(costs, layouts={"packed": LayoutCosts(grid.axes, values)}), [MicroBatch(0, (0, 1), "packed", (4, 12))], 0
    )
    assert durations is not None and durations[0][0][0] == pytest.approx(10.0)


def test_a_mode_that_the_costs_do_not_have_is_refused() -> None:
    costs = small_costs(num_stages=1, has_decoder=False)
    for mode, fits in ((1, True), (2, False)):
        batch = MicroBatch(0, (0,), "padded", (4,), (), 4, recompute=(mode,))
        plan = BatchPlan((ReplicaBatch((batch,), schedule_of("1f1b", 1, 1), 1.0, ()),), 1.0, 0.0, (), "x")
        if fits:
            require_priced(plan, costs, "the batch")
        else:
            with pytest.raises(InputError, match="2 modes of recomputation"):
                require_priced(plan, costs, "the batch")


def test_orders_and_positions_by_hand() -> None:
    assert by_length(np.array([5, 5, 9]), np.array([1, 3, 2])).tolist() == [2, 1, 0]
    costs = replace(small_costs(), length_offset=-1, dec_offset=2)
    assert [side.tolist() for side in positions([SampleLengths(0, 5, 3), SampleLengths(1, 1, 0)], costs)] == [[4, 1], [5, 2]]


def test_what_fits_at_no_length_is_not_cut_to_nothing() -> None:
    with pytest.raises(InfeasibleError, match="sample 4 fits no device at any length"):
        fit_samples([SampleLengths(4, 30)], small_costs(limit_bytes=1.0, has_decoder=False), "truncate")
