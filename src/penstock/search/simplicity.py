"""The order of simplicity of plans, and which of them to offer: the simplest of those that the costs cannot tell from the fastest.

Costs are predictions. Where two plans are nearer to each other than such predictions are to the truth (`CostSource.error`), which of them
is faster is not known, but which is easier to run, to debug and to move to another cluster is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from penstock.schedules.rules import SCHEDULES
from penstock.search.choice import Choice

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["Complexity", "complexity", "fastest_of_each", "simplest"]


class Complexity(NamedTuple):
    """What a plan asks of whoever runs it, the most important first; less is simpler."""

    stages: int
    """Device groups of the pipeline; 1 is none."""
    tp: int
    """Devices that an op is divided over, at most."""
    schedule: int
    """0: 1F1B; then 1 for each further chunk of a device group, and for backward passes in halves or without a common update."""
    unlike: int
    """How many of these differ: degrees of the stages, degrees of single ops, shares of the replicas."""
    recompute: int
    """0: nothing; 1: one run of ops in each stage, as all blocks are; 2: ops picked here and there."""
    zero: int
    """0: weights and gradients whole on each device (ZeRO 0 and 1); then 1 for ZeRO-2 and 2 for ZeRO-3."""

    def is_below(self, other: Complexity) -> bool:
        """Whether a plan is simpler than another: in how it divides the model it asks for more in nothing and for less in something; or it
        divides the model alike, and the same holds of how it saves memory.

        Fewer stages with tp instead are not simpler, only other. What is simpler is also less as a tuple.
        """
        (mine, my_savings), (its, its_savings) = ((one[:4], one[4:]) for one in (self, other))
        one, two = (mine, its) if mine != its else (my_savings, its_savings)
        return one != two and all(a <= b for a, b in zip(one, two, strict=True))


def complexity(plan: Plan) -> Complexity:
    """Where a plan stands in the order of simplicity; neither micro-batches nor where stages are cut count."""
    stages, rules = plan.stages, SCHEDULES[plan.schedule]
    unlike = (len({stage.degrees for stage in stages}) > 1, any(stage.runs for stage in stages), bool(plan.micro_batching.per_replica))
    return Complexity(
        stages=plan.num_groups,
        tp=max(tp for stage in stages for tp in (stage.degrees.tp, *(run.tp for run in stage.runs))),
        schedule=plan.num_chunks - 1 + (rules.splits_backward or rules.asynchronous),
        unlike=sum(unlike),
        recompute=min(2, max(len(stage.pattern()) for stage in stages)),
        zero=max(0, *(stage.zero - 1 for stage in stages)),
    )


def simplest(plans: Sequence[Plan], times_s: Sequence[float], error: float) -> int:
    """The place of the plan to offer: of those that are simpler than the fastest, and slower by at most `error`, a share, the simplest; the
    fastest of several. The fastest of all where there is none, as with an error of 0, which is what sources state that know of none.
    """
    fastest = min(range(len(plans)), key=times_s.__getitem__)
    limit_s, its = times_s[fastest] * (1 + error), complexity(plans[fastest])
    near = {place: complexity(plans[place]) for place, time_s in enumerate(times_s) if time_s <= limit_s}
    simpler = [place for place, own in near.items() if own.is_below(its)]
    return min(simpler, key=lambda place: (near[place], times_s[place]), default=fastest)


def fastest_of_each(choices: Iterable[Choice]) -> list[Choice]:
    """Of plans in the order of their times, the first of each complexity."""
    found: dict[Complexity, Choice] = {}
    for choice in choices:
        found.setdefault(complexity(choice.plan), choice)
    return list(found.values())
