"""How long a pipeline takes, by closed formula, and the micro-batches that run through it.

t is what a stage takes for one micro-batch (both passes, messages included), m the number of micro-batches. The slowest stage is
never idle between its first and its last; the others add the time to reach it and to come back:

    1f1b, gpipe    m · max(t) + Σ others t
    interleaved    m · max(t) + Σ others t / chunks      t of a device group is the sum of its chunks
    zero-bubble    m · max(t) + Σ others max(0, t - 2w)

The last is ZB-H1 (Qi et al., 2024): weight gradients, w for each micro-batch, wait until the device would be idle, so that the
bubble of a stage shrinks from F + B + W to F + B - W (B without W there; t = F + B + W and w = W here).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.models.shapes import Shape

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["micro_batches", "pipeline_s", "share_shape"]


def pipeline_s(
    schedule: str, times_s: Sequence[float], num_micro_batches: int, num_chunks: int = 1, weight_s: Sequence[float] = ()
) -> float:
    """Time from the first forward to the last backward pass of one replica, given what each device group takes per micro-batch.

    >>> pipeline_s("1f1b", [1.0, 2.0, 1.0], num_micro_batches=4)
    10.0
    """
    slowest = max(range(len(times_s)), key=lambda group: times_s[group])
    others = [group for group in range(len(times_s)) if group != slowest]
    if schedule == "zero-bubble":
        fill_s = sum(max(0.0, times_s[group] - 2 * weight_s[group]) for group in others)
    else:
        fill_s = sum(times_s[group] for group in others) / (num_chunks if schedule == "interleaved" else 1)
    return num_micro_batches * times_s[slowest] + fill_s


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
