"""A plan that a search found, with everything that was estimated for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.plans.telling import degree_range
from penstock.timing.iteration_estimate import with_prediction

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.timing.iteration_estimate import Estimate

__all__ = ["FORMULA_OFF", "Choice"]

FORMULA_OFF = 0.1
"""A plan that is slower than the best by no more than this share by formula is worth the clock, which may find it as fast."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with its prediction in it, and the whole estimate behind that."""

    plan: Plan
    estimate: Estimate
    kind: str = "grid"
    """`grid`: equal stages; `exact`: stages of any size; `mixed`: also degrees of each op."""

    @classmethod
    def of(cls, plan: Plan, estimate: Estimate, kind: str = "grid") -> Choice:
        """Writes the estimate into the plan."""
        return cls(with_prediction(plan, estimate), estimate, kind)

    def clocked(self) -> Choice:
        """This choice, timed by the clock instead of the closed formula."""
        from penstock.timing.planned import clocked

        return Choice.of(self.plan, clocked(self.plan, self.estimate), self.kind)

    @property
    def tp(self) -> int | str:
        """The tensor-parallel degree, or the range of degrees where stages differ."""
        return degree_range([tp for stage in self.plan.stages for tp in (stage.degrees.tp, *(run.tp for run in stage.runs))])

    @property
    def dp(self) -> int | str:
        """The degree that divides the samples of a micro-batch, or the range of degrees where stages differ."""
        return degree_range([dp for stage in self.plan.stages for dp in (stage.degrees.dp, *(run.dp for run in stage.runs))])

    @property
    def recompute(self) -> str:
        """`none`, `full`, or how many ops."""
        again = sum(len(stage.recomputed()) for stage in self.plan.stages)
        if self.kind == "grid":
            return "full" if again else "none"
        return plural(again, "op") if again else "none"
