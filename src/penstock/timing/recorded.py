"""Whether a stage's passes are played from recordings on a GPU (`runtime.parallel.recordings`), so that none waits for its host.

A recording serves one shape, so that shapes have to come again. Where a stage is the whole model nobody else must agree on the length of
its rows: they are padded a little further, to one of a few lengths.
"""

from __future__ import annotations

from penstock.models.ops import Model
from penstock.plans.plan import Plan, Stage
from penstock.schedules.rules import SCHEDULES

__all__ = ["can_be_recorded", "is_recorded", "recorded_length", "recorded_rows"]

_SHAPES_BITS = 3
"""Rows have 2³ lengths between a power of two and the next, or so many pairs of lengths where there is a decoder."""
_LEAST_STEP = 8


def can_be_recorded(plan: Plan, stage: Stage, model: Model) -> bool:
    """Whether passes of micro-batches of one shape are the same work every time, on one rank and from weights that stay in place.

    Nothing may be drawn at random, and the module must be one of ours: what others do beside their kernels is not known.
    """
    rules = SCHEDULES[plan.schedule]
    if rules.asynchronous or rules.splits_backward or stage.runs or stage.zero > 1 or stage.degrees.tp > 1:
        return False
    return not any(op.config.get("dropout") or op.kind == "traced" for op in model.distinct_ops)


def is_recorded(plan: Plan, stage: Stage, model: Model, *, ragged: bool) -> bool:
    """Whether training records the passes of a stage: fixed numbers of padded rows have few shapes, which come again and again.

    `ragged`: samples differ in length. Stages of a pipeline then see too many shapes.
    """
    if plan.micro_batching.policy != "fixed" or plan.micro_batching.layout != "padded" or (ragged and plan.num_stages > 1):
        return False
    return can_be_recorded(plan, stage, model)


def recorded_length(length: int, *, has_decoder: bool) -> int:
    """How far rows of this length are padded for a recording: by 4 % on average, by 8 % where there is a decoder."""
    bits = _SHAPES_BITS - has_decoder
    step = max(_LEAST_STEP, 1 << max(0, length.bit_length() - 1 - bits))
    return -(-length // step) * step


def recorded_rows(rows: int, dec_rows: int, most: tuple[int, int]) -> tuple[int, int]:
    """How far rows of both sides are padded for a recording: never beyond the plan's own lengths, where all of them are alike."""

    def padded(length: int, usual: int) -> int:
        return max(length, min(recorded_length(length, has_decoder=bool(dec_rows)), usual)) if length else 0

    return padded(rows, most[0]), padded(dec_rows, most[1])
