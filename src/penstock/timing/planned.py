"""A plan as a workload: what its stages take and hold by the costs, ready to be scheduled and simulated.

Of the slowest replica, with micro-batches as `pipeline` forms them. `penstock simulate` shows it, and the search judges plans by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.clusters import Cluster
from penstock.costs.source import CostSource
from penstock.models.ops import Model
from penstock.plans.degrees import parts_of
from penstock.plans.plan import Plan, Stage
from penstock.schedules.actions import Schedule
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.estimate import Estimator
from penstock.timing.execution import Execution, execute
from penstock.timing.iteration_estimate import Estimate, StageEstimate
from penstock.timing.pipeline import share_shape
from penstock.timing.workload import Floats, Workload, split_backward, workload_of

__all__ = ["PlannedPipeline", "clocked", "planned_pipeline", "simulated"]

_MAX_ACTIONS = 2_000_000
"""Beyond so many actions of one replica the formula stands: the clock would take seconds, and fill and drain hardly count."""


@dataclass(frozen=True)
class PlannedPipeline:
    """One replica of a plan."""

    estimate: Estimate
    workload: Workload
    """A device stands for a stage's whole group; gradient reduction and optimizer step follow the last backward pass."""
    schedule: Schedule
    num_batches: int = 1
    """Global batches in it: more than one where an asynchronous schedule has no break between them."""


def planned_pipeline(plan: Plan, model: Model, cluster: Cluster, source: CostSource, num_batches: int = 0) -> PlannedPipeline:
    """The slowest replica of a valid plan, with so many global batches, or with as many as its schedule has without a break."""
    estimator = Estimator(model, cluster, source)
    found = estimator.estimate(plan)
    held = np.array(
        [_held(estimator, plan, stage, found.samples, each) for stage, each in zip(plan.stages, found.stages, strict=True)]
    )
    window = num_batches or _window(plan, found)
    return PlannedPipeline(found, _workload(plan, found, held, window), _schedule(plan, found, window), window)


def simulated(plan: Plan, estimate: Estimate) -> Execution:
    """The timeline of an estimated plan, as `penstock simulate` would show it; what it holds is not followed."""
    window = _window(plan, estimate)
    return execute(_schedule(plan, estimate, window), _workload(plan, estimate, np.zeros((plan.num_stages, 3)), window))


def clocked(plan: Plan, estimate: Estimate) -> Estimate:
    """The estimate with the time that `penstock simulate` shows for the plan: passes in the order of its schedule, messages hidden behind
    compute where there is any. Closed formulas order and bound plans; what is shown is timed by the clock."""
    window = _window(plan, estimate)
    if plan.num_stages == 1 or 4 * plan.num_stages * estimate.num_micro_batches * window > _MAX_ACTIONS:
        return estimate
    found = simulated(plan, estimate)
    return estimate.with_times(found.makespan_s / window, found.pipeline_s / window)


def _window(plan: Plan, found: Estimate) -> int:
    return SCHEDULES[plan.schedule].window(plan.num_groups, found.num_micro_batches)


def _schedule(plan: Plan, found: Estimate, window: int) -> Schedule:
    return schedule_of(plan.schedule, plan.num_stages, window * found.num_micro_batches, plan.num_chunks)


def _workload(plan: Plan, found: Estimate, held: Floats, window: int) -> Workload:
    """All micro-batches alike; `held` is [stages, 3] as `_held` has it."""
    work = [stage.work for stage in found.stages]
    passes = np.array([[own.forward_pass_s, own.backward_pass_s] for own in work]).T
    if SCHEDULES[plan.schedule].splits_backward:
        passes = split_backward(passes, [own.weight_s for own in work])
    transfers = np.array([[own.transfer_in_s for own in work[1:]], [own.transfer_out_s for own in work[:-1]]])
    groups = found.stages[: plan.num_groups]
    # A rank takes one step for all of its chunks, after the last backward pass of the first of them.
    steps_s = [sum(stage.optimizer_s for stage in found.stages if stage.group == own.group) for own in groups]
    steps_s += [0.0] * (len(found.stages) - len(groups))
    return workload_of(
        _repeated(passes, window * found.num_micro_batches),
        _repeated(transfers, window * found.num_micro_batches),
        devices=[stage.group for stage in found.stages],
        contention="pair",
        after_s=[stage.sync_s + step_s for stage, step_s in zip(found.stages, steps_s, strict=True)],
        stored_bytes=held[:, :1],
        workspace_bytes=np.stack([held[:, 1], held[:, 2], held[:, 2], held[:, 2]])[:, :, None],
        base_bytes=[stage.memory.total_bytes - stage.memory.activations_bytes - stage.memory.workspace_bytes for stage in groups],
        limit_bytes=[stage.limit_bytes for stage in groups],
    )


def _repeated(values: Floats, count: int) -> Floats:
    """Values repeated for each micro-batch, along a last axis."""
    return np.repeat(values[:, :, None], count, axis=2)


def _held(estimator: Estimator, plan: Plan, stage: Stage, samples: int, found: StageEstimate) -> tuple[float, float, float]:
    """Bytes of one micro-batch on one rank of a stage: held between the passes, and what each pass adds at its fullest moment.

    The optimizer's step comes when nothing is held. What it needs beyond all that passes hold is counted with the backward ones.
    """
    shares = [(part, share_shape(plan, samples, part.dp)) for part in parts_of(stage)]
    own = estimator.pass_bytes(plan, stage, shares, found.device)
    return own.held, own.forward, max(own.backward, own.step - found.memory.activations_bytes)
