"""Remarks on a valid plan: what is allowed, but worth a second look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.plans.degrees import parts_of
from penstock.plans.texts import format_ranks
from penstock.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan

__all__ = ["idle_devices", "remarks"]


def remarks(plan: Plan, cluster: Cluster) -> list[str]:
    """The remarks: idle devices, settings without effect, bubbles, tp over a network, memory that will not do."""
    return [*idle_devices(plan, cluster), *_without_effect(plan), *_slow(plan, cluster), *_full(plan, cluster)]


def idle_devices(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Which devices a plan has no work for, if any."""
    idle = sorted(set(range(cluster.num_devices)).difference(plan.ranks))
    if idle:
        yield (
            f"{len(idle)} of {cluster.num_devices} devices {'is idle: rank' if len(idle) == 1 else 'are idle: ranks'} "
            f"{format_ranks(idle)}."
        )


def _without_effect(plan: Plan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        parts = parts_of(stage)
        if stage.zero and plan.num_replicas * max(part.dp for part in parts) == 1:
            yield f"stages.{index}.zero is {stage.zero} without effect: one device holds each weight."
        if stage.sequence_parallel and max(part.tp for part in parts) == 1:
            yield f"stages.{index}.sequence_parallel is without effect: tp is 1."


def _slow(plan: Plan, cluster: Cluster) -> Iterator[str]:
    groups = plan.num_groups
    for micro_batches in sorted(set(plan.micro_batches_per_replica or ())):
        if micro_batches < groups:
            yield f"{plural(micro_batches, 'micro-batch')} per replica cannot fill a pipeline of {groups} device groups."
        elif SCHEDULES[plan.schedule].chunked and micro_batches % groups:
            yield (
                f"{micro_batches} micro-batches per replica are not a multiple of {groups} device groups: '{plan.schedule}' has larger "
                "bubbles."
            )
    for index, stage in enumerate(plan.stages):
        for ranks in stage.tp_groups():
            if len({cluster.node_index(rank) for rank in ranks}) > 1:
                yield f"stages.{index} splits ops over ranks {format_ranks(ranks)} of different nodes: tp over a network is slow."
                break


def _full(plan: Plan, cluster: Cluster) -> Iterator[str]:
    if plan.predicted is None or not plan.predicted.memory:
        return
    for index, (stage, memory) in enumerate(zip(plan.stages, plan.predicted.memory, strict=True)):
        smallest = min(cluster.device(rank).memory_bytes for group in stage.devices for rank in group)
        if memory.total_bytes > smallest:
            yield f"stages.{index} is predicted to need {memory.total_bytes / 1e9:.1f} GB on devices of {smallest / 1e9:.1f} GB."
