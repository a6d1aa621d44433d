"""One rank's run: programs in, steps done, records, evaluations and checkpoints out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.data.loader import ProgramLoader
from penstock.data.planning import PlanningError, ProgramPlanner
from penstock.data.samples import LoadedProgram, Samples
from penstock.errors import PenstockError, plural
from penstock.models.micro_batch import MicroBatch
from penstock.plans.references import cluster_of, model_of
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.first_weights import open_weights
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.determinism import always_the_same
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.loads import GpuLoad, RankLoads
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import load_rank, load_state, load_weights
from penstock.runtime.recovering.faults import RankFaults
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import PACED, WARM_UP, EvalRecord, GoingOn, MayLeave, PlanAdopted, TrainRequest, TrainResult
from penstock.runtime.run_folder import CHECKPOINTS
from penstock.runtime.run_inputs import held_out_programs, program_planner, run_inputs
from penstock.runtime.steps.agreeing import Agreed, Order, agree, told_plan
from penstock.runtime.steps.divergence import MAX_DROPPED, DivergedError, describe_divergence, is_diverged
from penstock.runtime.steps.measuring import StepMeasures
from penstock.runtime.steps.records import RunRecords, TrainedStep
from penstock.runtime.steps.words import StepWatcher, StepWord, samples_digest, whole_digest
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.flops import PeakTimes
from penstock.runtime.telemetry.observing import Observers, StageSpans, slowest_stages, times_of_ranks
from penstock.runtime.telemetry.phases import MOVING, RECOVERING
from penstock.runtime.telemetry.predicting import ProgramTimes
from penstock.runtime.telemetry.process_files import named_process
from penstock.runtime.telemetry.profiled_steps import ProfiledSteps
from penstock.runtime.telemetry.spans import COMPUTE, SpanRecorder
from penstock.runtime.telemetry.steps import StepRecord, padding_share
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


@dataclass(frozen=True)
class _Place:
    """What a process has under one plan."""

    planner: ProgramPlanner
    times: ProgramTimes | None = None
    """Of paced devices."""
    held_out: Samples | None = None
    evaluations: Sequence[Program] = ()
    """This rank's forward passes over the held-out samples."""


