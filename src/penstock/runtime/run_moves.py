"""Moves a run to other plans between its steps: at once, while a step runs, or away from ranks that are to leave the job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.plans.plan import Plan
from penstock.runtime.rank import Rank
from penstock.runtime.recovering.faults import RankFaults
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import PlanInputs, plan_inputs, program_planner
from penstock.runtime.steps.agreeing import Agreed, broadcast_plan
from penstock.runtime.steps.messages import StepWatcher
from penstock.runtime.telemetry.phases import MOVING
from penstock.runtime.worker import Worker

__all__ = ["RunMove", "RunMoves"]


@dataclass
class RunMove:
    """A move to another plan, as one process knows it."""

    request: TrainRequest
    """The run's, with the new plan."""
    members: Sequence[int] | None = None
    """Processes that go on; None: all."""
    inputs: PlanInputs | None = None
    """Under the new plan, once all that may fail has succeeded."""
    paused_s: float = 0.0
    """How long training stood still for it before the step that runs meanwhile."""
    since_s: float = 0.0
    """Since when training stands still for it."""

    @property
    def pause_s(self) -> float:
        """How long training has stood still for it until now."""
        return self.paused_s + time.perf_counter() - self.since_s


class RunMoves:
    """The moves of a run, in one process: all make each of them after the same step, and the watcher has the state travel."""

    def __init__(self, rank: Rank, worker: Worker, saves: RunSaves, faults: RankFaults) -> None:
        self._rank, self._worker, self._saves, self._faults = rank, worker, saves, faults
        self._begun: RunMove | None = None
        """A move whose state travels while a step runs."""
        self._stayed_with: tuple[int, ...] = ()
        """Ranks whose work could not be moved away: they leave their copies to others."""

    def can_replace(self, leaving: tuple[int, ...]) -> bool:
        """Whether a plan without these ranks can be looked for. The node that leads has the first of all, and what others need."""
        return leaving not in ((), self._stayed_with) and self._members[0] not in leaving

    def after_step(self, agreed: Agreed, request: TrainRequest, step: int, watcher: StepWatcher) -> RunMove | None:
        """Makes, begins or ends the move that all have agreed on, before `step` of a run that goes on under `request`. Returns the move
        that was made; None: the plan in force stays."""
        if self._begun is not None:
            move, self._begun, is_over = self._begun, None, bool(agreed.ended_by)
            return self._finished(move, step, watcher, is_over=is_over)
        if agreed.order is not None and not agreed.ended_by:
            move = RunMove(replace(request, plan=agreed.order.plan), since_s=time.perf_counter())
            return self._made(move, step, watcher, beside_step=not agreed.order.exact)
        if step < request.steps and self.can_replace(agreed.leaving):
            return self._replaced(agreed.leaving, request, step, watcher)
        return None

    def _made(self, move: RunMove, step: int, watcher: StepWatcher, *, beside_step: bool) -> RunMove | None:
        """Moves at once, or begins to; the old plan stays in force where a process cannot."""
        self._saves.wait()
        plan, prepare = move.request.plan, partial(self._prepare, move)
        if beside_step and step + 1 < move.request.steps and watcher.begin(self._rank, plan, step, prepare):
            move.paused_s, self._begun = move.pause_s, move
            return None
        return move if watcher.move(self._rank, plan, step, prepare, move.members) else None

    def _finished(self, move: RunMove, step: int, watcher: StepWatcher, *, is_over: bool) -> RunMove | None:
        """Ends a move whose state has travelled while a step ran, unless the run is over."""
        move.since_s = time.perf_counter()
        if is_over:
            watcher.cancel()
            return None
        self._saves.wait()
        return move if watcher.finish(step) else None

    def _replaced(self, leaving: tuple[int, ...], request: TrainRequest, step: int, watcher: StepWatcher) -> RunMove | None:
        """Moves to the best plan without these ranks, whose processes end, if there is one."""
        since_s, members = time.perf_counter(), self._members
        plan: Plan | None = watcher.without(leaving) if self._worker.rank == members[0] else None
        plan = broadcast_plan(self._worker.groups, plan)
        self._stayed_with = leaving
        if plan is None:
            return None
        rest = tuple(member for member in members if member not in leaving)
        return self._made(RunMove(replace(request, plan=plan), rest, since_s=since_s), step, watcher, beside_step=False)

    def _prepare(self, move: RunMove) -> None:
        """Does what may still fail, while the old plan is in force."""
        self._faults.meet(MOVING)
        move.inputs = plan_inputs(move.request, program_planner(move.request), self._worker.rank)

    @property
    def _members(self) -> Sequence[int]:
        return self._worker.groups.generation.members
