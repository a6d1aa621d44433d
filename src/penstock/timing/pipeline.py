"""The micro-batches that run through the pipelines of a plan: how many, of how many samples, of what shape on each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.models.shapes import Shape

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["micro_batches", "share_shape"]


def micro_batches(plan: Plan) -> tuple[int, tuple[int, ...]]:
    """(samples of a micro-batch, micro-batches of each replica in one iteration).

    With the policy `dynamic` each batch decides; what is estimated are as many samples of the plan's length as may come together.
    """
    batching, share = plan.micro_batching, -(-plan.global_batch // plan.num_replicas)
    counts = plan.micro_batches_per_replica
    if counts is not None and batching.samples:
        return batching.samples, counts
    length = plan.seq_length + plan.dec_length
    limits = [share, *([batching.samples] if batching.samples else [])]
    if batching.max_tokens and length:
        limits.append(max(1, batching.max_tokens // length))
    samples = min(limits) if len(limits) > 1 else 1
    return samples, (-(-share // samples),) * plan.num_replicas


def share_shape(plan: Plan, samples: int, dp: int = 1) -> Shape:
    """The part of a micro-batch that one of `dp` ranks works on; the largest where they are not equal."""
    rows = -(-samples // dp)
    if not plan.seq_length:
        return Shape.images(rows)
    if plan.micro_batching.layout == "packed":
        return Shape.packed([plan.seq_length] * rows, [plan.dec_length] * rows if plan.dec_length else ())
    return Shape.padded(rows, plan.seq_length, plan.dec_length)
