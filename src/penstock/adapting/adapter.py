"""A run that adapts, step by step: figures of all ranks in, changes that were noticed and what is decided about them out.

    figures ─► Detector ─► changes ─► Speeds ─► Decider ─► decision

Every rank has an adapter of its own and feeds it with the same gathered figures: they notice and decide alike, without asking each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.adapting.deciding import Decider, Decision
from penstock.adapting.detecting import REMEDIED, Cause, Change, Detector, StepFigures, Subject
from penstock.adapting.ladder import Ladder
from penstock.adapting.slowdowns import usual_slowdowns
from penstock.costs.profile import BesidePoint
from penstock.costs.speeds import Speeds
from penstock.plans.plan import Plan

__all__ = ["Adapter", "AfterStep", "measured_speeds"]

_GRID = math.log(1.05)
"""Factors are taken in steps of 5 %: a level that gets a little better every step is no reason to think again every step."""


@dataclass(frozen=True)
class AfterStep:
    """The changes noticed in one step, and the decision that follows."""

    changes: tuple[Change, ...]
    decision: Decision


class Adapter:
    """Notices and decides for one run; who carries decisions out says so with `adopted`."""

    def __init__(
        self, ladder: Ladder, plan: Plan, subjects: Mapping[Cause, Sequence[Subject]], detector: Detector | None = None,
        beside: Sequence[BesidePoint] = (),
    ) -> None:  # fmt: skip
        """`subjects` are the ranks and links of the job, also of those that the plan leaves out; `detector` has followed the run so far;
        `beside` is what a profile measured beside loads."""
        self._beside = beside
        self.detector, self.decider = detector or Detector(subjects), Decider(ladder, plan)
        self._links = Cause.LINK in subjects

    def add(self, step: int, figures: Mapping[Cause, StepFigures]) -> AfterStep:
        """Takes the figures of all ranks for a step, and decides what to do after it."""
        changes = self.detector.add(step, figures)
        return AfterStep(tuple(changes), self.decide(step, changes))

    def decide(self, step: int, changes: Sequence[Change]) -> Decision:
        """Decides what to do after a step in which the detector has seen these changes."""
        links = self.detector.factors(Cause.LINK) if self._links else {}
        speeds = measured_speeds(self.detector.factors(Cause.COMPUTE), links, self._beside)
        begun = [change.since for change in changes if change.cause in REMEDIED]
        if begun:
            self.decider.changed(speeds, min(begun))
        elif speeds != self.decider.speeds:
            self.decider.refined(speeds)
        return self.decider.decide(step)

    def adopted(self, decision: Decision) -> None:
        """The decision was carried out: its plan is in force."""
        self.decider.adopted(decision)


def measured_speeds(ranks: Mapping[Subject, float], links: Mapping[Subject, float], beside: Sequence[BesidePoint] = ()) -> Speeds:
    """Speeds from the factors of ranks and links; the ops of a slowed rank are slowed by class, as they usually are beside a load."""
    found = {
        rank: {op_class: _on_grid(each) for op_class, each in usual_slowdowns(beside, factor).items()}
        for (rank,), factor in ranks.items()
        if _on_grid(factor) != 1.0
    }
    slow_links = {(min(pair), max(pair)): slower for pair, factor in links.items() if (slower := _on_grid(factor)) != 1.0}
    return Speeds(found, slow_links)


def _on_grid(factor: float) -> float:
    return math.exp(_GRID * round(math.log(max(factor, 1e-3)) / _GRID))
