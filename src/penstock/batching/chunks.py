"""Batches of interleaved plans: micro-batches are cut for device groups, and run chunk by chunk in the interleaved order.

    chunks of a group    0  2        what a micro-batch takes of the group: Σ of its chunks;  what it keeps: Σ of its chunks
    1F1B of the groups ──► micro-batches and their replica ──► interleaved order ──► the event clock, with memory over time

Micro-batches go through the chunks in rounds of as many as there are groups, which wait for their longest: who goes with whom is tried in a
few ways. An interleaved pipeline holds more micro-batches than 1F1B does. Where they do not fit, patterns of recomputation are raised, and
then micro-batches are cut for less room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from penstock.batching.costs import QUANTITIES, ChunkCosts, Floats, LayoutCosts, PipelineCosts
from penstock.batching.plan import BatchPlan, ReplicaBatch
from penstock.batching.workloads import batch_workload, is_priced
from penstock.errors import InfeasibleError
from penstock.models.micro_batch import MicroBatch
from penstock.schedules.actions import Schedule
from penstock.schedules.orders import with_depths
from penstock.schedules.rules import CHUNKED_SCHEDULE, schedule_of
from penstock.timing.execution import execute

__all__ = ["grouped", "run_interleaved", "usual_order"]

_ROOM = (1.0, 0.8, 0.6, 0.45, 0.3, 0.2)
"""Parts of the room that micro-batches are cut for, one after the other, until they fit."""


def grouped(costs: PipelineCosts, num_groups: int, state_bytes: Floats) -> PipelineCosts:
    """The costs of device groups, from those of their chunks: stage s is a chunk of group s % groups; `state_bytes` [R, groups]."""
    stages = costs.num_stages
    kinds: dict[tuple[int, ...], int] = {}
    stage_class = np.empty((costs.num_replicas, num_groups), dtype=np.int64)
    for r, g in np.ndindex(stage_class.shape):
        stage_class[r, g] = kinds.setdefault(tuple(costs.stage_class[r, g::num_groups].tolist()), len(kinds))
    layouts = {
        layout: LayoutCosts(grid.axes, np.stack([_one_after_another(grid.values[..., own, :, :]) for own in kinds], axis=3))
        for layout, grid in costs.layouts.items()
    }
    between = [[cut for cut in range(stages - 1) if cut % num_groups == g] for g in range(num_groups - 1)]
    hops = np.stack([costs.hops[:, :, cuts].sum(axis=2) for cuts in between], axis=2)
    return replace(
        costs, layouts=layouts, stage_class=stage_class, state_bytes=state_bytes, limit_bytes=costs.limit_bytes[:, :num_groups], hops=hops,
        chunks=ChunkCosts(costs.layouts, costs.stage_class, costs.hops),
    )  # fmt: skip


def _one_after_another(chunks: Floats) -> Floats:
    """[…, M, quantities] of chunks […, chunks, M, quantities] that one device runs in turn, there and back."""
    total = np.zeros((*chunks.shape[:-3], *chunks.shape[-2:]))
    for own in np.moveaxis(chunks, -3, 0):
        for peak in range(QUANTITIES.index("peak_bytes"), len(QUANTITIES)):
            total[..., peak] = np.maximum(total[..., peak], total[..., 2] + own[..., peak])
        total[..., :3] += own[..., :3]
    return total


def usual_order(costs: PipelineCosts, count: int) -> Schedule:
    """1F1B, or interleaved where groups have several chunks."""
    if costs.chunks is None:
        return with_depths(range(costs.num_stages, 0, -1), count)
    return schedule_of(CHUNKED_SCHEDULE, costs.num_stages * costs.num_chunks, count, costs.num_chunks)


def run_interleaved(cuts: Sequence[Callable[[PipelineCosts], BatchPlan]], costs: PipelineCosts) -> BatchPlan:
    """The best of what `cuts` make of the costs of groups, in the interleaved order of their chunks."""
    for part in _ROOM:
        room = costs.state_bytes + part * (costs.limit_bytes - costs.state_bytes)
        plans = [_run(cut(replace(costs, chunks=None, limit_bytes=room)), costs) for cut in cuts]
        fitting = [plan for plan in plans if plan is not None]
        if fitting:
            return min(fitting, key=lambda plan: plan.predicted_s)
    raise InfeasibleError(
        f"micro-batches fit alone but not in an interleaved pipeline of {costs.num_chunks} chunks. Allow more recomputation or memory, "
        "or use a plan of one stage on each device group, which holds fewer."
    )


def _run(plan: BatchPlan, costs: PipelineCosts) -> BatchPlan | None:
    """The plan of groups, interleaved; None if a replica does not fit."""
    replicas = [_interleaved(replica, costs, r) for r, replica in enumerate(plan.replicas)]
    fitting = tuple(replica for replica in replicas if replica is not None)
    limits = tuple(tuple(map(float, row)) for row in costs.limit_bytes)
    time_s = max((replica.predicted_s for replica in fitting), default=0.0) + costs.fixed_s
    return replace(plan, replicas=fitting, predicted_s=time_s, limit_bytes=limits) if len(fitting) == len(replicas) else None


def _interleaved(replica: ReplicaBatch, costs: PipelineCosts, index: int) -> ReplicaBatch | None:
    """The fastest way that fits to recompute in the interleaved order; None if there is none."""
    order = usual_order(costs, len(replica.micro_batches))
    if not replica.micro_batches:
        return replace(replica, schedule=order)
    best: ReplicaBatch | None = None
    for chosen in _patterns(replica.micro_batches, costs):
        if not is_priced(costs, chosen, index):
            continue
        for entering in _entering(batch_workload(costs, chosen, index).durations_s.sum(axis=(0, 1)), costs.num_stages):
            micro_batches = tuple(msgspec.structs.replace(chosen[m], index=number) for number, m in enumerate(entering))
            run = execute(order, batch_workload(costs, micro_batches, index))
            if run.violation is None and (best is None or run.pipeline_s < best.predicted_s):
                best = ReplicaBatch(micro_batches, order, run.pipeline_s, tuple(map(float, run.peak_bytes)), CHUNKED_SCHEDULE)
    return best


def _entering(times_s: Floats, num_groups: int) -> Iterator[list[int]]:
    """Orders to enter in: as they are, the longest or the shortest first, and rounds of alike with long ones in the middle."""
    falling = np.argsort(-times_s, kind="stable").tolist()
    rounds = [falling[at : at + num_groups] for at in range(0, len(falling), num_groups)]
    yield list(range(len(falling)))
    yield falling
    yield falling[::-1]
    yield [m for own in (*rounds[1::2][::-1], *rounds[::2]) for m in own]


def _patterns(micro_batches: tuple[MicroBatch, ...], costs: PipelineCosts) -> Iterator[tuple[MicroBatch, ...]]:
    """Recomputation patterns to try: those chosen for the groups, the same on all their chunks, and each pattern everywhere."""
    yield tuple(msgspec.structs.replace(one, recompute=one.recompute * costs.num_chunks) for one in micro_batches)
    for mode in range(len(costs.modes)):
        all_ = (mode,) * (costs.num_stages * costs.num_chunks)
        yield tuple(msgspec.structs.replace(one, recompute=all_) for one in micro_batches)
