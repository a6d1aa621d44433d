"""The fastest plans that another system can express: those found that it takes, and plans of the grid where it takes none as good."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from penstock.errors import InfeasibleError
from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan
from penstock.search.assemble import estimated
from penstock.search.baselines import BASELINES, best_of
from penstock.search.choice import Choice
from penstock.search.space.request import Request
from penstock.search.uniform import uniform_choices

__all__ = ["Expressible", "expressible"]

_ALL = 10**6
_SHIFTS = (0, -1, 1, -2, 2, -3, 3)
"""Ops from the beginnings of blocks at which stages are tried to begin."""
Refusal = Callable[[Plan], str]
"""Why a system cannot express a plan; empty where it can."""


@dataclass(frozen=True)
class Expressible:
    """The plans that a system takes, the fastest first, and why it does not take the fastest of all; empty where it does."""

    choices: tuple[Choice, ...]
    reason: str


def expressible(
    request: Request, found: Sequence[Choice], refusal: Refusal, top: int, change: Callable[[Plan], Plan] | None = None
) -> Expressible:
    """Of the plans found, of those with equal degrees and whole layers, and of the grid, the `top` fastest that are not refused.

    With `change` each plan is first made what the system runs, such as an asynchronous one.
    """
    reason = refusal(found[0].plan)
    plans = _candidates(request, found, lambda plan: not refusal(plan if change is None else change(plan)))
    if change is not None:
        plans = (choice for one in plans if (choice := _changed(request, change(one.plan))) is not None)
    taken = list(islice((choice for choice in _different(plans) if not refusal(choice.plan)), 2 * top))
    if not taken:
        raise InfeasibleError(f"none of the plans found can be expressed there. Of the fastest: {reason}")
    return Expressible(tuple(sorted(taken, key=lambda choice: choice.estimate.time_s)[:top]), reason)


def _different(choices: Iterator[Choice]) -> Iterator[Choice]:
    """Each plan once."""
    seen = set()
    for choice in choices:
        key = choice.plan.stages, choice.plan.micro_batching, choice.plan.schedule
        if key not in seen:
            seen.add(key)
            yield choice


def _changed(request: Request, plan: Plan) -> Choice | None:
    """The plan with its estimate, if it is valid and fits."""
    if check_plan(plan, request.model, request.cluster):
        return None
    choice = estimated(request, plan, "grid")
    return choice.clocked() if choice.estimate.fits else None


def _between_blocks(request: Request, plan: Plan) -> Iterator[Plan]:
    """The plan cut between the nearest blocks, or as far from these everywhere, since other systems begin a block elsewhere; its stages
    recompute nothing, or all of their ops where they recompute any."""
    starts, last = request.blocks.start, plan.stages[-1].last
    for shift, again in product(_SHIFTS, (False, True) if any(stage.recompute for stage in plan.stages) else (False,)):
        cuts = [int(starts[abs(starts + shift - stage.first).argmin()]) + shift for stage in plan.stages[1:]]
        edges = [0, *cuts, last]
        if sorted(set(edges)) != edges:
            continue
        stages = tuple(
            replace(stage, first=first, last=last, runs=(), recompute=(((first, last),),) if again and stage.recompute else ())
            for stage, first, last in zip(plan.stages, edges[:-1], edges[1:], strict=True)
        )
        yield replace(plan, stages=stages, predicted=None)


def _candidates(request: Request, found: Sequence[Choice], taken: Callable[[Plan], bool]) -> Iterator[Choice]:
    yield from found
    for plan in (plan for choice in found for plan in _between_blocks(request, choice.plan)):
        if taken(plan) and (whole := _changed(request, plan)) is not None:
            yield whole
    layers = next(baseline for baseline in BASELINES if baseline.name == "FASOP")
    if (whole := best_of(layers, request)) is not None:
        yield whole
    try:
        grid = uniform_choices(request, _ALL, lambda: None)
    except InfeasibleError:
        return
    yield from (choice.clocked() for choice in grid)
