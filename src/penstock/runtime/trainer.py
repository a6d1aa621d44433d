"""From a plan and prepared data to trained weights: what is checked before anything starts, and what every rank then does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from penstock.data.dataset import open_data
from penstock.data.forms import form_of
from penstock.errors import InputError, PenstockError, near_misses
from penstock.models.ops import Model
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.texts import format_ranks
from penstock.plans.validity import require_valid
from penstock.processes.main_guard import require_guarded_main
from penstock.programs.memory import require_memory
from penstock.runtime.checkpoints.first_weights import check_weights
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.going_on import check_goes_on, run_facts
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.data_notes import data_notes
from penstock.runtime.devices.loads import forget_loads
from penstock.runtime.devices.rehearsing import rehearse_rank
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.nodes.following import CALL_S, FollowingNode, TakenLead
from penstock.runtime.nodes.leading import MEET_AGAIN_S, LeadingNode
from penstock.runtime.nodes.messages import End
from penstock.runtime.nodes.place import node_facts, node_key, ranks_of_nodes, store_key
from penstock.runtime.nodes.succession import LeaderLostError, LedBy, forget_led, succeed, write_led
from penstock.runtime.planner_processes import Handover, Planners, planners_here, planners_of_nodes
from penstock.runtime.rank_state import check_state
from penstock.runtime.recovering.copies import Copies
from penstock.runtime.recovering.faults import PHASES, Fault, ask_fault, forget_faults
from penstock.runtime.recovering.frozen import FrozenRanks
from penstock.runtime.recovering.recovery import DeathWitness, RunRecovery, require_room_for_copies
from penstock.runtime.request import PACED, TIMED, WARM_UP, GoingOn, NodePlace, PlanAdopted, StepTold, TrainRequest, TrainResult
from penstock.runtime.run import Watching, train_rank
from penstock.runtime.run_folder import STEPS, own_folder, plan_of_run, put_in_force, safe_step
from penstock.runtime.run_inputs import program_planner, run_inputs
from penstock.runtime.run_predictions import keep_inputs
from penstock.runtime.telemetry.predicting import PredictedSteps, predict_peaks, predict_steps
from penstock.runtime.telemetry.process_files import NODE, forget_processes, named_process
from penstock.runtime.telemetry.status import StatusBoard
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.transport.world import World
from penstock.runtime.workers import PoolSite, Worker, WorkerError, WorkerPool, joined

__all__ = ["PlanTrainer"]

PROCESSES_PER_CORE = 8
_EVAL_SPLIT = "validation"
END, RECOVER = "end", "recover"
_Hear = Callable[[StepTold | PlanAdopted], None]


class _NodeJoins(Exception):
    """All ranks are to begin anew, with those of a node that has come."""


class PlanTrainer:
    """Trains a plan on this machine.

    >>> PlanTrainer(TrainRequest(read_plan("plan.json"), "data", steps=100, out="run")).train()   # doctest: +SKIP
    """

    def __init__(self, request: TrainRequest, watching: Watching | None = None, witness: DeathWitness | None = None) -> None:
        """`watching` makes who is told of every step, on every rank; a function that ranks can import. `witness` is told of deaths."""
        self.request, self.watching, self._witness = _checked(request), watching, witness
        self.model = model_of(request.plan)
        self.first_step = _first_step(self.request)
        """How many steps a checkpoint has behind it."""
        self._ended_by = self._asked = 0
        """The signal that ended the run, and the one that asks for its end."""
        self._board: StatusBoard | None = None

    def notes(self) -> list[str]:
        """What is worth knowing before the first step: data that the plan was not made for."""
        return data_notes(self.request)

    def join(self, progress: Callable[[StepTold], None] | None = None) -> TrainResult:
        """Trains as one of the processes that torchrun started."""
        import torch
        import torch.distributed as dist

        request = self.request
        first = os.environ.get("RANK", "0") == "0"
        with (
            own_folder(request, self.first_step) if first else nullcontext(),  # before any rank is met: a refusal is then all that is said
            joined(request.device, _processes(request.plan)) as worker,
            planners_of_nodes(request.planning, *run_inputs(request), self.first_step) as planners,
            Interrupts(quiet=worker.rank != 0) as interrupts,
        ):
            if first:
                keep_inputs(request)
            token = torch.tensor([secrets.randbits(62)])
            dist.broadcast(token, 0)
            worker = replace(worker, tell=self._hearing(planners, progress), asked_to_end=lambda: interrupts.number)
            try:
                return train_rank(worker, request, planners.handover, f"{int(token):x}", self.watching)
            except PenstockError as error:
                raise (self._with_safe_step(error) if first else error) from None

    def train(self, progress: Callable[[StepTold], None] | None = None) -> TrainResult:
        """Starts the plan's processes, trains, and ends them; `progress` hears of every step. Ctrl-C and SIGTERM end it after the step that
        runs, with a checkpoint. Where processes die and the request says so, others take their place. On several nodes, this one starts
        those of its own; where it does not lead, nothing is told, and the result has nothing but the signal that ended the run."""
        require_guarded_main()
        request, node = self.request, self.request.node
        recovers = request.on_death == RECOVER
        copies = Copies(_members(request)[-1] + 1, mirrored=node is not None) if recovers and request.copies else None
        with closing(copies) if copies is not None else nullcontext():
            return self._lead(copies, progress) if node is None or not node.number else self._follow(node, copies, progress)

    def _lead(
        self, copies: Copies | None, progress: Callable[[StepTold], None] | None, taken: TakenLead | None = None
    ) -> TrainResult:  # fmt: skip
        """Trains as the only node, or the one that leads; `taken`: in place of another, which was lost."""
        request, rehearses, going_on = self.request, self.request.device == TIMED, None
        with own_folder(request, self.first_step) if taken is None else nullcontext(), self._leading(copies, taken) as nodes:
            members = _members(request) if taken is None else taken.members
            recovers = request.on_death == RECOVER
            recovery = RunRecovery(request, self.first_step, nodes or copies, members, self._witness) if recovers else None
            if taken is not None and nodes is not None and recovery is not None:
                going_on = self._taken_over(recovery, nodes, taken)
                request = recovery.request
            begin = self.first_step if going_on is None else going_on.step
            with (
                planners_here(request.planning, *run_inputs(request), begin, *self._store_place(nodes)) as planners,
                _forgotten_processes(request.out),
                nullcontext() if nodes is None else named_process(request.out, nodes.number, request.device, NODE),
                self._pool(copies, None if nodes is None else PoolSite(tuple(nodes.ranks[nodes.number]), nodes.host, nodes)) as pool,
                nullcontext() if rehearses else Interrupts(self._ask_to_end),
            ):
                if taken is None:
                    keep_inputs(request)
                    forget_faults(request.out)  # asked of a run before, not of this one
                    forget_loads(request.out)
                    for strike in request.disturbance.strikes:
                        ask_fault(request.out, Fault(strike.kind, strike.rank, strike.phase, strike.first))
                if planners.pool is not None and self._witness is not None:
                    planners.pool.on_replaced = partial(self._witness.tell, "replaced")
                hear = self._hearing(planners, progress, recovery)
                if rehearses:
                    rehearsed = pool.run(_rehearse, request, planners.handover, timeout_s=_RUN_S, listen=lambda _, told: hear(told))
                    return rehearsed[request.plan.ranks[0]]
                found = self._run(pool, planners, hear, recovery, nodes, going_on)
        return found if recovery is None else recovery.whole(found)

    def _pool(self, copies: Copies | None, site: PoolSite | None) -> WorkerPool:
        request, threads = self.request, _threads(self.request, self.request.plan)
        pool = WorkerPool(
            _members(request)[-1] + 1, device="cpu" if request.device in _CLOCKED else request.device, threads=threads,
            timeout_s=_OPERATION_S, copies=copies, frozen=FrozenRanks() if request.on_death == RECOVER else None, site=site,
        )  # fmt: skip
        self._board = pool.board
        if self._asked:
            pool.board.ask_to_end(self._asked)
        return pool

    def _ask_to_end(self, number: int) -> None:
        """A signal asks for an end: of the ranks that run, or of those that will when it goes on."""
        self._asked = number
        if self._board is not None:
            self._board.ask_to_end(number)

    @contextmanager
    def _leading(self, copies: Copies | None, taken: TakenLead | None) -> Iterator[LeadingNode | None]:
        """The other nodes of the job, once all are there that should be; None: there are none."""
        request = self.request
        if request.node is None:
            yield None
            return
        number, ranks, node = request.node.number, _ranks_of_nodes(request), request.node
        met_at, term = ((node.host, node.port), 0) if taken is None else ((taken.address, 0), taken.term)

        def tell(led: LedBy) -> None:
            write_led(request.out, msgspec.structs.replace(led, term=term, command=node.command, folder=os.getcwd()))

        nodes = LeadingNode(number, met_at, node_key(), ranks, node_facts(request), copies, tell)
        end = End("the node that leads has ended.")
        try:
            if taken is None:
                nodes.meet(range(1, len(ranks)))
            else:
                nodes.meet(taken.expected, MEET_AGAIN_S, needs_all=False)
            yield nodes
            end = End(ended_by=self._ended_by)
        except PenstockError as error:
            end = End(str(error))
            raise
        finally:
            nodes.close(end)
            forget_led(request.out)

    def _taken_over(self, recovery: RunRecovery, nodes: LeadingNode, taken: TakenLead) -> GoingOn:
        """Where a run goes on from whose leader was lost: what that knew of it is in the run's folder."""
        out, lost = Path(self.request.out), nodes.ranks[taken.node]
        done = read_steps(out / STEPS) if (out / STEPS).is_file() else []
        recovery.take_over((StepTold(one.step, one.loss, one.tokens_per_s or 0.0) for one in done), plan_of_run(out))
        who = f"node {taken.node} is lost, with rank{'s' * (len(lost) > 1)} {format_ranks(lost)}"
        text = f"{who}: {taken.why}. Node {nodes.number} leads now"
        going_on = recovery.go_on(lost, text, nodes.gone_ranks())
        if going_on is None:
            recovery.save_copies()
            raise self._with_safe_step(WorkerError(f"{text}."))
        return going_on

    def _store_place(self, nodes: LeadingNode | None) -> tuple[str, bytes] | tuple[()]:
        return () if nodes is None else (nodes.host, store_key())

    def _follow(self, place: NodePlace, copies: Copies | None, progress: Callable[[StepTold], None] | None) -> TrainResult:
        """Trains as a node that does as another says; when that is lost, as another says, or as the one that leads."""
        request, ranks, led, wait_s = self.request, _here(self.request), LedBy(0, place.host, place.port, 0), CALL_S
        with Interrupts(self._ask_to_end, quiet=True):
            while True:
                try:
                    where = replace(place, host=led.host, port=led.port)
                    with (
                        closing(FollowingNode(where, node_key(), ranks, node_facts(request), copies, wait_s)) as node,
                        self._pool(copies, PoolSite(ranks, node.address, node)) as pool,
                        named_process(request.out, place.number, request.device, NODE),
                    ):
                        ended_by = node.follow(pool, request, train_rank, self.watching, _threads(request, request.plan))
                    return TrainResult(self.first_step, 0, (), (), 0.0, 0.0, {}, None, ended_by)
                except LeaderLostError as error:
                    if request.on_death != RECOVER or node.started is None:
                        raise
                    found = succeed(request.out, place.number, led.term, str(error))
                    if isinstance(found, LedBy):
                        led, wait_s = found, MEET_AGAIN_S
                        continue
                    with found:
                        return self._lead(copies, progress, node.taken_lead(led, str(error)))

    def _run(
        self, pool: WorkerPool, planners: Planners, hear: _Hear, recovery: RunRecovery | None, nodes: LeadingNode | None,
        going_on: GoingOn | None,
    ) -> TrainResult:  # fmt: skip
        """Runs the job to its end: with new processes in place of those that die, as often as `recovery` says."""
        request, members = (self.request, _members(self.request)) if recovery is None else (recovery.request, recovery.members)
        while True:
            try:
                # A token of its own for each try: what one has half written is none of the next's.
                token = secrets.token_hex(8)
                if nodes is not None:
                    nodes.order(request, planners.handover, token, going_on)
                if going_on is not None or nodes is not None:
                    pool.revive(members, _threads(self.request, request.plan))

                def listen(rank: int, told: StepTold | PlanAdopted) -> None:
                    if rank == pool.members[0]:
                        hear(told)
                        self._let_join(told, nodes)

                job = (train_rank, request, planners.handover, token, self.watching, going_on)
                found: list[TrainResult] = pool.run(*job, timeout_s=_RUN_S, listen=listen)
                self._ended_by = found[0].ended_by
                return found[0]
            except _NodeJoins:
                assert nodes is not None and recovery is not None
                nodes.stop()
                going_on = recovery.join(nodes.admit())
            except WorkerError as error:
                if nodes is not None:
                    nodes.stop()
                gone = () if nodes is None else nodes.gone_ranks()
                going_on = recovery.go_on(error.ranks, str(error), gone) if recovery is not None and error.is_lost else None
                if recovery is None or going_on is None:
                    if recovery is not None:
                        recovery.save_copies()
                    raise self._with_safe_step(error) from None
            request, members = recovery.request, recovery.members
            planners.adopt(going_on.step, program_planner(request))

    def _let_join(self, told: StepTold | PlanAdopted, nodes: LeadingNode | None) -> None:
        """Where a node waits to join: all begin anew with it, one step after all ranks have copied what they had learned."""
        every = self.request.copies
        if nodes is not None and nodes.is_asked and isinstance(told, StepTold) and told.step >= every and told.step % every == 0:
            raise _NodeJoins

    def _hearing(self, planners: Planners, progress: Callable[[StepTold], None] | None, recovery: RunRecovery | None = None) -> _Hear:
        """What becomes of what a run tells: another plan is written down and planners follow it there, `progress` hears the rest."""

        def hear(told: StepTold | PlanAdopted) -> None:
            if isinstance(told, PlanAdopted):
                if os.environ.get("RANK", "0") == "0":
                    put_in_force(self.request.out, told.step, told.plan)
                if recovery is not None:
                    recovery.adopted(told.plan)
                planners.adopt(told.step, program_planner(replace(self.request, plan=told.plan)))
                return
            new = told if recovery is None else recovery.hear(told)
            if progress is not None and new is not None:
                progress(new)

        return hear

    def _with_safe_step(self, error: PenstockError) -> PenstockError:
        """The failure of a run, with what of it is not lost."""
        return type(error)(f"{str(error).rstrip()}\n{safe_step(self.request, self.first_step)}")

    def predicted(self, result: TrainResult) -> PredictedSteps:
        """What the plan's costs say of the steps of a run, those left out that warm up."""
        request = self.request if result.plan is None else replace(self.request, plan=result.plan)
        last, since = result.first_step + result.num_steps, max(result.first_step, result.plan_since)
        first = since + WARM_UP if last - since > WARM_UP else since
        steps, (source, planner) = range(first, last), run_inputs(request)
        return replace(predict_steps(source, planner, steps), peak_bytes=predict_peaks(source, planner, steps))


