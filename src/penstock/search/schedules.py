"""The same stages under other schedules: zero-bubble as they are, interleaved with each group's ops in several chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.plans.build import BESIDE, block_ranges, uniform_cuts
from penstock.plans.plan import Plan, Stage
from penstock.plans.validity import check_plan
from penstock.search.families import CHUNKS

if TYPE_CHECKING:
    from penstock.search.request import Request

__all__ = ["rescheduled"]


def rescheduled(request: Request, plan: Plan) -> Iterator[Plan]:
    """Valid plans with the groups and micro-batches of a 1F1B plan under the other schedules of the request."""
    if plan.num_stages < 2 or plan.schedule != "1f1b":
        return
    candidates = []
    if "zero-bubble" in request.schedules and not any(stage.recompute for stage in plan.stages):
        candidates.append(replace(plan, schedule="zero-bubble"))
    if "interleaved" in request.schedules and not any(stage.recompute for stage in plan.stages):
        candidates += [found for chunks in CHUNKS if (found := _interleaved(request, plan, chunks)) is not None]
    yield from (candidate for candidate in candidates if not check_plan(candidate, request.model, request.cluster))


def _interleaved(request: Request, plan: Plan, chunks: int) -> Plan | None:
    """Equal numbers of blocks for every chunk; None where there are too few of them or groups differ."""
    if len({stage.degrees for stage in plan.stages}) > 1 or plan.num_stages * chunks > _num_blocks(request):
        return None
    cuts = uniform_cuts(request.model, plan.num_stages * chunks)
    stages: list[Stage] = []
    for index, (first, last) in enumerate(cuts):
        stages.append(replace(plan.stages[index % plan.num_stages], first=first, last=last))
    return replace(plan, stages=tuple(stages), schedule="interleaved")


def _num_blocks(request: Request) -> int:
    return sum(name not in BESIDE for name, _ in block_ranges(request.model))
