"""What a move, and watching for reasons to move, take in jobs that run: measured on this machine, over what was measured beside it.

A job of two processes trains a small GPT on the processor and is asked to move ops to and fro between its stages. Its pauses are compared
with one step, and 1.5 times what its bytes take at the rate at which such processes send to each other. Watching is compared with the step
that it watches.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from penstock.adapting.asking import ask_for
from penstock.adapting.events import read_events
from penstock.adapting.ladder import PAUSE_LINK, PAUSE_STEPS
from penstock.adapting.moves import moves
from penstock.adapting.overlapping import OverlappedMove
from penstock.adapting.watching import Watch, obey_run
from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import model_of
from penstock.runtime.rank import Rank
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.run import Run, StepWatcher
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.predicting import ProgramTimes, passes_s
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.worker import Worker
from penstock.runtime.workers import WorkerPool

__all__ = ["pauses", "watching_s"]

MODEL = {"base": "gpt-tiny", "layers": 8, "hidden": 256, "heads": 8}
EVERY, NUM_MOVES = 5, 4
_ROUND_BYTES, _ROUNDS = 2**24, 8


def link_rate(worker: Worker) -> float:
    """Bytes a second that one process sends to the other, the best of some messages."""
    found, values = [], torch.zeros(_ROUND_BYTES // 4)
    for _ in range(_ROUNDS):
        dist.barrier()
        start_s = time.perf_counter()
        operation = dist.P2POp(dist.isend if worker.rank == 0 else dist.irecv, values, 1 - worker.rank)
        for work in dist.batch_isend_irecv([operation]):
            work.wait()
        found.append(_ROUND_BYTES / (time.perf_counter() - start_s))
    return max(found)


def _plans() -> tuple[Plan, Plan]:
    """Two stages, of equal parts and not."""
    plan = Plan(MODEL, "2xcpu", 8, (), MicroBatching("packed", samples=2), seq_length=128, precision="fp32")
    ops = model_of(plan).num_ops
    even, uneven = (replace(plan, stages=(Stage(0, cut, ((0,),)), Stage(cut, ops, ((1,),)))) for cut in (ops // 2, ops // 4))
    return even, uneven


def _data(folder: Path) -> str:
    prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
    return str(folder / "data")


def _beside_steps(run: Run) -> StepWatcher:
    """Obeys, and lets all that can travel beside a step do so, whatever would be shorter here."""
    watcher = obey_run(run)

    def begin(rank: Rank, plan: Plan, step: int, prepare: Callable[[], object]) -> bool:
        begun = OverlappedMove(rank, plan, step + 1, prepare)
        watcher._begun = begun if begun.begin(always=True) else None
        return watcher._begun is not None

    watcher.begin = begin
    return watcher


def pauses(*, overlapped: bool = False) -> Iterator[tuple[float, float]]:
    """(seconds that a move stopped training, the most that it should) of each move but the first, which warms up: one step, and where a
    move blocks 1.5 times what its bytes take."""
    here, there = _plans()
    steps = EVERY * (NUM_MOVES + 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        planning = PlanningSettings(0)
        request = TrainRequest(here, _data(folder), steps, str(folder / "run"), device="cpu", checkpoint_every=0, planning=planning)

        def told(step: StepReport) -> None:
            at, number = step.step + 3, (step.step + 3) // EVERY
            if at % EVERY == 0 and at < steps:  # a move to a step that was named blocks
                ask_for(request.out, there if number % 2 else here, 0 if overlapped else at)

        PlanTrainer(request, _beside_steps if overlapped else obey_run).train(told)
        times = [one.time_s or 0.0 for one in read_steps(folder / "run" / "steps.jsonl")]
        moved = [event for event in read_events(request.out) if event.event == "moved"]
    with WorkerPool(2, device="cpu", threads=1) as pool:
        rate = min(pool.run(link_rate, timeout_s=120))
    made = {(a, b): moves(*plans) for (a, b), plans in (((0, 1), (here, there)), ((1, 0), (there, here)))}
    for (before, event), number in zip(pairwise(moved), range(1, len(moved)), strict=True):
        step_s = statistics.median(times[before.step + 1 : event.step])
        busiest = max(made[number % 2, 1 - number % 2].link_bytes.values())
        yield event.pause_s or 0.0, PAUSE_STEPS * step_s + (0.0 if overlapped else PAUSE_LINK * busiest / rate)


def watching_s(plan: Plan, num_steps: int = 2000) -> tuple[float, float]:
    """Seconds of a core that the first process of a job takes for watching each step, while nothing happens: for looking at the figures of
    all ranks, which the next step waits for, and for predicting its own program, which goes on while its device is busy."""
    small = uniform_plan("gpt-tiny", "4xa100-80gb", global_batch=64, micro_batch=1, pp=4, layout="packed", precision="fp32")
    figures = np.exp(np.random.default_rng(0).normal(0, 0.05, (num_steps, len(plan.ranks))))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, planner = run_inputs(TrainRequest(small, _data(folder), 2, str(folder / "run")))
        data, batches = source.open()
        program, times = planner.programs(data, batches[0])[0], ProgramTimes(planner.plan, planner.model, planner.costs)
        watch = Watch(plan, folder)
        start_s = time.process_time()
        for _ in range(num_steps // 10):
            passes_s(program, times.workload(program))
        predicting_s = (time.process_time() - start_s) / (num_steps // 10)
        start_s = time.process_time()
        for step, own in enumerate(figures.tolist()):
            watch.after(step, {rank: RankFigures(value, 1.0, step_s=9.0) for rank, value in enumerate(own)})
        taken_s = time.process_time() - start_s
        watch.close()
    return taken_s / num_steps, predicting_s
