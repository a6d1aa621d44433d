"""One rank's run on a timed device: planning, programs, transfers and telemetry are real, nothing is computed, learned or saved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.data.loader import ProgramLoader
from penstock.programs.instructions import Program
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.timed import TimedRank
from penstock.runtime.request import TIMED, WARM_UP, StepReport, TrainRequest, TrainResult
from penstock.runtime.run_folder import STEPS
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.observing import Observers, StageSpans, slowest_stages, times_of_ranks
from penstock.runtime.telemetry.predicting import ProgramTimes
from penstock.runtime.telemetry.process_files import named_process
from penstock.runtime.telemetry.spans import COMPUTE, SpanRecorder
from penstock.runtime.telemetry.steps import LineLog, StepRecord, padding_share
from penstock.runtime.transport.world import World

if TYPE_CHECKING:
    from penstock.runtime.planner_processes import Handover
    from penstock.runtime.worker import Worker

__all__ = ["rehearse", "rehearse_rank"]


def rehearse(worker: Worker, request: TrainRequest, handover: Handover) -> TrainResult:
    """A job for workers: a rehearsal, or nothing where the plan has no work for the process, which is then in none of its groups."""
    if worker.rank in request.plan.ranks:
        with named_process(request.out, worker.rank, TIMED):
            return rehearse_rank(worker, request, handover)
    World(request.plan, worker.groups)  # all processes make groups together
    return TrainResult(0, 0, (), (), 0.0, 0.0, {}, None)


def rehearse_rank(worker: Worker, request: TrainRequest, handover: Handover) -> TrainResult:
    """A job for workers: all steps of a run, by the times that the plan's costs say."""
    plan, out, (address, job) = request.plan, Path(request.out), handover
    batches, planner = run_inputs(request)
    times, world = ProgramTimes(planner.plan, planner.model, planner.costs), World(plan, worker.groups)
    warm = max(WARM_UP, planner.drains.after(0))
    stages = StageSpans(warm if request.steps > warm else 0)
    steps_s, tokens = [], []
    with ExitStack() as stack:
        loader = stack.enter_context(
            ProgramLoader(batches, planner, world.rank, address=address, job=job, planners=1 if job else 0, starts_planners=False)
        )
        spans = stack.enter_context(closing(SpanRecorder(out / f"rank-{world.rank:05d}.spans", world.rank)))
        log = stack.enter_context(closing(LineLog(out / STEPS, anew=True))) if world.place == 0 else None
        settings = ClockSettings(disturbance=request.disturbance, folder=request.out)
        rank = TimedRank(world, settings, Observers(worker.status, spans, stages))
        world.barrier()
        spans.mark_sync(0)
        start_s = time.perf_counter()
        for _, program in loader:
            position, count = spans.position, program.num_batches
            rank.run(program, times.workload(program))
            whole_s = time.perf_counter() - start_s - settings.lead_s
            stages.step_done(whole_s, loader.wait_s, num_steps=count)
            busy_s = float(spans.busy_ns(position)[COMPUTE]) * 1e-9
            for record in _records(program, loader, whole_s, busy_s):
                steps_s.append(record.time_s or 0.0)
                tokens.append(record.tokens or 0)
                if log is not None:
                    log.write(record)
                    worker.tell(StepReport(record.step, None, record.tokens_per_s or 0.0))
            loader.wait_s, start_s = 0.0, time.perf_counter()
        usual_s = statistics.median(steps_s[WARM_UP:] or steps_s)
        stages.settle()
        speed, found = statistics.fmean(tokens) / usual_s, slowest_stages(plan.num_stages, stages, world.gather)
        ranks = times_of_ranks(world.ranks, stages.times(), world.gather)
        return TrainResult(0, len(steps_s), (), (), usual_s, speed, found, None, ranks=ranks)


def _records(program: Program, loader: ProgramLoader, whole_s: float, busy_s: float) -> Iterator[StepRecord]:
    """The records of a program's steps, of whose time each has the same part."""
    count, form, time_s = program.num_batches, loader.planner.form, whole_s / program.num_batches
    for number in range(count):
        step = program.iteration + number
        lengths = form.positions(loader.batches[step].lengths)
        tokens = sum(int(side.sum()) for side in lengths) if loader.planner.plan.seq_length else program.num_samples // count
        yield StepRecord(
            step, None, time_s, tokens, tokens / time_s, bubble_share=max(0.0, 1.0 - busy_s / whole_s),
            planning_wait_s=loader.wait_s / count, padding_share=padding_share(program.of_batch(number)),
        )  # fmt: skip