@dataclass(frozen=True)
class _Moving:
    """A move that goes on beside a step."""

    request: TrainRequest
    """Of the new plan."""
    place: _Place
    taken_s: float
    """How long training stood still before the step."""


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
        self.members = worker.groups.generation.members
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
        self._lost: StoreError | None = None
        """Why this rank gets no more programs."""
        self._dropped = 0
        """Updates in a row that were not kept."""
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
        self._moving: _Moving | None = None
        self._stayed_with: tuple[int, ...] = ()
        """Ranks whose work could not be moved away: they leave their copies to others."""
        self._take_place(self._places(planner))
        if self.goes_on:
            self.faults.look(self.first_step)
            self.faults.meet(RECOVERING)
        if self.has_work:
            self._load(going_on)

    def _load(self, going_on: GoingOn | None) -> None:
        """What this rank begins with, unless that is random weights: copies of what others had learned, a checkpoint, or weights alone."""
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

    @property
    def world(self) -> World:
        """The ranks and process groups of the plan in force."""
        return self.rank.world

    @property
    def has_work(self) -> bool:
        """Whether the plan in force has any for this process."""
        return self.world.rank >= 0

    @property
    def _window_end(self) -> int:
        """The step after those that come next as one program."""
        return self.loader.planner.drains.after(self.step)

    @property
    def _tells_steps(self) -> bool:
        """Whether this is the plan's first rank, whose record of a step is that of the run."""
        return self.has_work and self.world.place == 0

    def _places(self, planner: ProgramPlanner) -> _Place:
        """What this process needs under the plan of a planner, before that is in force: all that may fail."""
        has_work = self.worker.rank in planner.plan.ranks
        times = ProgramTimes(planner.plan, planner.model, planner.costs) if has_work and isinstance(self.rank, PacedRank) else None
        evaluation = held_out_programs(self.request, planner, self.worker.rank) if has_work and self.request.eval_every else (None, ())
        return _Place(planner, times, *evaluation)

    def _take_place(self, place: _Place) -> None:
        """All that belongs to the plan in force, which `rank` has adopted: who saves what, what is measured, predicted and evaluated."""
        request, warm = self.request, max(self.step + WARM_UP, self._window_end)
        self._place = place
        self.loads.plan_changed()
        self.times = StageSpans(warm if request.steps > warm else 0, self.worker.groups.device)
        """Since the plan is in force."""
        observers = self.worker.status, self.spans, self.times, *([self.profiled] if request.profile_steps else [])
        self.rank.executor.observer = Observers(*observers)
        if isinstance(self.rank, PacedRank) and place.times is not None:
            self.rank.times = place.times
        self._peaks = self._peak_times() if self._tells_steps else None
        self.saves.take_place()
        self._measures = StepMeasures(self.rank, self.loader, self.records, self.times)
        if self._is_measured:
            self._measures.watched()

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
    def computes_on_cores(self) -> bool:
        """Whether passes take as long as the cores of this machine need, and not as long as a clock of devices says."""
        return self.world.device.type == "cpu" and not isinstance(self.rank, PacedRank)

    def watch(self, watching: Watching) -> None:
        """Tells a watcher of every step, and has it measured if it wants that."""
        self._watching, self.watcher = watching, watching(self)
        if self._is_measured:
            self._measures.watched()

    @property
    def _is_measured(self) -> bool:
        """Whether somebody watches who wants figures."""
        return self.watcher is not None and self.watcher.measures

    def train(self) -> TrainResult:
        """All steps that are left."""
        losses, times, tokens, ended_by = [], [], [], 0
        programs = self._loaded_programs()
        self._compare_clocks(self.first_step)
        start_s = time.perf_counter()
        while self.step < self.request.steps and not ended_by:
            words = self._train(next(programs), start_s) if self.has_work else self._idle_words()
            end_s = time.perf_counter()
            self.step = self._window_end
            told = self._agreed(words)
            steps = self._trained(told.words)
            for one in steps:
                losses.append(math.nan if one.record.loss is None else one.record.loss)
                times.append(one.record.time_s or 0.0)
                tokens.append(one.record.tokens or 0)
                self.records.tell(one)
            if told.is_lost and self.step < self.request.steps:
                lost = self._lost or StoreError("another rank gets no more programs from the store.")
                raise self._ended(lost, self.worker.groups.barrier)
            moves_away = self._may_move_away(told.leaving)
            leaves = bool(told.leaving) and not moves_away
            self.saves.after(self.step, steps[-1].evaluated, is_due=told.is_due, is_saving=told.is_saving, leaves=leaves)
            if told.leaving and self.saves.may_leave and self.worker.asked_to_end() < 0:
                self.worker.tell(MayLeave())
            ended_by = told.ended_by
            if self._moving is not None:
                self._finish_move(self._moving, ended=bool(ended_by))
            elif told.order is not None and not ended_by:
                self._move(told.order)
            elif moves_away and self._move_away(told.leaving):
                if self.worker.rank in told.leaving:
                    self.worker.tell(MayLeave(has_moved=True))
                    return TrainResult(self.first_step, 0, (), (), 0.0, 0.0, {}, None, has_left=True)
            elif self.step // _SYNC_STEPS > (self.step - len(words)) // _SYNC_STEPS:
                self._compare_clocks(self.step)
            self.loader.wait_s = self.loader.data_wait_s = 0.0
            start_s = time.perf_counter()
            self.times.paused(start_s - end_s)
        self.saves.finish(self.step)
        self.times.settle()
        return self._result(losses, times, tokens, ended_by)

    def _result(self, losses: Sequence[float], times: Sequence[float], tokens: Sequence[int], ended_by: int) -> TrainResult:
        """What the run came to, of loss, seconds and tokens of its steps: speed is that of the plan in force, warmed up."""
        steps_of_plan = self.step - self.plan_since
        usual = statistics.median(times[-steps_of_plan:][WARM_UP:] or times[-steps_of_plan:] or times)
        mean_tokens, gather = statistics.fmean(tokens), self.worker.groups.gather
        own = self.times.times(self._measures.memory().get("allocated_bytes")) if self.has_work else None
        return TrainResult(
            self.first_step, len(losses), tuple(losses), tuple(self.records.evaluated), usual, mean_tokens / usual,
            slowest_stages(self.request.plan.num_stages, self.times, gather), str(Path(self.request.out) / CHECKPOINTS), ended_by,
            times_of_ranks(self.members, own, gather), self.request.plan if self.plan_since > self.first_step else None, self.plan_since,
        )  # fmt: skip

    def _train(self, loaded: LoadedProgram, start_s: float) -> list[StepWord]:
        """One step, or those that are one program, and what to say about each: of the time all have the same part."""
        program, count, wait_s, position = loaded.program, loaded.program.num_batches, self.loader.wait_s, self.spans.position
        self.faults.look(program.iteration + count - 1)
        self.loads.look(program.iteration)
        executor = self.rank.executor
        observer, executor.observer = executor.observer, self.faults.observer(executor.observer)
        with self.profiled.around(program.iteration):
            self.rank.train(program, loaded)
        executor.observer = observer
        self._prepare_next()
        self._measures.expect(program)
        results = self.rank.results
        found = [(result.loss.item(), None if result.norm is None else result.norm.item()) for result in results]
        wall_s = time.perf_counter() - start_s
        whole_s = self._measures.step_s(program.iteration, wall_s)
        self.times.step_done(wall_s, wait_s, self.rank.update.exchanges, count)
        figures = self._measures.figures(wall_s).shared_out(count)
        self.loads.measured(self._measures.pace(figures, count))
        busy_s, time_s = float(self.spans.busy_ns(position)[COMPUTE]) * 1e-9, whole_s / count
        words: list[StepWord] = []
        for number, (result, (loss, norm)) in enumerate(zip(results, found, strict=True)):
            self._check_finite(program, result, loss, norm, words)
            own, record = program.of_batch(number), None
            if self._tells_steps:
                tokens = int(result.tokens.item())
                record = StepRecord(
                    program.iteration + number, loss, time_s, tokens, tokens / time_s, self._mfu(own, tokens, time_s), result.rate,
                    gradient_norm=norm, skipped=result.skipped, bubble_share=max(0.0, 1.0 - busy_s / whole_s),
                    planning_wait_s=wait_s / count, padding_share=padding_share(own),
                    **self._measures.memory(), **self.records.gpu_sample(),
                )  # fmt: skip
            words.append(StepWord(samples=samples_digest(own) if self.rank.leads_replica else 0, figures=figures, record=record))
        done, every = program.iteration + count, self.request.eval_every
        if every and (done % every == 0 or done == self.request.steps):
            words[-1] = replace(words[-1], evaluated=self._evaluate(done))
        return words

    def _prepare_next(self) -> None:
        """A GPU still works on a step when all of it is issued: meanwhile the host brings the first micro-batch of the next."""
        coming = self.loader.coming() if self.world.device.type == "cuda" else None
        if coming is not None:
            self.rank.prepare(coming.program, coming)

    def _idle_words(self) -> list[StepWord]:
        """What a process without work says of each step that the others have as one program."""
        figures = self._measures.idle_figures(self.step) if self._is_measured else RankFigures()
        return [StepWord(figures=figures)] * (self._window_end - self.step)

    def _check_finite(
        self, program: Program, result: StepResult, loss: float, norm: float | None, before: Sequence[StepWord] = ()
    ) -> None:
        """Ends the run, on all ranks, before anything of a step that is not finite is saved; or counts that its update was dropped. Those
        `before` it in the same program are still told."""
        if not is_diverged(loss, norm, scaled=self.rank.update.scale is not None):
            self._dropped = 0
            return
        self._dropped += 1
        what = describe_divergence(self.rank, program, result, len(before))
        if self.request.settings.on_nan == "skip" and self._dropped < MAX_DROPPED:
            self.records.note(f"{what}. Its update was dropped.")
            return
        for word in before:
            if word.record is not None:
                self.records.tell(TrainedStep(word.record, whole_digest([word])))
        self.saves.wait()
        self.world.barrier()  # the first rank to fail ends the others, rank 0 included, which completes the checkpoint before
        advice = f"It was the {MAX_DROPPED}th in a row" if self._dropped > 1 else "--on-nan skip would drop such updates"
        raise DivergedError(f"{what}. Nothing of this step was saved. {advice}; look at the samples, or lower --lr.")

    def _compare_clocks(self, number: int) -> None:
        self.worker.groups.barrier()
        self.spans.mark_sync(number)

    def _loaded_programs(self) -> Iterator[LoadedProgram]:
        """The programs of the steps that are left. A rank that loses the store plans one more step itself: others may have their programs
        of it, and learn after it that it is the last."""
        try:
            yield from self.loader
        except StoreError as error:
            self._lost = error
            yield self.loader.next_planned_here()
        except PlanningError as error:  # which every rank was told, but no process without work: that waits for what they say of the step
            raise self._ended(error, self.world.barrier) from None

    def _agreed(self, own: Sequence[StepWord]) -> Agreed:
        """Given what this process has to say of each step of a program."""
        last = replace(
            own[-1], lost=self._lost is not None, asked_to_end=self.worker.asked_to_end(), is_due=self.is_first and self.saves.is_late,
            is_saving=self.saves.is_saving, copied=self.saves.copied,
        )  # fmt: skip
        asks = self.is_first and self.watcher is not None and self.step < self.request.steps
        agreed = agree(self.worker.groups, self.members, (*own[:-1], last), self._order() if asks else None)
        self.saves.safe_copy = agreed.safe_copy
        return agreed

    def _order(self) -> Order | None:
        """What is to be in force from the next step on, if not the present plan."""
        assert self.watcher is not None
        wanted = self.watcher.order(self.step)
        return None if wanted is None else Order(wanted, self.watcher.exact)

    def _trained(self, words: Sequence[Mapping[int, StepWord]]) -> list[TrainedStep]:
        """The steps of a program that has ended, given what all said of them; who watches is told."""
        steps = []
        for number, said in enumerate(words, self.step - len(words)):
            if self.watcher is not None:
                figures = {member: word.figures for member, word in said.items()}
                self.records.note(*self.watcher.after(number - self._measures.lateness, figures))
            told = said[self.world.ranks[0]]
            assert told.record is not None
            steps.append(TrainedStep(told.record, whole_digest(said.values()), told.evaluated))
        return steps

    def _move(self, order: Order) -> None:
        """Puts another plan in force, with all that training has reached, or begins to; or stays as it was, if a process cannot."""
        assert self.watcher is not None
        start_s, plan = time.perf_counter(), order.plan
        request = replace(self.request, plan=plan)
        prepare, places = self._preparing(request)
        if not order.exact and self.step + 1 < request.steps and self.watcher.begin(self.rank, plan, self.step, prepare):
            self._moving = _Moving(request, places[-1], time.perf_counter() - start_s)
        elif self.watcher.move(self.rank, plan, self.step, prepare):
            self._take_over(request, places[-1], start_s)

    def _preparing(self, request: TrainRequest) -> tuple[Callable[[], None], list[_Place]]:
        """What a move does where it may still fail, and where it leaves what this process needs under the plan of `request`."""
        places: list[_Place] = []
        self.saves.wait()

        def prepare() -> None:
            self.faults.meet(MOVING)
            places.append(self._places(program_planner(request)))

        return prepare, places

    def _may_move_away(self, leaving: tuple[int, ...]) -> bool:
        """Whether work can be moved away from ranks whose nodes leave. The node that leads has the first of all, and what others need."""
        is_possible = self.watcher is not None and self.members[0] not in leaving and self.step < self.request.steps
        return is_possible and leaving not in ((), self._stayed_with)

    def _move_away(self, leaving: tuple[int, ...]) -> bool:
        """Moves to the best plan without these ranks, and goes on in the processes of the others; False: all is as it was."""
        assert self.watcher is not None
        start_s = time.perf_counter()
        plan = told_plan(self.worker.groups, self.watcher.without(leaving) if self.is_first else None)
        self._stayed_with = leaving
        if plan is None:
            return False
        request = replace(self.request, plan=plan)
        rest = tuple(one for one in self.members if one not in leaving)
        prepare, places = self._preparing(request)
        if not self.watcher.move(self.rank, plan, self.step, prepare, rest):
            return False
        if self.worker.rank in rest:
            self.members = rest
            self._take_over(request, places[-1], start_s)
            self._watch_anew()
        return True

    def _watch_anew(self) -> None:
        """The processes of the job are others than before: whoever watches it begins again, as after a death."""
        assert self.watcher is not None and self._watching is not None
        self.watcher.close()
        self.is_new, self.goes_on = False, True
        self.watch(self._watching)

    def _finish_move(self, moving: _Moving, *, ended: bool) -> None:
        """Puts a plan in force whose state has travelled beside the step that has just ended, unless the run ends too."""
        assert self.watcher is not None
        self._moving, start_s = None, time.perf_counter() - moving.taken_s
        if ended:
            self.watcher.cancel()
            return
        self.saves.wait()
        if self.watcher.finish(self.step):
            self._take_over(moving.request, moving.place, start_s)

    def _take_over(self, request: TrainRequest, place: _Place, start_s: float) -> None:
        """All has come to this process that the new plan needs: it is in force from now on."""
        assert self.watcher is not None
        self.request, self.plan_since = request, self.step
        self.loader.adopt(self.step, place.planner)
        self.worker.tell(PlanAdopted(self.step, request.plan))
        self._take_place(place)
        self.saves.copy(self.step)  # else a death would go back to steps of the plan before
        self._compare_clocks(self.step)
        self.records.plan_number += 1
        self.records.note(*self.watcher.moved(self.step, request.plan, time.perf_counter() - start_s))

    def _ended(self, error: PenstockError, meet: Callable[[], None]) -> PenstockError:
        """Saves what was trained, on all ranks, before the run ends; the error, with how far it came. `meet` is the barrier of those who
        end like this."""
        if not self.step:
            return error
        self.saves.finish(self.step)
        meet()  # the first process to fail ends the others, rank 0 included, which completes the checkpoint
        return type(error)(f"{str(error).rstrip('.')}. The run ended after {plural(self.step, 'step')}.")

    def _peak_times(self) -> PeakTimes | None:
        """The plan's work at the peak of its devices, to say how well they are used; None where it runs on others than it names."""
        cluster, kind = cluster_of(self.request.plan), self.world.device.type
        meant = {"cpu" if cluster.device(rank).name == "cpu" else "cuda" for rank in self.world.ranks} == {kind}
        paced = self.request.device == PACED
        return PeakTimes(self.request.plan, self.model, cluster) if meant and not self.worker.shared_gpu and not paced else None

    def _mfu(self, own: Sequence[MicroBatch], tokens: int, time_s: float) -> float | None:
        """The share of the devices' peak that a step used; samples of other replicas are taken to cost as much for each token as this
        one's."""
        return None if self._peaks is None else self._peaks.time_s(own, tokens) / time_s

    def _evaluate(self, done: int) -> EvalRecord:
        """Loss and accuracy after `done` steps, the mean over the held-out batches."""
        place = self._place
        found = [self.rank.evaluate(program, place.held_out) for program in place.evaluations]
        return EvalRecord(done, statistics.fmean(one.loss for one in found), statistics.fmean(one.accuracy for one in found))


def train_rank(
    worker: Worker, request: TrainRequest, handover: Handover, token: str, watching: Watching | None = None,
    going_on: GoingOn | None = None,
) -> TrainResult:  # fmt: skip
    """One rank's whole run: a job for workers, and what a process under torchrun calls. `watching` makes who follows its steps."""
    device = PACED if request.device == PACED else str(worker.groups.device)
    with named_process(request.out, worker.rank, device), Run(worker, request, handover, token, going_on) as run:
        if watching is not None:
            run.watch(watching)
        return run.train()
