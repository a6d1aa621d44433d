"""The launcher of one node: starts its ranks, waits on them, and goes on when some die; the only node of a job, the one that leads, or one
that follows, and leads in turn when that is lost.

    train ─► lead ─► run, and again after each death ─► the result
        └──► follow ─► the node that leads is lost ─► follow another, or lead
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import PenstockError
from penstock.runtime.devices.loads import forget_loads
from penstock.runtime.devices.rehearsing import rehearse
from penstock.runtime.interrupts import Interrupted, Interrupts
from penstock.runtime.nodes.following import CALL_S, FollowingNode, NodeLeaves, TakenLead
from penstock.runtime.nodes.leading import MEET_AGAIN_S, LeadingNode, lost_words
from penstock.runtime.nodes.messages import End, Leaving
from penstock.runtime.nodes.place import members_of, node_facts, node_key, nodes_of, ranks_here, store_key, threads_here
from penstock.runtime.nodes.succession import LeaderLostError, LedBy, beating, forget_led, succeed, write_led
from penstock.runtime.planner_processes import Planners, planners_here
from penstock.runtime.recovering.copies import Copies
from penstock.runtime.recovering.faults import FIRST_RANK, Fault, ask_fault, forget_faults
from penstock.runtime.recovering.frozen import FrozenRanks
from penstock.runtime.recovering.recovery import DeathWitness, RunRecovery
from penstock.runtime.request import (
    PACED,
    RECOVER,
    TIMED,
    GoingOn,
    MayLeave,
    NodePlace,
    PlanAdopted,
    StepReport,
    TrainRequest,
    TrainResult,
)  # fmt: skip
from penstock.runtime.run_folder import STEPS, last_step, own_folder, plan_of_run, put_in_force, safe_step
from penstock.runtime.run_inputs import program_planner, run_inputs
from penstock.runtime.run_lock import RunLock
from penstock.runtime.run_predictions import keep_inputs
from penstock.runtime.steps.records import report_of
from penstock.runtime.telemetry.process_files import NODE, forget_processes, named_process
from penstock.runtime.telemetry.status import StatusBoard
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.workers import BeginAnew, PoolSite, WorkerError, WorkerPool
from penstock.timing.disturbance import DisturbanceStrike

__all__ = ["Supervisor", "hearing", "with_safe_step"]

Progress = Callable[[StepReport], None]
_Hear = Callable[[StepReport | PlanAdopted], None]
_OPERATION_S = 1800.0
"""The longest that one transfer or collective may take."""
_RUN_S = 365 * 24 * 3600.0
"""A run may take as long as it takes; a rank that dies is noticed at once all the same."""


class _NodeJoins(BeginAnew):
    """All ranks are to begin anew, with those of a node that has come."""


class _FolderGone(PenstockError):
    """The folder of a run on several nodes was removed, or the lock in it."""


class Supervisor:
    """Starts and watches the ranks of this node for one run, and what leads or follows other nodes."""

    def __init__(
        self, request: TrainRequest, first_step: int, job: Callable[..., Any], watching: Any = None, witness: DeathWitness | None = None
    ) -> None:  # fmt: skip
        """`job` is what each rank does, with `watching` to follow its steps; `first_step` of them are in the checkpoint that it goes on
        from. `witness` is told of deaths."""
        self.request, self._first_step, self._job, self._watching, self._witness = request, first_step, job, watching, witness
        self._ended_by = self._asked = 0
        """The signal that ended the run, and the one that asks for its end."""
        self._board: StatusBoard | None = None

    def train(self, progress: Progress | None = None) -> TrainResult:
        """Starts the processes of this node, trains, and ends them; `progress` hears of every step."""
        request, node = self.request, self.request.node
        recovers = request.on_death == RECOVER
        copies = Copies(members_of(request)[-1] + 1, mirrored=node is not None) if recovers and request.copies else None
        with closing(copies) if copies is not None else nullcontext():
            try:
                return self._lead(copies, progress) if node is None or not node.number else self._follow(node, copies, progress)
            except NodeLeaves:
                return TrainResult(self._first_step, 0, (), (), 0.0, 0.0, {}, None, abs(self._asked), has_left=True)

    def _lead(
        self, copies: Copies | None, progress: Progress | None, taken: TakenLead | None = None, lock: RunLock | None = None
    ) -> TrainResult:  # fmt: skip
        """Trains as the only node, or the one that leads; `taken`: in place of another, which was lost, and whose lock this one has."""
        request, rehearses, going_on = self.request, self.request.device == TIMED, None
        held = own_folder(request, self._first_step) if lock is None else nullcontext(lock)
        with held as lock, self._leading(copies, taken, lock) as nodes:
            members = members_of(request) if taken is None else taken.members
            recovers = request.on_death == RECOVER
            recovery = RunRecovery(request, self._first_step, nodes or copies, members, self._witness) if recovers else None
            if nodes is not None and recovery is not None:
                nodes.on_left = recovery.part_with
            if taken is not None and nodes is not None and recovery is not None:
                going_on = self._taken_over(recovery, nodes, taken)
                request = recovery.request
            begin = self._first_step if going_on is None else going_on.step
            with (
                planners_here(request.planning, *run_inputs(request), begin, *self._store_place(nodes)) as planners,
                _left_tidy(request.out, lock),
                nullcontext() if nodes is None else named_process(request.out, nodes.number, request.device, NODE),
                self._pool(copies, None if nodes is None else PoolSite(tuple(nodes.ranks[nodes.number]), nodes.host, nodes)) as pool,
                nullcontext() if rehearses else Interrupts(self._ask_to_end),
            ):
                if taken is None:
                    _prepare_folder(request)
                if planners.pool is not None and self._witness is not None:
                    planners.pool.on_replaced = partial(self._witness.tell, "replaced")
                hear = hearing(self.request, planners, progress, recovery)
                if rehearses:
                    rehearsed = pool.run(rehearse, request, planners.handover, timeout_s=_RUN_S, listen=lambda _, message: hear(message))
                    return rehearsed[request.plan.ranks[0]]
                found = self._run(pool, planners, hear, recovery, nodes, going_on, lock)
        return found if recovery is None else recovery.whole(found)

    def _pool(self, copies: Copies | None, site: PoolSite | None) -> WorkerPool:
        request, threads = self.request, threads_here(self.request, self.request.plan)
        pool = WorkerPool(
            members_of(request)[-1] + 1, device="cpu" if request.device in (TIMED, PACED) else request.device, threads=threads,
            timeout_s=_OPERATION_S, copies=copies, frozen=FrozenRanks() if request.on_death == RECOVER else None, site=site,
        )  # fmt: skip
        self._board = pool.board
        if self._asked:
            pool.board.ask_to_end(self._asked)
        return pool

    def _ask_to_end(self, number: int) -> str:
        """A signal asks for an end: of the ranks that run, or of those that will when it goes on. Where there are other nodes, SIGTERM says
        that this machine will be gone soon, and asks for an end of this node alone (a number below 0). What to tell."""
        leaves = number == signal.SIGTERM and self._may_leave
        self._asked = -number if leaves else number
        if self._board is not None:
            self._board.ask_to_end(self._asked)
        return "this node leaves the run once others have what its ranks have learned, or ends it if there are none" if leaves else ""

    @property
    def _may_leave(self) -> bool:
        """Whether other nodes could go on without this one."""
        request = self.request
        return request.node is not None and request.on_death == RECOVER and request.copies > 0 and len(nodes_of(request)) > 1

    @contextmanager
    def _leading(self, copies: Copies | None, taken: TakenLead | None, lock: RunLock) -> Iterator[LeadingNode | None]:
        """The other nodes of the job, once all are there that should be; None: there are none."""
        request = self.request
        if request.node is None:
            yield None
            return
        number, ranks, node = request.node.number, nodes_of(request), request.node
        met_at, term = ((node.host, node.port), 0) if taken is None else ((taken.address, 0), taken.term)

        def tell(led: LedBy) -> None:
            write_led(request.out, msgspec.structs.replace(led, term=term, command=node.command, folder=os.getcwd()))

        expected = () if taken is None else taken.expected
        nodes = LeadingNode(number, met_at, node_key(), ranks, node_facts(request, self._watching), copies, tell, expected)
        end: End | Leaving = End("the node that leads has ended.")
        try:
            with beating(lock):
                if taken is None:
                    nodes.meet(range(1, len(ranks)))
                else:
                    nodes.meet(taken.expected, MEET_AGAIN_S, needs_all=False)
                yield nodes
            end = End(ended_by=self._ended_by)
        except NodeLeaves:
            end = Leaving()
            raise
        except PenstockError as error:
            end = End(str(error))
            raise
        finally:
            nodes.close(end)
            if lock.is_held and not isinstance(end, Leaving):
                with suppress(OSError):
                    forget_led(request.out)

    def _taken_over(self, recovery: RunRecovery, nodes: LeadingNode, taken: TakenLead) -> GoingOn:
        """The step from which a run goes on whose leader was lost: what that knew of it is in the run's folder."""
        out, lost = Path(self.request.out), nodes.ranks[taken.node]
        last = last_step(out)  # later ones were recorded before the run went back
        done = [one for one in read_steps(out / STEPS) if one.step <= last] if (out / STEPS).is_file() else []
        recovery.take_over(map(report_of, done), plan_of_run(out))
        text = f"{lost_words(f'node {taken.node}', lost, taken.why, has_left=taken.has_left)}. Node {nodes.number} leads now"
        return self._going_on(WorkerError(f"{text}.", lost, is_lost=True, has_left=taken.has_left), recovery, nodes)

    def _store_place(self, nodes: LeadingNode | None) -> tuple[str, bytes] | tuple[()]:
        return () if nodes is None else (nodes.host, store_key())

    def _follow(self, place: NodePlace, copies: Copies | None, progress: Progress | None) -> TrainResult:
        """Trains as a node that does as another says; when that is lost, as another says, or as the one that leads."""
        request, ranks, led, wait_s = self.request, ranks_here(self.request), LedBy(0, place.host, place.port, 0), CALL_S
        node: FollowingNode | None = None

        def asked(number: int) -> str:
            if node is None or node.started is None:
                raise Interrupted(number, f"{signal.Signals(number).name} ended this node while it waited for its first step.")
            return self._ask_to_end(number)

        with Interrupts(asked, quiet=True):
            while True:
                try:
                    where = replace(place, host=led.host, port=led.port)
                    facts = node_facts(request, self._watching)
                    started = None if node is None else node.started
                    with (
                        closing(FollowingNode(where, node_key(), ranks, facts, copies, wait_s, started)) as node,
                        self._pool(copies, PoolSite(ranks, node.address, node)) as pool,
                        named_process(request.out, place.number, request.device, NODE),
                    ):
                        ended_by = node.follow(pool, request, self._job, self._watching, threads_here(request, request.plan))
                    return TrainResult(self._first_step, 0, (), (), 0.0, 0.0, {}, None, ended_by)
                except LeaderLostError as error:
                    if request.on_death != RECOVER or node is None or node.started is None:
                        raise
                    found = succeed(request.out, place.number, led.term, str(error))
                    if isinstance(found, LedBy):
                        led, wait_s = found, MEET_AGAIN_S
                        continue
                    stack, lock = found
                    with stack:
                        return self._lead(copies, progress, node.taken_lead(led, str(error), has_left=error.has_left), lock)

    def _run(
        self, pool: WorkerPool, planners: Planners, hear: _Hear, recovery: RunRecovery | None, nodes: LeadingNode | None,
        going_on: GoingOn | None, lock: RunLock,
    ) -> TrainResult:  # fmt: skip
        """Runs the job to its end: with new processes in place of those that die, as often as `recovery` says, while nobody else leads."""
        request, members = (self.request, members_of(self.request)) if recovery is None else (recovery.request, recovery.members)
        while True:
            try:
                # A token of its own for each try: what one has half written is none of the next's.
                token = secrets.token_hex(8)
                if nodes is not None:
                    nodes.order(request, planners.handover, token, going_on)
                if going_on is not None or nodes is not None:
                    pool.revive(members, threads_here(self.request, request.plan))

                def listen(rank: int, message: StepReport | PlanAdopted | MayLeave) -> None:
                    if rank == pool.members[0]:
                        self._require_lead(nodes, lock)
                        if nodes is not None and lock.is_gone:  # nobody could know who leads next
                            raise _FolderGone(f"the folder of the run, '{self.request.out}', or its lock, was removed while it went on.")
                        if isinstance(message, MayLeave):
                            raise NodeLeaves
                        hear(message)
                        if not pool.has_failed:
                            self._let_join(message, nodes)

                job = (self._job, request, planners.handover, token, self._watching, going_on)
                found: list[TrainResult] = pool.run(*job, timeout_s=_RUN_S, listen=listen)
                self._ended_by = found[0].ended_by
                return found[0]
            except (WorkerError, _NodeJoins, _FolderGone) as ended:
                self._require_lead(nodes, lock)
                going_on = self._after(ended, recovery, nodes)
            assert recovery is not None
            request, members = recovery.request, recovery.members
            planners.begin_anew(going_on.step, program_planner(request))

    def _after(self, ended: WorkerError | _NodeJoins | _FolderGone, recovery: RunRecovery | None, nodes: LeadingNode | None) -> GoingOn:
        """Decides where new processes begin once all that there were have ended: because of a failure, or so that a node can join. One that
        waits to join while another is lost does so later."""
        lost = [] if nodes is None else nodes.stop()
        if isinstance(ended, _FolderGone):
            raise self._given_up(ended, recovery) from None
        knows_why = isinstance(ended, WorkerError) and not ended.lost_peer
        error = ended if knows_why or not lost else lost[0]
        if isinstance(error, _NodeJoins):
            assert nodes is not None and recovery is not None
            return recovery.join(nodes.admit())
        return self._going_on(error, recovery, nodes)

    def _going_on(self, error: WorkerError, recovery: RunRecovery | None, nodes: LeadingNode | None) -> GoingOn:
        """Where new processes begin after a failure, unless it ends the run."""
        going_on = None
        if recovery is not None and error.is_lost:
            gone = () if nodes is None else nodes.gone_ranks()
            try:
                going_on = recovery.go_on(error.ranks, str(error), gone, has_left=error.has_left, lost_peer=error.lost_peer)
            except PenstockError as stopped:  # as by a folder that is full, or gone
                raise self._given_up(WorkerError(f"{str(error).rstrip()}\nTraining cannot go on: {stopped}"), recovery) from None
        if going_on is None:
            raise self._given_up(error, recovery) from None
        return going_on

    def _given_up(self, error: PenstockError, recovery: RunRecovery | None) -> PenstockError:
        """The error that ends the run, and why, with the step that is safe: that of the newest copies too if these can be written."""
        if recovery is not None and recovery.gave_up:
            error = type(error)(f"{str(error).rstrip()}\n{recovery.gave_up}")
        try:
            if recovery is not None:
                recovery.save_copies()
        except PenstockError as hindered:
            error = type(error)(f"{str(error).rstrip()}\nThe copies of the last steps could not be written as a checkpoint: {hindered}")
        return with_safe_step(error, self.request, self._first_step)

    def _require_lead(self, nodes: LeadingNode | None, lock: RunLock) -> None:
        """Ends a node that stood still for so long that another leads in its place: nothing in the folder is its own any more."""
        if nodes is not None and not lock.is_held and not lock.is_gone:
            raise LeaderLostError(f"this node stood still, and another leads the run in '{self.request.out}' now.")

    def _let_join(self, message: StepReport | PlanAdopted, nodes: LeadingNode | None) -> None:
        """Lets a node join that waits to: all begin anew with it, one step after all ranks have copied what they had learned."""
        every = self.request.copies
        if nodes is not None and nodes.is_asked and isinstance(message, StepReport) and message.step >= every and message.step % every == 0:
            raise _NodeJoins


