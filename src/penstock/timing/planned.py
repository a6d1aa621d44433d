"""A plan as a workload: what its stages take and hold by the costs, ready to be scheduled and simulated.

Of the slowest replica, with micro-batches as `costs.pipeline` forms them. Where an estimate has one number for both passes of a stage
it is divided: tensor-parallel collectives by how often the ops run (forward, again, backward), waits for the host by time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.clusters import Cluster
from penstock.costs.memory import OpBytesSource, activation_timeline, formula_bytes
from penstock.costs.profiled import Profiled
from penstock.costs.source import CostSource
from penstock.models.ops import Model
from penstock.models.shapes import NOTHING
from penstock.plans.plan import Plan, Stage
from penstock.schedules.actions import Schedule
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.estimate import Estimate, Estimator, StageWork
from penstock.timing.messages import Part, parts_of
from penstock.timing.pipeline import share_shape
from penstock.timing.workload import Floats, Workload, split_backward, workload_of

__all__ = ["PlannedPipeline", "planned_pipeline"]


@dataclass(frozen=True)
class PlannedPipeline:
    """One replica of a plan."""

    estimate: Estimate
    workload: Workload
    """A device stands for a stage's whole group; gradient reduction and optimizer step follow the last backward pass."""
    schedule: Schedule


def planned_pipeline(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> PlannedPipeline:
    """The slowest replica of a valid plan."""
    estimator = Estimator(model, cluster, source)
    found = estimator.estimate(plan)
    passes = np.array([_passes(stage.work) for stage in found.stages]).T
    if SCHEDULES[plan.schedule].splits_backward:
        weights = [
            _weight_s(estimator, plan, stage, found.samples, each.device) for stage, each in zip(plan.stages, found.stages, strict=True)
        ]
        passes = split_backward(passes, np.minimum(weights, passes[1]))
    held = np.array(
        [_held(estimator, plan, stage, found.samples, each.device) for stage, each in zip(plan.stages, found.stages, strict=True)]
    )
    transfers = np.array(
        [[stage.work.transfer_in_s for stage in found.stages[1:]], [stage.work.transfer_out_s for stage in found.stages[:-1]]]
    )
    groups = found.stages[: plan.num_groups]
    work = workload_of(
        _repeated(passes, found.num_micro_batches),
        _repeated(transfers, found.num_micro_batches),
        devices=[stage.group for stage in found.stages],
        contention="pair",
        after_s=[stage.sync_s + stage.optimizer_s for stage in found.stages],
        stored_bytes=held[:, :1],
        workspace_bytes=np.stack([held[:, 1], held[:, 2], held[:, 2], held[:, 2]])[:, :, None],
        base_bytes=[stage.memory.total_bytes - stage.memory.activations_bytes - stage.memory.workspace_bytes for stage in groups],
        limit_bytes=[stage.limit_bytes for stage in groups],
    )
    return PlannedPipeline(found, work, schedule_of(plan.schedule, plan.num_stages, found.num_micro_batches, plan.num_chunks))


def _repeated(values: Floats, count: int) -> Floats:
    """The same for each micro-batch, as the last axis."""
    return np.repeat(values[:, :, None], count, axis=2)


def _passes(work: StageWork) -> tuple[float, float]:
    """(forward, backward) time of one micro-batch, messages apart; together all of it."""
    compute_s = work.forward_s + work.backward_s + work.recompute_s
    if compute_s == 0:
        return (work.tp_s + work.waiting_s) / 2, (work.tp_s + work.waiting_s) / 2
    again = work.recompute_s / work.forward_s if work.forward_s else 0.0
    forward_s = work.forward_s + work.tp_s / (2 + again) + work.waiting_s * work.forward_s / compute_s
    return forward_s, compute_s + work.tp_s + work.waiting_s - forward_s


def _weight_s(estimator: Estimator, plan: Plan, stage: Stage, samples: int, device: str) -> float:
    """Time of weight gradients: half of the backward pass of ops with trained weights, as the estimate has it."""
    total = 0.0
    for part in parts_of(stage):
        sequence, places = estimator.by_rows(stage, part.tp), estimator.model.ops[part.first : part.last]
        table = estimator.table(share_shape(plan, samples, part.dp), part.tp, sequence)
        trained = np.array([place.op.trainable and place.op.parameters != NOTHING for place in places])
        shape, kind = table.shape_index(share_shape(plan, samples, part.dp)), table.device_index(device)
        times = table.backward_s[table.chain[part.first : part.last], shape, 0, np.array(_algos(stage, part)), kind]
        total += float(times[trained].sum()) / 2
    return total


def _held(estimator: Estimator, plan: Plan, stage: Stage, samples: int, device: str) -> tuple[float, float, float]:
    """Bytes of one micro-batch on one rank of a stage: held between the passes, and what each pass adds at its fullest moment."""
    source, base = estimator.source, 0.0
    bytes_of: OpBytesSource = formula_bytes
    if isinstance(source, Profiled):
        bytes_of, base = source.bytes_of(device, estimator.model.dtype), source.device(device).profile.base_bytes
    stored, forward, backward = 0.0, 0.0, 0.0
    for part in parts_of(stage):
        shift = part.first - stage.first
        again = frozenset(op - shift for op in stage.recomputed() if shift <= op < part.last - stage.first)
        shape = share_shape(plan, samples, part.dp)
        model = estimator.described(stage, part.first)
        line = activation_timeline(model, part.first, part.last, shape, part.tp, _algos(stage, part), again, bytes_of)
        stored += line.held_bytes
        forward = max(forward, line.forward_peak_bytes - line.held_bytes)
        backward = max(backward, line.backward_peak_bytes - line.held_bytes)
    return stored, base + forward, base + backward


def _algos(stage: Stage, part: Part) -> list[int]:
    """The split of each op of a part."""
    return [stage.run_of(op).algo for op in range(part.first, part.last)]