def _processes(plan: Plan, spares: int = 0) -> tuple[int, ...]:
    """The devices that have a process: all up to the last one with work and the spares after it, unless torchrun started processes for
    those with work alone."""
    if os.environ.get("WORLD_SIZE") == str(len(plan.ranks)):
        return plan.ranks
    return tuple(range(plan.ranks[-1] + 1 + spares))


@contextmanager
def _forgotten_processes(out: str) -> Iterator[None]:
    """Nobody names the processes of a run that has ended: those that were killed could not see to it themselves."""
    try:
        yield
    finally:
        forget_processes(out)


def _members(request: TrainRequest) -> tuple[int, ...]:
    """The devices that have a process here or on other nodes; nodes without work, or a spare, have none."""
    return tuple(rank for node in _ranks_of_nodes(request) for rank in node)


def _ranks_of_nodes(request: TrainRequest) -> list[tuple[int, ...]]:
    """The devices of each node that have a process."""
    if request.node is None:
        return [_processes(request.plan, request.spares)]
    return ranks_of_nodes(request.plan, cluster_of(request.plan), request.spares)


def _here(request: TrainRequest) -> tuple[int, ...]:
    """The devices of this machine that have a process."""
    return _ranks_of_nodes(request)[0 if request.node is None else request.node.number]


