"""Watching a run: the figures of each step go to a detector, what it notices is written down with what is done about it, and done.

    figures of all ranks ─► Detector ─► change ─► events.jsonl, and a note in the terminal
                                           └────► Adapter ─► decision ─► events.jsonl ─► order: all processes move
    `penstock replan` ─► replan.json ────────────────────────────────────────────────────────┘

The first process of a job alone notices, decides and is asked: what it orders goes to all with the next message after a step.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.adapting.asking import MoveRequest, asked_for, withdraw
from penstock.adapting.deaths import RunWitness
from penstock.adapting.detecting import REMEDIED, WARM_UP, Cause, Change, Detector, StepFigures, Subject
from penstock.adapting.events import EVENTS, RunEvent, aborted, asked, decided, moved, noticed
from penstock.adapting.link_probes import LinkProbes
from penstock.adapting.moving import MoveAbortedError, move, require_movable
from penstock.adapting.overlapping import OverlappedMove
from penstock.errors import InfeasibleError, InputError, PenstockError
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.texts import format_ranks
from penstock.plans.validity import require_valid
from penstock.programs.memory import require_memory
from penstock.runtime.steps.messages import StepWatcher
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.steps import LineLog

if TYPE_CHECKING:
    from penstock.adapting.adapter import Adapter
    from penstock.adapting.deciding import Decision
    from penstock.adapting.moves import Moves
    from penstock.runtime.rank import Rank
    from penstock.runtime.run import Run

__all__ = ["Watch", "move_run", "obey_run", "watch_run"]


HOST_STEPS = 5
"""Steps by the most of which it is judged whether a host is what holds its device up."""


def watch_run(run: Run, *, moves: bool = False, notices: bool = True) -> StepWatcher:
    """The watcher of each process of a run: what `PlanTrainer` takes as `watching`. Nothing is noticed where ranks have to share processor
    cores, and slow each other down in turn."""
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", len(run.members)))
    notices = notices and not (run.computes_on_cores and num_here > len(os.sched_getaffinity(0)))
    probes = LinkProbes(run.rank, run.members) if notices else None
    if not run.is_first:
        return _Follower(notices, probes)
    found = Watch(
        run.request.plan, run.request.out, members=run.members, anew=run.is_new, moves=moves, notices=notices, probes=probes,
        num_steps=run.request.steps,
    )  # fmt: skip
    found.forget_request(run.step, goes_on=run.goes_on)
    return found


def move_run(run: Run) -> StepWatcher:
    """The watcher of a run that moves to better plans (`--adapt move`)."""
    return watch_run(run, moves=True)


def obey_run(run: Run) -> StepWatcher:
    """The watcher of a run that notices nothing, and moves only when `penstock replan` asks for it (`--adapt off`)."""
    return watch_run(run, notices=False)


class _Follower:
    """The watcher of every process but the first: it does what the first one orders."""

    def __init__(self, measures: bool, probes: LinkProbes | None) -> None:
        self.measures, self._probes = measures, probes
        self.exact = False
        self._made: Moves | None = None
        """What travelled in the last move."""
        self._begun: OverlappedMove | None = None
        """A move that goes on beside a step."""

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> Sequence[str]:
        if self._probes is not None:
            self._probes.after(step, ranks)
        return ()

    def order(self, step: int) -> Plan | None:
        return None

    def begin(self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object]) -> bool:
        """Whether all processes have begun to send while the step runs. What speaks against it speaks against `move` too."""
        begun = OverlappedMove(rank, plan, step + 1, prepare)
        with suppress(InputError, InfeasibleError, MoveAbortedError):
            if begun.begin():
                self._begun = begun
        return self._begun is not None

    def finish(self, step: int) -> bool:
        """Whether all processes have moved."""
        begun, self._begun = self._begun, None
        assert begun is not None
        return self._carried_out(step, begun.finish)

    def cancel(self) -> None:
        if self._begun is not None:
            self._begun.cancel()
        self._begun = None

    def without(self, ranks: Sequence[int]) -> Plan | None:
        return None

    def move(self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object], members: Sequence[int] | None = None) -> bool:
        """Whether all processes have moved."""
        return self._carried_out(step, lambda: move(rank, plan, step, prepare, members))

    def _carried_out(self, step: int, act: Callable[[], Moves]) -> bool:
        try:
            self._made = act()
        except (InputError, InfeasibleError, MoveAbortedError) as error:  # raised on all, with the old plan in force
            self._stayed(step, error)
            return False
        return True

    def _stayed(self, step: int, error: PenstockError) -> None:
        """The move was aborted."""

    def moved(self, step: int, plan: Plan, pause_s: float) -> Sequence[str]:
        return ()

    def close(self) -> None:
        pass


class Watch(_Follower):
    """The watcher of the first process: writes the events of a run into its folder, and with `moves` orders what it decides."""

    def __init__(
        self, plan: Plan, out: str | Path, *, members: Sequence[int] = (), anew: bool = True, moves: bool = False, notices: bool = True,
        probes: LinkProbes | None = None, num_steps: float = math.inf,
    ) -> None:  # fmt: skip
        super().__init__(notices, probes)
        self._plan, self._members, self._moves, self._out = plan, tuple(members or plan.ranks), moves, Path(out)
        self._num_steps = num_steps
        self._subjects = _subjects(self._members)
        if probes is not None:
            self._subjects[Cause.LINK] = probes.subjects
        self._detector = Detector(self._subjects)
        self._adapter: Adapter | None = None
        self._host_bound: deque[set[int]] = deque(maxlen=HOST_STEPS)
        """Ranks whose hosts issued passes no sooner than they were needed, in the last steps."""
        self._slow_hosts: set[int] = set()
        """Ranks that were told to be slow by their hosts."""
        self._decision: Decision | None = None
        """What is to be carried out, if nothing else is asked for."""
        self._request: MoveRequest | None = None
        """What somebody has asked for, and can have."""
        self._leaving: Sequence[int] = ()
        """Ranks that the next plan is to be without, since they leave the job."""
        self._left: dict[int, float] = {}
        """Ranks that the plan in force leaves without work: how slow each was when it was left."""
        self._steps_until_due = max(WARM_UP) + 1 if plan.micro_batching.made_for_slow else 0
        """A plan that a run before had for slow ranks is thought over when they must have been noticed, should they still be slow."""
        self._told: tuple[bool, str] = False, "nothing"
        """Of the last decision that was written."""
        self._undecided = False
        """Whether it turned out that plans of this kind cannot be compared."""
        if anew:
            (self._out / EVENTS).unlink(missing_ok=True)
        self._events: LineLog | None = LineLog(self._out / EVENTS) if notices else None

    def forget_request(self, step: int, *, goes_on: bool) -> None:
        """Drops what was asked for before: of a run that has ended, or (`goes_on`) of this one before it lost processes."""
        try:
            found = asked_for(self._out) if goes_on else None
        except PenstockError:  # it was none
            found = None
        if found is not None:
            self._stayed(step, MoveAbortedError("processes were lost, or left, before the move. Ask for it again."), found)
        withdraw(self._out)

    def _log(self, event: RunEvent) -> None:
        self._events = self._events or LineLog(self._out / EVENTS)
        self._events.write(event)

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> Sequence[str]:
        """Ranks have measured this in a step; what to say about it."""
        if not self.measures:
            return ()
        self._host_bound.append({rank for rank, own in ranks.items() if own.is_host_bound})
        changes = [self._attributed(change) for change in self._detector.add(step, _figures(ranks, self._plan, self._left))]
        if self._probes is not None and (messages := self._probes.after(step, ranks)) is not None:
            changes += self._probes.changes(self._detector, messages)
        events = [noticed(change, time.time()) for change in changes]
        for event in events:
            self._log(event)
        return [*(event.text + "." for event in events), *self._decide(step, changes)]

    def _attributed(self, change: Change) -> Change:
        """A rank whose passes take longer because its host issues them no faster is slow by its host, until it is told to be fast again."""
        if change.cause is not Cause.COMPUTE:
            return change
        (rank,) = change.subject
        bound = 2 * sum(rank in ranks for ranks in self._host_bound) > len(self._host_bound)
        if change.factor > change.before:
            (self._slow_hosts.add if bound else self._slow_hosts.discard)(rank)
        return replace(change, cause=Cause.HOST) if rank in self._slow_hosts else change

    def _decide(self, step: int, changes: Sequence[Change]) -> Sequence[str]:
        """Writes down what is, or would be, done, where that is new; a note where nobody can say."""
        slower = [change for change in changes if change.cause in REMEDIED]
        self._steps_until_due -= 1
        if self._undecided or self._decision is not None or not (slower or self._adapter or self._steps_until_due == 0):
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
            self._log(decided(decision, time.time(), moves=self._moves))
        if decision.moves and self._moves:
            self._decision = decision
        return ()

    def _new_adapter(self) -> Adapter:
        """Made when something is slow: the search takes seconds to import, which most runs never need."""
        from penstock.adapting.adapter import Adapter
        from penstock.adapting.ladder import Ladder
        from penstock.costs.sources import beside_loads, open_costs

        cluster = cluster_of(self._plan)
        source = open_costs(self._plan.costs, cluster)
        ladder = Ladder(model_of(self._plan), cluster, source, devices=self._members)
        return Adapter(ladder, self._plan, self._subjects, self._detector, beside_loads(source))

    def order(self, step: int) -> Plan | None:
        """The plan that was asked for, or decided."""
        if self._begun is not None:
            return None
        self._hear(step)
        self.exact = self._request is not None and self._request.at > 0
        if self._request is not None:
            return self._request.wanted() if self._request.at <= step else None
        return None if self._decision is None else self._decision.chosen.plan

    def without(self, ranks: Sequence[int]) -> Plan | None:
        """The best plan for the others, to which the job can move."""
        others = [one for one in self._members if one not in ranks]
        try:
            plan = RunWitness(self._out).smaller_plan(self._plan, ranks, others) if set(ranks) & set(self._plan.ranks) else self._plan
        except PenstockError:  # which whoever goes on after they have left finds too, and tells
            return None
        self._leaving = ranks
        return plan

    def _hear(self, step: int) -> None:
        """Looks for a request; one that cannot be met is answered at once."""
        found = None
        try:
            found = asked_for(self._out)
            if found is not None and (self._request is None or found.id != self._request.id):
                self._check(found, step)
                self._log(asked(step, time.time(), found.at, found.id))
        except PenstockError as error:
            self._stayed(step, error, found)
            found = None
        self._request = found

    def _check(self, request: MoveRequest, step: int) -> None:
        if request.at and request.at < step:
            raise InputError(f"--at is {request.at}, but step {step} is next. Ask for that or a later one.")
        if request.at >= self._num_steps:
            raise InputError(f"--at is {request.at}, but the last step of the run is {self._num_steps - 1}. Ask for an earlier one.")
        plan = request.wanted()
        model, cluster = model_of(plan), cluster_of(plan)
        require_valid(plan, model, cluster)
        if refused := unsupported(plan, model):
            raise InputError("the plan cannot be run: " + "; ".join(refused))
        require_movable(self._plan, plan, self._members)
        require_memory(plan, model, cluster)

    def moved(self, step: int, plan: Plan, pause_s: float) -> Sequence[str]:
        """Writes down that it was carried out."""
        assert self._made is not None
        if self._leaving:  # what was asked for before is answered by whoever watches the others from now on
            request, remedy = None, f"without rank{'s' * (len(self._leaving) > 1)} {format_ranks(self._leaving)}"
        else:
            request, remedy = self._adopted(plan)
        event = moved(step, time.time(), self._made.num_bytes, pause_s, remedy, request and request.id)
        self._log(event)
        return [event.text + "."]

    def _adopted(self, plan: Plan) -> tuple[MoveRequest | None, str]:
        """The plan that was asked for, or decided, is in force: what it was of these, and why."""
        kept, factors = set(plan.ranks), self._detector.factors(Cause.COMPUTE)
        left = {rank: factors[rank,] for rank in self._members if rank not in kept and rank not in self._left}
        self._left = {rank: factor for rank, factor in {**left, **self._left}.items() if rank not in kept}
        request, decision, self._plan = self._request, self._decision, plan
        self._request = self._decision = None
        self._told = False, ""
        if request is not None:  # who asked knows best: nothing else is decided before something changes
            withdraw(self._out)
            self._adapter = None
        elif decision is not None and self._adapter is not None:
            self._adapter.adopted(decision)
        return request, "as asked" if request or decision is None else decision.chosen.rung.value

    def _stayed(self, step: int, error: PenstockError, request: MoveRequest | None = None) -> None:
        request = request or self._request
        withdraw(self._out)  # before it is answered: whoever hears that may ask for another
        self._log(aborted(step, time.time(), error, request and request.id))
        if request is None and self._decision is not None and self._adapter is not None:
            self._adapter.decider.refuse(self._decision, str(error))
        self._request = self._decision = None
        self._leaving = ()

    def close(self) -> None:
        """The run has ended."""
        if self._events is not None:
            self._events.close()


def _subjects(members: Sequence[int]) -> dict[Cause, list[Subject]]:
    ranks: list[Subject] = [(rank,) for rank in members]
    return {Cause.COMPUTE: ranks, Cause.DATA: ranks, Cause.PLANNING: [()]}


def _figures(ranks: Mapping[int, RankFigures], plan: Plan, left: Mapping[int, float]) -> dict[Cause, StepFigures]:
    """The figures of all processes, as detectors take them. Whoever gets its program last holds all others up. Of a rank without work it is
    known how slow it was when it was `left` so, and how a probe has changed since then."""
    last = max(ranks.values(), key=lambda own: own.planning_wait_s)
    measured = [own.compute_s for own in ranks.values()]
    predicted = [own.predicted_s / left.get(rank, 1.0) for rank, own in ranks.items()]
    # The first steps are not measured: ranks warm up, and open their costs.
    known = all(ranks[rank].compute_s and ranks[rank].predicted_s for rank in plan.ranks)
    return ({Cause.COMPUTE: StepFigures(measured, predicted)} if known else {}) | {
        Cause.DATA: StepFigures([own.step_s for own in ranks.values()], [own.step_s - own.data_wait_s for own in ranks.values()]),
        Cause.PLANNING: StepFigures([last.step_s], [last.step_s - last.planning_wait_s]),
    }
