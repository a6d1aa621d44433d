"""The same stages under another schedule: zero-bubble, as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan

if TYPE_CHECKING:
    from penstock.search.request import Request

__all__ = ["rescheduled"]


def rescheduled(request: Request, plan: Plan) -> Iterator[Plan]:
    """The stages and micro-batches of a 1F1B plan under the zero-bubble schedule, where that is asked for and valid."""
    plain = not any(stage.runs or stage.recompute for stage in plan.stages)
    if plan.num_stages > 1 and plan.schedule == "1f1b" and plain and "zero-bubble" in request.schedules:
        candidate = replace(plan, schedule="zero-bubble")
        if not check_plan(candidate, request.model, request.cluster):
            yield candidate
