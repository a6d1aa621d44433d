"""One rank's run: programs in, steps done, records, evaluations and checkpoints out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.data.loader import ProgramLoader
from penstock.data.planning import PlanningError
from penstock.data.samples import LoadedProgram
from penstock.errors import PenstockError, plural
from penstock.plans.references import cluster_of, model_of
from penstock.runtime.checkpoints.first_weights import open_weights
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.determinism import always_the_same
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.loads import GpuLoad, RankLoads
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import load_rank, load_state, load_weights
from penstock.runtime.recovering.faults import RankFaults
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import PACED, WARM_UP, EvalRecord, GoingOn, MayLeave, PlanAdopted, TrainRequest, TrainResult
from penstock.runtime.run_folder import CHECKPOINTS
from penstock.runtime.run_inputs import PlanInputs, plan_inputs, run_inputs
from penstock.runtime.run_moves import RunMove, RunMoves
from penstock.runtime.steps.agreeing import Agreed, Order, agree
from penstock.runtime.steps.divergence import DivergenceGuard
from penstock.runtime.steps.measuring import StepMeasures
from penstock.runtime.steps.messages import StepMessage, StepWatcher, samples_digest, whole_digest
from penstock.runtime.steps.records import RunRecords, TrainedStep
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.flops import PeakTimes
from penstock.runtime.telemetry.observing import Observers, StageSpans, slowest_stages, times_of_ranks
from penstock.runtime.telemetry.phases import RECOVERING
from penstock.runtime.telemetry.process_files import named_process
from penstock.runtime.telemetry.profiled_steps import ProfiledSteps
from penstock.runtime.telemetry.spans import SpanRecorder
from penstock.runtime.transport.allocator import reserve
from penstock.runtime.transport.world import World
from penstock.runtime.worker import Worker
from penstock.stores import StoreError

if TYPE_CHECKING:
    from penstock.runtime.planner_processes import Handover

__all__ = ["Run", "Watching", "train_rank"]

Watching = Callable[["Run"], "StepWatcher"]
"""Makes the watcher of a run, in every process."""

_SYNC_STEPS = 100
"""Clocks of several machines drift apart; so often they are compared again."""


class Run:
    """Trains in one process of a job; a context, so that files and planners are closed.

    A process to which the plan in force gives no work takes part in what all agree on after each step, so that a later plan can have it.
    The first process of the job writes the records of all, and tells the launcher.
    """

    def __init__(
        self, worker: Worker, request: TrainRequest, handover: Handover, token: str, going_on: GoingOn | None = None
    ) -> None:  # fmt: skip
        self.worker, self.request = worker, request
        if request.settings.deterministic:
            always_the_same()
        self.model = model_of(request.plan)
        if going_on is not None:  # whatever the run began with may have made room for newer checkpoints
            self.first_step = going_on.step
        else:
            self.first_step = Checkpoint(request.resume).step if request.resume else 0
        self.is_new = not self.first_step and going_on is None
        """Whether there is nothing of this run yet."""
        self.goes_on = going_on is not None
        """Whether its processes take the place of others."""
        self.step = self.first_step
        """The one that comes next."""
        self.plan_since = self.first_step
        """The first step of the plan in force."""
        out, own = Path(request.out), worker.rank
        self.is_first = own == self.members[0]
        self.spans = SpanRecorder(out / f"rank-{own:05d}.spans", own)
        self.profiled = ProfiledSteps(request.profile_steps, out, own)
        self.faults = RankFaults(out, own, is_first=self.is_first)
        self.loads = RankLoads(out, own, partial(GpuLoad, worker.groups.device))
        self.rank = self._rank()
        self.rank.phase = self.faults.meet
        self.rank.adopt(request.plan)
        address, self._job = handover
        batches, planner = run_inputs(request)
        self.loader = ProgramLoader(
            batches, planner, own, address=address, job=self._job, planners=1 if self._job else 0, starts_planners=False,
            first_step=self.first_step, timeout=request.planning.wait_s,
        )  # fmt: skip
        self._store_error: StoreError | None = None
        """Why this rank gets no more programs."""
        self._has_left = False
        """Whether this process is no part of the run any more, which goes on without it."""
        self._ended_by = 0
        """The signal that has asked the run to end; 0: none."""
        from_copies = going_on is not None and going_on.from_copies
        self.saves = RunSaves(
            request, self.rank, self.loader.batches, copies=worker.copies, faults=self.faults, token=token,
            saved=-1 if from_copies else self.first_step,
        )  # fmt: skip
        if request.reserve_memory and self.world.device.type == "cuda":
            reserve(self.world.device, request.reserve_memory, len(self.world.ranks) if worker.shared_gpu else 1)
        self.records = RunRecords(worker, out, self.spans, is_first=self.is_first, anew=self.is_new)
        self.saves.before_copy = self.records.flush
        self.watcher: StepWatcher | None = None
        self._watching: Watching | None = None
        self._guard = DivergenceGuard(self.rank, request.settings.on_nan, self.saves, self.records)
        self._moves = RunMoves(self.rank, worker, self.saves, self.faults)
        self._take_up(plan_inputs(request, planner, own))
        if self.goes_on:
            self.faults.look(self.first_step)
            self.faults.meet(RECOVERING)
        if self.has_work:
            self._load(going_on)

    def _load(self, going_on: GoingOn | None) -> None:
        """Loads what this rank begins with unless that is random weights: copies of those before it, a checkpoint, or weights alone."""
        request, copies = self.request, self.worker.copies
        if going_on is not None and going_on.from_copies:
            assert copies is not None
            load_state(copies.state(going_on.step), self.rank)
        elif request.resume:
            load_rank(Checkpoint(request.resume), self.rank)
        elif request.weights:
            load_weights(open_weights(request.weights, self.model), self.rank)

    def _rank(self) -> Rank:
        request, groups = self.request, self.worker.groups
        if request.device != PACED:
            return Rank(self.model, groups, request.settings)
        clock = ClockSettings(disturbance=request.disturbance, folder=request.out)
        return PacedRank(self.model, groups, request.settings, clock=clock)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.loads.close()
        self.loader.close()
        self.spans.close()
        if self.watcher is not None:
            self.watcher.close()
        self.records.close()

    @property
    def members(self) -> Sequence[int]:
        """The processes of the job, those without work included."""
        return self.worker.groups.generation.members

    @property
    def world(self) -> World:
        """The ranks and process groups of the plan in force."""
        return self.rank.world

    @property
    def has_work(self) -> bool:
        """Whether the plan in force has any for this process."""
        return self.world.rank >= 0

    @property
    def computes_on_cores(self) -> bool:
        """Whether passes take as long as the cores of this machine need, and not as long as a clock of devices says."""
        return self.world.device.type == "cpu" and not isinstance(self.rank, PacedRank)

    @property
    def _window_end(self) -> int:
        """The step after those that come next as one program."""
        return self.loader.planner.drains.after(self.step)

    @property
    def _tells_steps(self) -> bool:
        """Whether this is the plan's first rank, whose record of a step is that of the run."""
        return self.has_work and self.world.place == 0

    @property
    def _is_measured(self) -> bool:
        """Whether somebody watches who wants figures."""
        return self.watcher is not None and self.watcher.measures

    @property
    def _is_over(self) -> bool:
        return self.step >= self.request.steps or self._ended_by > 0 or self._has_left

    # Plans and who watches them -----------------------------------------------------------------------------------------------

    def watch(self, watching: Watching) -> None:
        """Tells a watcher of every step, and has it measured if it wants that."""
        self._watching, self.watcher = watching, watching(self)
        if self._is_measured:
            self._measures.watched()

    def _adopt(self, move: RunMove) -> None:
        """Goes on after a move: under the new plan from the next step on, or not at all."""
        if move.members is not None and self.worker.rank not in move.members:
            self._has_left = True
            return
        assert move.inputs is not None and self.watcher is not None
        self.request, self.plan_since = move.request, self.step
        self.loader.adopt(self.step, move.inputs.planner)
        self.worker.tell(PlanAdopted(self.step, self.request.plan))
        self._take_up(move.inputs)
        self.saves.copy(self.step)  # else a death would go back to steps of the plan before
        self._compare_clocks()
        self.records.plan_number += 1
        self.records.note(*self.watcher.moved(self.step, self.request.plan, move.pause_s))
        if move.members is not None:
            self._watch_anew()

    def _watch_anew(self) -> None:
        """Begins to watch again, as after a death: the processes of the job are others than before."""
        assert self.watcher is not None and self._watching is not None
        self.watcher.close()
        self.is_new, self.goes_on = False, True
        self.watch(self._watching)

    def _take_up(self, inputs: PlanInputs) -> None:
        """Sets up what belongs to the plan in force: who saves what, what is measured, predicted and evaluated."""
        request, warm = self.request, max(self.step + WARM_UP, self._window_end)
        self._inputs = inputs
        self.loads.plan_changed()
        self.times = StageSpans(warm if request.steps > warm else 0, self.worker.groups.device)
        """Since the plan is in force."""
        observers = self.worker.status, self.spans, self.times, *([self.profiled] if request.profile_steps else [])
        self.rank.executor.observer = Observers(*observers)
        if isinstance(self.rank, PacedRank) and inputs.times is not None:
            self.rank.times = inputs.times
        self.saves.take_place()
        peaks = self._peak_times() if self._tells_steps else None
        self._measures = StepMeasures(self.rank, self.loader, self.records, self.spans, self.times, peaks)
        if self._is_measured:
            self._measures.watched()

    def _peak_times(self) -> PeakTimes | None:
        """The plan's work at the peak of its devices, to say how well they are used; None where it runs on others than it names."""
        if self.worker.shared_gpu or isinstance(self.rank, PacedRank):
            return None
        cluster = cluster_of(self.request.plan)
        named = {"cpu" if cluster.device(rank).name == "cpu" else "cuda" for rank in self.world.ranks}
        return PeakTimes(self.request.plan, self.model, cluster) if named == {self.world.device.type} else None

    # The loop -----------------------------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Trains the steps that are left, until the run is asked to end or this process to leave it."""
        programs = self._loaded_programs()
        self._compare_clocks()
        start_s = time.perf_counter()
        while not self._is_over:
            messages = self._train(next(programs), start_s) if self.has_work else self._idle_messages()
            end_s = time.perf_counter()
            self.step = self._window_end
            self._conclude(self._agreed(messages))
            self.loader.wait_s = self.loader.data_wait_s = 0.0
            start_s = time.perf_counter()
            self.times.paused(start_s - end_s)
        return self._left() if self._has_left else self._finished()

    def _loaded_programs(self) -> Iterator[LoadedProgram]:
        """The programs of the steps that are left. A rank that loses the store plans one more step itself: others may have their programs
        of it, and learn after it that it is the last."""
        try:
            yield from self.loader
        except StoreError as error:
            self._store_error = error
            yield self.loader.next_planned_here()
        except PlanningError as error:  # which every rank was told, but no process without work: that waits for what they say of the step
            raise self._ended(error, self.world.barrier) from None

    def _train(self, loaded: LoadedProgram, start_s: float) -> list[StepMessage]:
        """Trains one program, which is a step or several, and returns this process' message on each; the last one ended at `start_s`."""
        program, done = loaded.program, loaded.program.iteration + loaded.program.num_batches
        self.faults.look(done - 1)
        self.loads.look(program.iteration)
        self._measures.begin()
        self._run_program(loaded)
        self._prepare_next()
        self._measures.expect(program)
        results = self.rank.results
        found = [(result.loss.item(), None if result.norm is None else result.norm.item()) for result in results]
        measured = self._measures.ended(program, time.perf_counter() - start_s)
        self.loads.measured(measured.pace)
        messages: list[StepMessage] = []
        for number, (result, (loss, norm)) in enumerate(zip(results, found, strict=True)):
            self._guard.check(program, result, loss, norm, messages)
            own, record = program.of_batch(number), None
            if self._tells_steps:
                record = self._measures.record(measured, program.iteration + number, own, result, loss, norm)
            samples = samples_digest(own) if self.rank.leads_replica else 0
            messages.append(StepMessage(samples=samples, figures=measured.figures, record=record))
        if self._evaluates_after(done):
            messages[-1] = replace(messages[-1], evaluated=self._evaluate(done))
        return messages

    def _run_program(self, loaded: LoadedProgram) -> None:
        """Runs a program, with the faults and profiles that were asked for."""
        executor = self.rank.executor
        observer, executor.observer = executor.observer, self.faults.observer(executor.observer)
        with self.profiled.around(loaded.program.iteration):
            self.rank.train(loaded.program, loaded)
        executor.observer = observer

    def _prepare_next(self) -> None:
        """A GPU still works on a step when all of it is issued: meanwhile the host brings the first micro-batch of the next."""
        coming = self.loader.coming() if self.world.device.type == "cuda" else None
        if coming is not None:
            self.rank.prepare(coming.program, coming)

    def _idle_messages(self) -> list[StepMessage]:
        """The messages of a process without work on the steps that the others have as one program."""
        figures = self._measures.idle_figures(self.step) if self._is_measured else RankFigures()
        return [StepMessage(figures=figures)] * (self._window_end - self.step)

    def _evaluates_after(self, done: int) -> bool:
        every = self.request.eval_every
        return every > 0 and (done % every == 0 or done == self.request.steps)

    def _evaluate(self, done: int) -> EvalRecord:
        """Loss and accuracy after `done` steps, the mean over the held-out batches."""
        inputs = self._inputs
        found = [self.rank.evaluate(program, inputs.held_out) for program in inputs.evaluations]
        return EvalRecord(done, statistics.fmean(one.loss for one in found), statistics.fmean(one.accuracy for one in found))

    # Between steps ------------------------------------------------------------------------------------------------------------

    def _agreed(self, own: Sequence[StepMessage]) -> Agreed:
        """Exchanges this process' messages on the steps of a program, and what it knows at its end, with those of all others."""
        last = replace(
            own[-1], lost_store=self._store_error is not None, asked_to_end=self.worker.asked_to_end(),
            is_due=self.is_first and self.saves.is_late, is_saving=self.saves.is_saving, copied=self.saves.copied,
        )  # fmt: skip
        asks = self.is_first and self.watcher is not None and self.step < self.request.steps
        agreed = agree(self.worker.groups, self.members, (*own[:-1], last), self._order() if asks else None)
        self.saves.safe_copy = agreed.safe_copy
        return agreed

    def _order(self) -> Order | None:
        """The plan that the watcher wants from the next step on; None: the present one."""
        assert self.watcher is not None
        wanted = self.watcher.order(self.step)
        return None if wanted is None else Order(wanted, self.watcher.exact)

    def _conclude(self, agreed: Agreed) -> None:
        """Records, saves and decides what all processes have agreed on after a program."""
        steps = self._trained(agreed.messages)
        for one in steps:
            self.records.tell(one)
        if agreed.has_lost_store and self.step < self.request.steps:
            error = self._store_error or StoreError("another rank gets no more programs from the store.")
            raise self._ended(error, self.worker.groups.barrier)
        self._save(agreed, steps[-1].evaluated)
        self._ended_by = agreed.ended_by
        move = None if self.watcher is None else self._moves.after_step(agreed, self.request, self.step, self.watcher)
        if move is not None:
            self._adopt(move)
        elif self.step // _SYNC_STEPS > (self.step - len(steps)) // _SYNC_STEPS:
            self._compare_clocks()

    def _trained(self, messages: Sequence[Mapping[int, StepMessage]]) -> list[TrainedStep]:
        """The steps of a program that has ended, by all processes' messages on them; whoever watches is told."""
        steps = []
        for number, said in enumerate(messages, self.step - len(messages)):
            if self.watcher is not None:
                figures = {member: word.figures for member, word in said.items()}
                self.records.note(*self.watcher.after(number - self._measures.lateness, figures))
            first = said[self.world.ranks[0]]
            assert first.record is not None
            steps.append(TrainedStep(first.record, whole_digest(said.values()), first.evaluated))
        return steps

    def _save(self, agreed: Agreed, evaluated: EvalRecord | None) -> None:
        """Saves what is due; a node that is to leave, and cannot move its work, may go once others have what its ranks have learned."""
        moves_away = self.watcher is not None and self.step < self.request.steps and self._moves.can_replace(agreed.leaving)
        leaves = bool(agreed.leaving) and not moves_away
        self.saves.after(self.step, evaluated, is_due=agreed.is_due, is_saving=agreed.is_saving, leaves=leaves)
        if agreed.leaving and self.saves.may_leave and self.worker.asked_to_end() < 0:
            self.worker.tell(MayLeave())

    def _compare_clocks(self) -> None:
        self.worker.groups.barrier()
        self.spans.mark_sync(self.step)

    # The end ------------------------------------------------------------------------------------------------------------------

    def _ended(self, error: PenstockError, meet: Callable[[], None]) -> PenstockError:
        """Saves what was trained, on all ranks, before the run ends; the error, with how far it came. `meet` is the barrier of those who
        end like this."""
        if not self.step:
            return error
        self.saves.finish(self.step)
        meet()  # the first process to fail ends the others, rank 0 included, which completes the checkpoint
        return type(error)(f"{str(error).rstrip('.')}. The run ended after {plural(self.step, 'step')}.")

    def _left(self) -> TrainResult:
        """Ends this process' part in a run that goes on without it."""
        self.worker.tell(MayLeave(has_moved=True))
        return TrainResult(self.first_step, 0, (), (), 0.0, 0.0, {}, None, has_left=True)

    def _finished(self) -> TrainResult:
        """Saves the last step, and sums up; times are those of the plan in force, warmed up."""
        self.saves.finish(self.step)
        self.times.settle()
        times_s, steps_of_plan = self.records.times_s, self.step - self.plan_since
        usual_s = statistics.median(times_s[-steps_of_plan:][WARM_UP:] or times_s[-steps_of_plan:] or times_s)
        losses, mean_tokens, gather = self.records.losses, statistics.fmean(self.records.tokens), self.worker.groups.gather
        own = self.times.times(self._measures.memory().get("allocated_bytes")) if self.has_work else None
        return TrainResult(
            self.first_step, len(losses), tuple(losses), tuple(self.records.evaluated), usual_s, mean_tokens / usual_s,
            slowest_stages(self.request.plan.num_stages, self.times, gather), str(Path(self.request.out) / CHECKPOINTS), self._ended_by,
            times_of_ranks(self.members, own, gather), self.request.plan if self.plan_since > self.first_step else None, self.plan_since,
        )  # fmt: skip


def train_rank(
    worker: Worker, request: TrainRequest, handover: Handover, token: str, watching: Watching | None = None,
    going_on: GoingOn | None = None,
) -> TrainResult:  # fmt: skip
    """Trains one rank from start to end, as a job of a worker or in a process of torchrun; `watching` makes the watcher of its steps."""
    device = PACED if request.device == PACED else str(worker.groups.device)
    with named_process(request.out, worker.rank, device), Run(worker, request, handover, token, going_on) as run:
        if watching is not None:
            run.watch(watching)
        return run.train()
