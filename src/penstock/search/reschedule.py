"""The same stages under another schedule: one that splits backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, unchunked

if TYPE_CHECKING:
    from penstock.search.request import Request

__all__ = ["rescheduled"]


def rescheduled(request: Request, plan: Plan) -> Iterator[Plan]:
    """The stages and micro-batches of a 1F1B plan under schedules that split backward passes, where asked for and valid."""
    plain = not any(stage.runs or stage.recompute for stage in plan.stages)
    split = [name for name in unchunked(request.schedules) if SCHEDULES[name].splits_backward]
    for name in split if plan.num_stages > 1 and plan.schedule == DEFAULT_SCHEDULE and plain else ():
        candidate = replace(plan, schedule=name)
        if not check_plan(candidate, request.model, request.cluster):
            yield candidate
