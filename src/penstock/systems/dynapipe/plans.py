"""A planned batch in DynaPipe's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.batching.plan import BatchPlan

__all__ = ["dynapipe_plan"]


def dynapipe_plan(batch: BatchPlan, modes: tuple[str, ...]) -> dict[str, Any]:
    """The plan as plain data with DynaPipe's words: sample ids, recompute modes by name, and the order of passes of each device."""
    replicas = []
    for replica in batch.replicas:
        orders = [[[action.micro_batch, "FB"[action.kind]] for action in device] for device in replica.schedule]
        replicas.append({
            "micro_batches": [list(one.samples) for one in replica.micro_batches],
            "recompute": [[modes[mode] for mode in one.recompute] for one in replica.micro_batches],
            "schedule": {"order": orders},
        })  # fmt: skip
    return {"replicas": replicas}