def hearing(
    request: TrainRequest, planners: Planners, progress: Progress | None, recovery: RunRecovery | None = None
) -> _Hear:  # fmt: skip
    """Handles what ranks tell the launcher: another plan is written down and planners follow it there, `progress` hears the rest."""

    def hear(message: StepReport | PlanAdopted) -> None:
        if isinstance(message, PlanAdopted):
            if os.environ.get("RANK", "0") == "0":
                put_in_force(request.out, message.step, message.plan)
            if recovery is not None:
                recovery.adopted(message.plan)
            planners.adopt(message.step, program_planner(replace(request, plan=message.plan)))
            return
        new = message if recovery is None else recovery.hear(message)
        if progress is not None and new is not None:
            progress(new)

    return hear


def with_safe_step(error: PenstockError, request: TrainRequest, first_step: int) -> PenstockError:
    """The failure of a run, with what of it is not lost."""
    return type(error)(f"{str(error).rstrip()}\n{safe_step(request, first_step)}")


def _prepare_folder(request: TrainRequest) -> None:
    """Has a run's folder keep its inputs, and ask for the faults of its disturbance and no others."""
    keep_inputs(request)
    forget_faults(request.out)  # asked of a run before, not of this one
    forget_loads(request.out)
    for strike in request.disturbance.strikes:
        ask_fault(request.out, _fault(strike, nodes_of(request)))


def _fault(strike: DisturbanceStrike, nodes: Sequence[Sequence[int]]) -> Fault:
    """The fault to ask a rank for so that a strike happens: it strikes the supervisor of its node too."""
    rank = strike.rank if strike.rank is not None else FIRST_RANK if strike.node is None else nodes[strike.node][0]
    return Fault(strike.kind, rank, strike.phase, strike.first, strike.rank is None)


@contextmanager
def _left_tidy(out: str, lock: RunLock) -> Iterator[None]:
    """Nobody names the processes of a run that has ended (those that were killed could not see to it themselves), or asks for faults."""
    leaves = False
    try:
        yield
    except NodeLeaves:
        leaves = True  # others go on
        raise
    finally:
        if lock.is_held and not leaves:
            with suppress(OSError):  # as in a folder that is read-only now: what ended the run is of more account
                forget_processes(out)
                forget_faults(out)
