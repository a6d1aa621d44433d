"""A planned batch as a workload: micro-batches of unequal cost, each with its own recomputation, by the costs it was planned with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batching.costs import QUANTITIES, PipelineCosts
from penstock.batching.plan import BatchPlan
from penstock.errors import InputError, plural
from penstock.models.micro_batch import MicroBatch
from penstock.timing.recorded import FewShapes
from penstock.timing.workload import Floats, Workload, workload_of

__all__ = ["batch_durations_s", "batch_workload", "is_priced", "require_priced"]


def batch_workload(costs: PipelineCosts, micro_batches: Sequence[MicroBatch], replica: int) -> Workload:
    """What one replica runs; sends of a device take turns, as the planner of batches assumes."""
    chosen = _chosen(costs, micro_batches, replica)  # [stages or chunks, micro-batches, quantities]
    forward_s, backward_s, stored, peak, other_peak, backward_peak = np.moveaxis(chosen, 2, 0)
    tokens = np.array([[1.0, batch.shape().tokens, batch.shape().dec_tokens] for batch in micro_batches]).reshape(-1, 3)
    backward = np.maximum(0.0, backward_peak - stored)
    return workload_of(
        np.stack([forward_s, backward_s]),
        costs.parts.hops[replica] @ tokens.T,
        devices=[stage % costs.num_stages for stage in range(len(chosen))],
        contention="device",
        after_s=costs.fixed_s,
        stored_bytes=stored,
        workspace_bytes=np.stack([np.maximum(0.0, np.maximum(peak, other_peak) - stored), backward, backward, backward]),
        base_bytes=costs.state_bytes[replica],
        limit_bytes=costs.limit_bytes[replica],
    )


def is_priced(costs: PipelineCosts, micro_batches: Sequence[MicroBatch], replica: int) -> bool:
    """Whether the costs have times and bytes of all of them; what is larger than anything that was asked for has none."""
    return bool(np.isfinite(_chosen(costs, micro_batches, replica)).all())


def require_priced(batch: BatchPlan, costs: PipelineCosts, where: str) -> None:
    """Refuses a batch of other replicas, stages or modes than the configuration has, or larger than what was profiled."""
    stages = {len(replica.schedule) for replica in batch.replicas}
    used = max((mode for replica in batch.replicas for one in replica.micro_batches for mode in one.recompute), default=0)
    if len(batch.replicas) != costs.num_replicas or stages != {costs.num_stages} or used >= len(costs.modes):
        raise InputError(
            f"{where} is for {plural(len(batch.replicas), 'replica')} of {', '.join(map(str, sorted(stages)))} stages; the configuration "
            f"has {costs.num_replicas} of {costs.num_stages} and {plural(len(costs.modes), 'mode')} of recomputation. Give the one it "
            "was planned with."
        )
    if not all(is_priced(costs, replica.micro_batches, index) for index, replica in enumerate(batch.replicas) if replica.micro_batches):
        raise InputError(f"{where} has micro-batches that the configuration has no costs of. Give the one it was planned with.")


def batch_durations_s(costs: PipelineCosts, micro_batches: Sequence[MicroBatch], replica: int) -> list[list[list[float]]] | None:
    """[kind][stage][micro-batch] of one replica, kinds as in `actions`; None where the costs have no price for one of them."""
    if not micro_batches or not is_priced(costs, micro_batches, replica):
        return None
    forward_s, backward_s = np.moveaxis(_chosen(costs, micro_batches, replica), 2, 0)[:2]
    half_s = (backward_s / 2).tolist()
    return [forward_s.tolist(), backward_s.tolist(), half_s, half_s]


def _chosen(costs: PipelineCosts, micro_batches: Sequence[MicroBatch], replica: int) -> Floats:
    """Costs of each micro-batch on each stage in the mode it runs in there; those of one layout are looked up together."""
    classes = costs.parts.stage_class[replica]
    found = np.zeros((len(classes), len(micro_batches), len(QUANTITIES)))
    for layout in dict.fromkeys(batch.layout for batch in micro_batches):
        own = [number for number, batch in enumerate(micro_batches) if batch.layout == layout]
        points = np.array([_point(micro_batches[number], costs.few_shapes) for number in own], dtype=np.float64)
        modes = np.array([micro_batches[number].recompute or (0,) * len(classes) for number in own])
        values = costs.of_layout(layout).at(*points.T)  # [micro-batches, C, M, quantities]
        found[:, own] = np.moveaxis(values[np.arange(len(own))[:, None], classes, modes], 1, 0)
    return found


def _point(batch: MicroBatch, few_shapes: FewShapes | None) -> tuple[float, float, float]:
    """Where a micro-batch, as it is run, is on the grid of its layout."""
    if batch.layout == "padded":
        run = batch if few_shapes is None else few_shapes.brought(batch)
        return run.num_rows, run.row_length, run.dec_row_length
    shape = batch.shape()
    tokens = shape.tokens if few_shapes is None else few_shapes.num_tokens(shape)
    return tokens, shape.squares / max(tokens, 1), 0
