"""Whether a stage's passes are played from recordings on a GPU (`runtime.parallel.recordings`), so that none waits for its host."""

from __future__ import annotations

from penstock.models.ops import Model
from penstock.plans.plan import Plan, Stage
from penstock.schedules.rules import SCHEDULES

__all__ = ["can_be_recorded", "is_recorded"]


def can_be_recorded(plan: Plan, stage: Stage, model: Model) -> bool:
    """Whether passes of micro-batches of one shape are the same work every time, on one rank and from weights that stay in place.

    Nothing may be drawn at random, and the module must be one of ours: what others do beside their kernels is not known.
    """
    rules = SCHEDULES[plan.schedule]
    if rules.asynchronous or rules.splits_backward or stage.runs or stage.zero > 1 or stage.degrees.tp > 1:
        return False
    return not any(op.config.get("dropout") or op.kind == "traced" for op in model.distinct_ops)


def is_recorded(plan: Plan, stage: Stage, model: Model) -> bool:
    """Whether they are in training: micro-batches of a fixed number of padded rows have few shapes, which come again and again."""
    return plan.micro_batching.policy == "fixed" and plan.micro_batching.layout == "padded" and can_be_recorded(plan, stage, model)
