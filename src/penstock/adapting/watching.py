"""Watching a run: the figures of each step go to a detector, and what it notices is written down with what would be done about it.

    figures of all ranks ─► Detector ─► change ─► events.jsonl, and a note in the terminal
                                           └────► Adapter ─► decision ─► events.jsonl       (nobody carries it out)

The first rank alone has work with it, since only what it writes is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.adapting.detecting import Cause, Change, Detector, StepFigures, Subject
from penstock.adapting.events import EVENTS, decided, noticed
from penstock.errors import PenstockError
from penstock.plans.plan import Plan
from penstock.runtime.telemetry.figures import RankFigures, StepWatcher
from penstock.runtime.telemetry.steps import LineLog

if TYPE_CHECKING:
    from penstock.adapting.adapter import Adapter
    from penstock.runtime.run import Run

__all__ = ["Watch", "watch_run"]


def watch_run(run: Run) -> StepWatcher | None:
    """The watcher of each rank of a run: what `PlanTrainer` takes as `watching`. None where ranks share processor cores, and slow each
    other down in turn."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", len(run.world.ranks)))
    if run.computes_on_cores and num_here > len(os.sched_getaffinity(0)):
        return None
    return Watch(run.request.plan, run.request.out, anew=not run.first_step) if run.is_first else _Bystander()


class _Bystander:
    """Of ranks that write nothing."""

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


class Watch:
    """Writes the events of a run into its folder."""

    def __init__(self, plan: Plan, out: str | Path, *, anew: bool = True) -> None:
        self._plan, self._subjects = plan, _subjects(plan)
        self._detector = Detector(self._subjects)
        self._log = LineLog(Path(out) / EVENTS, anew=anew)
        self._adapter: Adapter | None = None
        self._told: tuple[bool, str] = False, "nothing"
        """Of the last decision that was written."""
        self._undecided = False
        """Whether it turned out that plans of this kind cannot be compared."""

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> Sequence[str]:
        """Ranks have measured this in a step; what to say about it."""
        changes = self._detector.add(step, _figures(ranks))
        events = [noticed(change, time.time()) for change in changes]
        for event in events:
            self._log.write(event)
        return [*(event.text + "." for event in events), *self._decide(step, changes)]

    def _decide(self, step: int, changes: Sequence[Change]) -> Sequence[str]:
        """Writes down what would be done, where that is new; a note where nobody can say."""
        slower = [change for change in changes if change.cause in (Cause.COMPUTE, Cause.LINK)]
        if self._undecided or not (slower or self._adapter):
            return ()
        try:
            self._adapter = self._adapter or self._new_adapter()
            decision = self._adapter.decide(step, changes)
        except PenstockError as error:
            self._undecided = True
            return [f"what could be done about slow ranks is not known: {error}"]
        now = decision.moves, decision.chosen.rung.value if decision.moves else ""
        if slower or now != self._told:
            self._told = now
            self._log.write(decided(decision, time.time()))
        return ()

    def _new_adapter(self) -> Adapter:
        """Made when something is slow: the search takes seconds to import, which most runs never need."""
        from penstock.adapting.adapter import Adapter
        from penstock.adapting.ladder import Ladder
        from penstock.costs.sources import open_costs
        from penstock.plans.references import cluster_of, model_of

        cluster = cluster_of(self._plan)
        ladder = Ladder(model_of(self._plan), cluster, open_costs(self._plan.costs, cluster))
        return Adapter(ladder, self._plan, self._subjects, self._detector)

    def close(self) -> None:
        """The run has ended."""
        self._log.close()


def _subjects(plan: Plan) -> dict[Cause, list[Subject]]:
    ranks: list[Subject] = [(rank,) for rank in plan.ranks]
    return {Cause.COMPUTE: ranks, Cause.DATA: ranks, Cause.PLANNING: [()]}


def _figures(ranks: Mapping[int, RankFigures]) -> dict[Cause, StepFigures]:
    """What ranks measured, as detectors take it. Whoever gets its program last holds all others up."""
    last = max(ranks.values(), key=lambda own: own.planning_wait_s)
    measured, predicted = [own.compute_s for own in ranks.values()], [own.predicted_s for own in ranks.values()]
    # The first steps are not measured: ranks warm up, and open their costs.
    compute = {Cause.COMPUTE: StepFigures(measured, predicted)} if all(measured) and all(predicted) else {}
    return compute | {
        Cause.DATA: StepFigures([own.step_s for own in ranks.values()], [own.step_s - own.data_wait_s for own in ranks.values()]),
        Cause.PLANNING: StepFigures([last.step_s], [last.step_s - last.planning_wait_s]),
    }