def _threads(request: TrainRequest, plan: Plan) -> int:
    """Of each process under a plan, so that those with work share the cores of this machine."""
    num_here = len(set(plan.ranks) & set(_here(request)))
    return max(1, len(os.sched_getaffinity(0)) // max(1, num_here))


def _rehearse(worker: Worker, request: TrainRequest, handover: Handover) -> TrainResult:
    """A job for workers: a rehearsal, or nothing where the plan has no work for the process, which is then in none of its groups."""
    if worker.rank in request.plan.ranks:
        with named_process(request.out, worker.rank, TIMED):
            return rehearse_rank(worker, request, handover)
    World(request.plan, worker.groups)  # all processes make groups together
    return TrainResult(0, 0, (), (), 0.0, 0.0, {}, None)


_CLOCKED = (TIMED, PACED)
"""Devices that keep the time of the plan's, on the processor."""
_OPERATION_S = 1800.0
"""The longest that one transfer or collective may take."""
_RUN_S = 365 * 24 * 3600.0
"""A run may take as long as it takes; a rank that dies is noticed at once all the same."""


def _checked(request: TrainRequest) -> TrainRequest:
    """The request with its device named, if it can be run here."""
    plan = request.plan
    model, cluster = model_of(plan), cluster_of(plan)
    require_valid(plan, model, cluster)
    if request.steps < 1:
        raise InputError(f"{request.steps} steps were asked for; 1 or more was expected.")
    if request.keep < 1:
        raise InputError(f"{request.keep} checkpoints are to be kept; keep at least 1.")
    if refused := unsupported(plan, model):
        raise InputError("the plan cannot be run:\n" + "\n".join(f"  {problem}" for problem in refused))
    if request.device != TIMED:  # which learns and holds nothing
        request.settings.require_suits(plan.schedule)
        require_memory(plan, model, cluster)
    device = request.device or ("cpu" if {cluster.device(rank).name for rank in plan.ranks} == {"cpu"} else "cuda")
    _require_spares(request)
    _require_node(request)
    _require_devices(replace(request, device=device))
    _require_clocked(replace(request, device=device))
    data = open_data(request.data)
    data.check()
    form_of(model, data, prompt_loss=request.prompt_loss)
    if len(data) < plan.global_batch:
        raise InputError(
            f"data '{request.data}' has {len(data)} samples, fewer than one global batch of {plan.global_batch}. "
            "Use more data, or a plan with a smaller global batch."
        )
    if request.eval_every and _EVAL_SPLIT not in data.manifest.splits:
        raise InputError(f"evaluation was asked for, but data '{request.data}' has no split '{_EVAL_SPLIT}'. Prepare it with one.")
    if request.eval_every:
        open_data(request.data, _EVAL_SPLIT).check()
    if request.resume:
        request = replace(request, resume=str(find_checkpoint(request.resume)))
        _require_same_run(request, model)
    if request.weights:
        if request.resume:
            raise InputError(
                f"a run that goes on from '{request.resume}' has its weights from there; --weights '{request.weights}' is for one that "
                "begins. Give one of the two."
            )
        check_weights(request.weights, model)
    _require_steps(request)
    _require_recoverable(replace(request, device=device), model)
    return replace(request, device=device)


def _require_same_run(request: TrainRequest, model: Model) -> None:
    """Refuses a checkpoint that is damaged, or of another run than the request's; only the plan may be another."""
    checkpoint, seed = Checkpoint(request.resume), request.settings.seed
    check_goes_on(checkpoint, run_facts(model, request.data, seed=seed, global_batch=request.plan.global_batch))
    check_state(checkpoint, model, request.settings.optimizer.kind)
    if os.environ.get("RANK", "0") == "0":  # one reader is enough
        checkpoint.verify_small()


def _require_recoverable(request: TrainRequest, model: Model) -> None:
    """Refuses to recover where nobody could, and copies for which there is no room."""
    if request.on_death not in (END, RECOVER):
        raise InputError(f"--on-death is '{request.on_death}'; {END} or {RECOVER} was expected.")
    if request.on_death == END:
        return
    if "WORLD_SIZE" in os.environ:
        raise InputError("--on-death recover is for processes that `penstock train` starts; torchrun ends all of its own when one fails. "
                         "Start `penstock train … --node-rank R --master HOST:PORT` on each node in its place.")  # fmt: skip
    if request.device == TIMED:
        raise InputError(f"--on-death recover is for devices that compute; {TIMED} ones have nothing to lose. Leave it out.")
    if request.copies:
        require_room_for_copies(request, model)


def _require_steps(request: TrainRequest) -> None:
    """Refuses a run with nothing left to do, and steps to profile that it does not have."""
    first, steps = _first_step(request), request.steps
    if first >= steps:
        raise InputError(f"checkpoint '{request.resume}' has {first} steps behind it, which --steps {steps} counts too. Ask for more.")
    for step in request.profile_steps:
        if not first <= step < steps:
            raise InputError(f"step {step} is to be profiled, but this run has steps {first} to {steps - 1}. Choose among those.")


def _require_spares(request: TrainRequest) -> None:
    """Refuses spares that nobody would need, or for which there are no devices."""
    if not request.spares:
        return
    if request.on_death != RECOVER:
        raise InputError(f"--spares {request.spares} are for a run that recovers, and take the place of devices that are lost. "
                         "Add --on-death recover, or leave them out.")  # fmt: skip
    last, count = request.plan.ranks[-1], cluster_of(request.plan).num_devices
    if last + request.spares >= count:
        raise InputError(f"--spares is {request.spares}, but the plan's cluster has {count} devices, of which {count - 1 - last} come "
                         f"after rank {last}, the last with work. Ask for fewer, or plan for fewer of a larger cluster.")  # fmt: skip


def _require_node(request: TrainRequest) -> None:
    """Refuses a node that the plan does not have."""
    if request.node is None:
        return
    if "WORLD_SIZE" in os.environ or request.device == TIMED:
        what = "torchrun" if "WORLD_SIZE" in os.environ else f"--device {TIMED}"
        raise InputError(f"--node-rank is for supervisors, which start the ranks of their nodes themselves. Leave out it, or {what}.")
    count = len(_ranks_of_nodes(request))
    if not 0 <= request.node.number < count:
        raise InputError(f"--node-rank is {request.node.number}, but the plan has work for {count} nodes: 0 to {count - 1}.")
    node_key()


def _require_devices(request: TrainRequest) -> None:
    plan, device, share_gpus, count = request.plan, request.device, request.share_gpus, len(_here(request))
    if device not in ("cpu", "cuda", *_CLOCKED):
        raise InputError(f"device is '{device}'; cpu or cuda was expected, or {TIMED} to rehearse a plan, or {PACED} to train at its pace.")
    if "WORLD_SIZE" in os.environ:
        if device in _CLOCKED:
            raise InputError(f"{device} devices keep one clock, that of one machine. Run them without torchrun.")
        started = int(os.environ["WORLD_SIZE"])
        if started != count:
            raise InputError(f"the plan has {len(plan.ranks)} ranks, but {started} processes were started. Start one for each rank.")
        if _processes(plan)[0] not in plan.ranks:
            raise InputError(f"the first process tells what a run does, but the plan leaves rank 0 out. Start {len(plan.ranks)} processes.")
        return
    if device != "cuda":
        cores = len(os.sched_getaffinity(0))
        if count > cores * PROCESSES_PER_CORE:
            raise InputError(
                f"the plan has {count} ranks, but this machine's {cores} processor cores run at most {cores * PROCESSES_PER_CORE} "
                "processes. Use a plan for fewer devices, or more machines."
            )
        return
    import torch

    found = torch.cuda.device_count()
    if count > found and not (share_gpus and found):
        raise InputError(
            f"the plan has {count} ranks, but this machine has {found} CUDA devices. Use a plan for at most {found}, run it on more "
            f"machines with torchrun, try it out with --device cpu, or rehearse it with --device {TIMED}."
        )


def _require_clocked(request: TrainRequest) -> None:
    """Refuses a disturbance of devices that nobody can slow down, and of ranks that the plan does not have."""
    for change in request.disturbance.changes:
        if request.device not in _CLOCKED:
            raise InputError(
                f"{change.subject} is to be slower, which only timed and paced devices can be. Use --device {TIMED} or --device {PACED}."
            )
    for strike in request.disturbance.strikes:
        if request.device == TIMED:
            raise InputError(f"rank {strike.rank} is to be struck, but {TIMED} devices learn nothing that could be lost. Leave it out.")
        if strike.phase not in PHASES:
            raise InputError(f"rank {strike.rank} is to be struck in phase '{strike.phase}'. {near_misses(strike.phase, PHASES)}")
    request.disturbance.require_ranks(request.plan.ranks)


def _first_step(request: TrainRequest) -> int:
    if not request.resume:
        return 0
    return Checkpoint(request.resume).step
