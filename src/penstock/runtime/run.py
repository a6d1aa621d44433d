"""One rank's run: programs in, steps done, records, evaluations and checkpoints out."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import astuple, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.data.loader import ProgramLoader
from penstock.data.planning import PlanningError, ProgramPlanner
from penstock.data.samples import LoadedProgram, Samples
from penstock.errors import PenstockError
from penstock.plans.references import cluster_of, model_of
from penstock.programs.check import require_safe
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.checkpoints.first_weights import open_weights
from penstock.runtime.checkpoints.folder import best_checkpoint
from penstock.runtime.checkpoints.going_on import RUN, run_facts
from penstock.runtime.checkpoints.intervals import SaveInterval
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import BEST_LOSS, CheckpointWriter
from penstock.runtime.determinism import always_the_same
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.divergence import MAX_DROPPED, DivergedError, describe_divergence, is_diverged
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import load_rank, load_weights, rank_pieces, rank_state
from penstock.runtime.request import PACED, WARM_UP, EvalRecord, StepTold, TrainRequest, TrainResult
from penstock.runtime.run_folder import CHECKPOINTS, STEPS
from penstock.runtime.run_inputs import batch_source, run_inputs
from penstock.runtime.telemetry.figures import RankFigures, StepMeter, StepWatcher
from penstock.runtime.telemetry.flops import PeakTimes
from penstock.runtime.telemetry.nvml import DeviceLog, NvmlMissing, gpu_uuid
from penstock.runtime.telemetry.observing import Observers, StageSpans, slowest_stages, times_of_ranks
from penstock.runtime.telemetry.predicting import ProgramTimes
from penstock.runtime.telemetry.profiled_steps import ProfiledSteps
from penstock.runtime.telemetry.spans import COMPUTE, SpanRecorder
from penstock.runtime.telemetry.steps import LineLog, StepRecord
from penstock.runtime.telemetry.tensorboard import tensorboard_sink
from penstock.runtime.transport.allocator import reserve
from penstock.runtime.transport.world import World
from penstock.runtime.workers import Worker
from penstock.schedules.actions import FORWARD
from penstock.schedules.orders import gpipe
from penstock.stores import StoreError

if TYPE_CHECKING:
    from penstock.runtime.planner_processes import Handover

__all__ = ["Run", "Watching", "train_rank"]

Watching = Callable[["Run"], "StepWatcher | None"]
"""Makes the watcher of a run, on every rank; None where there is nothing to be seen."""

_BEHIND = 1.2
"""A machine that takes so many times as long as its paced devices says so."""
_SYNC_STEPS = 100
"""Clocks of several machines drift apart; so often they are compared again."""


class Run:
    """Trains one rank; a context, so that files and planners are closed."""

    def __init__(self, worker: Worker, request: TrainRequest, handover: Handover, token: str) -> None:
        self.worker, self.request = worker, request
        if request.settings.deterministic:
            always_the_same()
        self.model = model_of(request.plan)
        self.first_step = Checkpoint(request.resume).step if request.resume else 0
        out, own = Path(request.out), worker.rank
        self.spans = SpanRecorder(out / f"rank-{own:05d}.spans", own)
        warm = self.first_step + WARM_UP if request.steps - self.first_step > WARM_UP else 0
        self.times = StageSpans(warm, worker.groups.device)
        self.profiled = ProfiledSteps(request.profile_steps, out, own)
        observer = Observers(worker.status, self.spans, self.times, *([self.profiled] if request.profile_steps else []))
        batches, planner = run_inputs(request)
        self.rank = self._rank(planner, observer)
        self.rank.adopt(request.plan)
        address, self._job = handover
        self.loader = ProgramLoader(
            batches, planner, own, address=address, job=self._job, planners=1 if self._job else 0, starts_planners=False,
            first_step=self.first_step, timeout=request.planning.wait_s,
        )  # fmt: skip
        self._lost: StoreError | None = None
        """Why this rank gets no more programs."""
        self._dropped = 0
        """Updates in a row that were not kept."""
        self._saved = self.first_step
        """Steps that the last checkpoint of this run has behind it."""
        if request.reserve_memory and self.world.device.type == "cuda":
            reserve(self.world.device, request.reserve_memory, len(self.world.ranks) if worker.shared_gpu else 1)
        self.is_first = self.world.place == 0
        self.log: LineLog | None = None
        if self.is_first:
            sink = tensorboard_sink(out / "tensorboard")
            self.log = LineLog(out / STEPS, *([] if sink is None else [sink]), anew=not self.first_step)
        self._notes: list[str] = []
        """Notes for the launcher that were not sent yet."""
        self._given_up: set[str] = set()
        """What was said once, and is not said again."""
        self.gpu = self._gpu_log(out)
        self._peaks = self._peak_times()
        self.checkpoints = CheckpointWriter(
            out / CHECKPOINTS, rank=self.world.place, world_size=len(self.world.ranks), token=token, keep=request.keep
        )  # fmt: skip
        best = best_checkpoint(out / CHECKPOINTS)
        self._best_loss = math.inf if best is None else best[1]
        self._interval = SaveInterval()
        seed, global_batch = request.settings.seed, request.plan.global_batch
        self._facts = run_facts(self.model, request.data, seed=seed, global_batch=global_batch) if self.is_first else {}
        if request.resume:
            load_rank(Checkpoint(request.resume), self.rank)
        elif request.weights:
            load_weights(open_weights(request.weights, self.model), self.rank)
        self._held_out, self._evaluations = self._evaluation(planner) if request.eval_every else (None, ())
        self.evaluated: list[EvalRecord] = []
        self.watcher: StepWatcher | None = None
        self._meter: StepMeter | None = None
        """On devices that keep no clock of their own."""

    def _rank(self, planner: ProgramPlanner, observer: Observers) -> Rank:
        request, groups = self.request, self.worker.groups
        if request.device != PACED:
            return Rank(self.model, groups, request.settings, observer)
        paced = PacedRank(self.model, groups, request.settings, observer, ClockSettings(disturbance=request.disturbance))
        paced.times = ProgramTimes(planner)
        return paced

    @property
    def world(self) -> World:
        """That of the plan in force."""
        return self.rank.world

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.loader.close()
        self.spans.close()
        if self.gpu is not None:
            self.gpu.close()
        if self.log is not None:
            self.log.close()

    @property
    def computes_on_cores(self) -> bool:
        """Whether passes take as long as the cores of this machine need, and not as long as a clock of devices says."""
        return self.world.device.type == "cpu" and not isinstance(self.rank, PacedRank)

    def watch(self, watcher: StepWatcher) -> None:
        """Has every step measured, and tells `watcher` of it."""
        self.watcher = watcher
        if not isinstance(self.rank, PacedRank):
            self._meter = StepMeter(self.loader.planner, self.times)

    def train(self) -> TrainResult:
        """All steps that are left."""
        losses, times, tokens, ended_by = [], [], [], 0
        self._compare_clocks(self.first_step)
        start = time.perf_counter()
        for loaded in self._loaded_programs():
            program = loaded.program
            wait_s, position = self.loader.wait_s, self.spans.position
            with self.profiled.around(program.iteration):
                result = self.rank.train(program, loaded)
            if self._meter is not None:
                self._meter.expect(program)
            losses.append(result.loss.item())
            norm = None if result.norm is None else result.norm.item()
            self._check_finite(program, result, losses[-1], norm)
            end = time.perf_counter()
            times.append(self._device_s(program.iteration, end - start))
            self.times.step_done(end - start, wait_s, self.rank.update.exchanges)
            figures = self._figures(end - start)
            tokens.append(int(result.tokens.item()))
            step = program.iteration
            record = StepRecord(
                step, losses[-1], times[-1], tokens[-1], tokens[-1] / times[-1], self._mfu(program, tokens[-1], times[-1]), result.rate,
                gradient_norm=norm, skipped=result.skipped,
                bubble_share=max(0.0, 1.0 - float(self.spans.busy_ns(position)[COMPUTE]) * 1e-9 / times[-1]), planning_wait_s=wait_s,
                **self._memory(), **self._sampled(),
            )  # fmt: skip
            if self.log is not None:
                self.log.write(record)
            self._after(step, StepTold(step, losses[-1], tokens[-1] / times[-1], record.gpu_utilisation))
            if step + 1 < self.request.steps:
                ended_by, is_due = self._agreed(step, figures)
                if ended_by:
                    break
                if is_due and self._saved <= step:
                    self._save(step + 1)
            if (step + 1) % _SYNC_STEPS == 0:
                self._compare_clocks(step + 1)
            self.loader.wait_s = self.loader.data_wait_s = 0.0
            start = time.perf_counter()
            self.times.paused(start - end)
        if self.loader.step > self._saved:
            self._save(self.loader.step)
        self.checkpoints.wait()
        self.times.settle()
        usual = statistics.median(times[WARM_UP:] or times)
        mean_tokens = statistics.fmean(tokens)
        return TrainResult(
            self.first_step, len(losses), tuple(losses), tuple(self.evaluated), usual, mean_tokens / usual,
            slowest_stages(self.world, self.times), str(Path(self.request.out) / CHECKPOINTS), ended_by,
            times_of_ranks(self.world, self.times.times(self._memory().get("allocated_bytes"))),
        )  # fmt: skip

    def _figures(self, wall_s: float) -> RankFigures:
        """What this rank measured in the step that has ended, or the one before it."""
        if isinstance(self.rank, PacedRank):
            clock = self.rank.clock
            return RankFigures(clock.busy_s, clock.expected_s, clock.data_wait_s, 0.0, clock.device_s)
        if self._meter is None:
            return RankFigures()
        if self.is_first and self._meter.refused is not None and "costs" not in self._given_up:
            self._given_up.add("costs")
            self._notes.append(f"slow ranks will not be noticed, since nothing can be predicted: {self._meter.refused}")
        wait_s, data_s = self.loader.wait_s, self.loader.data_wait_s
        return self._meter.ended(wall_s, data_s, wait_s - data_s)

    def _device_s(self, step: int, wall_s: float) -> float:
        """What a step took: by the clock on the wall, or by those of paced devices."""
        if not isinstance(self.rank, PacedRank):
            return wall_s
        clock = self.rank.clock
        is_behind = clock.wall_s > _BEHIND * clock.device_s and step >= self.times.first_iteration
        if self.is_first and is_behind and "pace" not in self._given_up:
            self._given_up.add("pace")
            self._notes.append(
                f"this machine computes more slowly than the paced devices: step {step} took {clock.wall_s:.3g} s, they take "
                f"{clock.device_s:.3g} s. The times that are told are theirs."
            )
        return clock.device_s

    def _check_finite(self, program: Program, result: StepResult, loss: float, norm: float | None) -> None:
        """Ends the run, on all ranks, before anything of a step that is not finite is saved; or counts that its update was dropped."""
        if not is_diverged(loss, norm, scaled=self.rank.update.scale is not None):
            self._dropped = 0
            return
        self._dropped += 1
        what = describe_divergence(self.rank, program, result)
        if self.request.settings.on_nan == "skip" and self._dropped < MAX_DROPPED:
            if self.is_first:
                self._notes.append(f"{what}. Its update was dropped.")
            return
        self.checkpoints.wait()
        self.world.barrier()  # the first rank to fail ends the others, rank 0 included, which completes the checkpoint before
        advice = f"It was the {MAX_DROPPED}th in a row" if self._dropped > 1 else "--on-nan skip would drop such updates"
        raise DivergedError(f"{what}. Nothing of this step was saved. {advice}; look at the samples, or lower --lr.")

    def _compare_clocks(self, number: int) -> None:
        self.world.barrier()
        self.spans.mark_sync(number)

    def _loaded_programs(self) -> Iterator[LoadedProgram]:
        """Those of the steps that are left. A rank that loses the store plans one more step itself: others may have their programs of
        it, and learn after it that it is the last."""
        try:
            yield from self.loader
        except StoreError as error:
            self._lost = error
            yield self.loader.next_planned_here()
        except PlanningError as error:  # which every rank was told
            raise self._ended(error) from None

    def _agreed(self, step: int, figures: RankFigures) -> tuple[int, bool]:
        """The signal that asks any of the ranks to end, and whether it is time for a checkpoint, which none is still writing; asked of all
        after each step, so that they do so after the same one. Raises on all of them where one has lost the store. What ranks measured
        goes the same way, since a message costs far more than its bytes."""
        is_due = self.is_first and self.request.checkpoint_every > 0 and self._interval.is_over(time.monotonic())
        own = [int(self._lost is not None), self.worker.asked_to_end(), int(is_due), int(self.checkpoints.busy)]
        told = self.world.gather(torch.tensor([*own, *astuple(figures)], dtype=torch.float64))
        lost, number, due, busy = told[:, : len(own)].amax(0).tolist()
        if lost:
            raise self._ended(self._lost or StoreError("another rank gets no more programs from the store."))
        if self.watcher is not None:
            ranks = {rank: RankFigures(*row) for rank, row in zip(self.world.ranks, told[:, len(own) :].tolist(), strict=True)}
            self._notes += self.watcher.after(step - (self._meter.lateness if self._meter else 0), ranks)
        return int(number), bool(due and not busy)

    def _ended(self, error: PenstockError) -> PenstockError:
        """Saves what was trained, on all ranks, before the run ends; the error, with how far it came."""
        done = self.loader.step
        if not done:
            return error
        if done > self._saved:
            self._save(done)
        self.checkpoints.wait()
        self.world.barrier()  # the first rank to fail ends the others, rank 0 included, which completes the checkpoint
        return type(error)(f"{str(error).rstrip('.')}. The run ended after {done} steps.")

    def _save(self, done: int, best_loss: float | None = None) -> None:
        self._saved, start_s = done, time.monotonic()
        state = {**rank_state(self.rank), "data": self.loader.state_dict(), RUN: self._facts}
        self.checkpoints.save(done, rank_pieces(self.rank), state if best_loss is None else {**state, BEST_LOSS: best_loss})
        self._interval.saved(start_s, time.monotonic())

    def _after(self, step: int, told: StepTold) -> None:
        """Evaluation, checkpoint, a word to the launcher."""
        request, done = self.request, step + 1
        best_loss = None
        if request.eval_every and (done % request.eval_every == 0 or done == request.steps):
            self.evaluated.append(self._evaluate(done))
            told = replace(told, evaluated=self.evaluated[-1])
            if self.evaluated[-1].loss < self._best_loss:
                best_loss = self._best_loss = self.evaluated[-1].loss
        if (request.checkpoint_every and done % request.checkpoint_every == 0) or best_loss is not None:
            self._save(done, best_loss)
        if self.is_first:
            self._notes += self._gone_silent()
            self.worker.tell(replace(told, notes=tuple(self._notes)))
            self._notes.clear()

    def _gone_silent(self) -> Iterator[str]:
        """A note for each kind of record that a full disk ended, once."""
        for what, error in (("steps", self.log and self.log.error), ("spans", self.spans.error)):
            if error is not None and what not in self._given_up:
                self._given_up.add(what)
                yield f"{what} are no longer recorded: {error}."

    def _gpu_log(self, out: Path) -> DeviceLog | None:
        """The thread that samples this rank's GPU (NVML), if it has one that no rank before it samples."""
        uuid = gpu_uuid(self.world.device)
        if uuid is None or (self.worker.shared_gpu and self.worker.rank >= torch.cuda.device_count()):
            return None
        try:
            return DeviceLog(uuid, out / f"rank-{self.world.rank:05d}.devices.jsonl")
        except NvmlMissing as error:
            self._notes.append(f"no GPU utilisation, clocks and power are recorded: {error}.")
            return None

    def _peak_times(self) -> PeakTimes | None:
        """Nothing where the plan's devices are not those that it runs on."""
        cluster, kind = cluster_of(self.request.plan), self.world.device.type
        meant = {"cpu" if cluster.device(rank).name == "cpu" else "cuda" for rank in self.world.ranks} == {kind}
        paced = self.request.device == PACED
        return PeakTimes(self.request.plan, self.model, cluster) if meant and not self.worker.shared_gpu and not paced else None

    def _mfu(self, program: Program, tokens: int, time_s: float) -> float | None:
        """Other replicas' samples are taken to cost as much for each token as this one's."""
        return None if self._peaks is None else self._peaks.time_s(program.micro_batches, tokens) / time_s

    def _sampled(self) -> dict[str, float | None]:
        now = None if self.gpu is None else self.gpu.latest
        if now is None:
            return {}
        return {"gpu_utilisation": now.utilisation, "gpu_sm_clock_hz": now.sm_clock_hz, "gpu_power_w": now.power_w}

    def _memory(self) -> dict[str, int]:
        if self.world.device.type != "cuda":
            return {}
        device = self.world.device
        return {"allocated_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.max_memory_reserved(device)}

    def _evaluate(self, done: int) -> EvalRecord:
        """The mean over the held-out batches."""
        found = [self.rank.evaluate(program, self._held_out) for program in self._evaluations]
        return EvalRecord(done, statistics.fmean(one.loss for one in found), statistics.fmean(one.accuracy for one in found))

    def _evaluation(self, planner: ProgramPlanner) -> tuple[Samples, list[Program]]:
        """Samples of the held-out split, and this rank's forward passes over some batches of it, planned like training's."""
        source = batch_source(self.request, "validation")
        data, batches = source.open()
        found = []
        for number in range(self.request.eval_batches):
            planned = planner.programs(data, batches[number])
            work = [_forwards(program) for _, program in sorted({program.replica: program for program in planned}.items())]
            programs = lower(self.request.plan, self.model, work, number, training=False)
            require_safe(programs, self.request.plan, self.model)
            found.append(next(program for program in programs if program.rank == self.world.rank))
        return Samples(data, planner.form, source.limits), found


def _forwards(program: Program) -> ReplicaWork:
    """The micro-batches of a program's replica, passed forward one after the other; the stages of a device in turn."""
    stages = [place.stage for place in program.places]
    full = gpipe(program.num_stages, len(program.micro_batches))
    forward = [tuple(action for action in actions if action.kind == FORWARD) for actions in full]
    chunks = len(stages)
    groups = program.num_stages // chunks
    merged = tuple(
        tuple(
            sorted(
                (action for chunk in range(chunks) for action in forward[chunk * groups + group]), key=lambda a: (a.micro_batch, a.stage)
            )
        )
        for group in range(groups)
    )
    return ReplicaWork(program.micro_batches, merged)


def train_rank(worker: Worker, request: TrainRequest, handover: Handover, token: str, watching: Watching | None = None) -> TrainResult:
    """One rank's whole run: a job for workers, and what a process under torchrun calls. `watching` makes who follows its steps."""
    with Run(worker, request, handover, token) as run:
        if watching is None or (watcher := watching(run)) is None:
            return run.train()
        with closing(watcher):
            run.watch(watcher)
            return run.train()
