"""Jobs for workers: a rank of a plan on random samples, programs that it runs, and what came of them. Tests and benchmarks use them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch

from penstock.data.samples import LoadedProgram, Sample
from penstock.models.modules.batch import Batch
from penstock.models.ops import Model
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.programs.instructions import Program
from penstock.runtime.devices.clock import ClockSettings
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.devices.timed import TimedRank
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.rank import Evaluated, Rank
from penstock.runtime.request import WARM_UP, TrainRequest, TrainResult
from penstock.runtime.run import Run, train_rank
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.source import Source, load_share
from penstock.runtime.telemetry.observing import Observer
from penstock.runtime.transport.world import ProcessGroups, World
from penstock.runtime.worker import Worker
from penstock.timing.workload import Workload

if TYPE_CHECKING:
    from penstock.runtime.planner_processes import Handover

__all__ = [
    "OpenRank", "RandomSource", "TrainedPrograms", "Weight", "collected", "open_rank", "rank_of", "run_paced", "run_timed",
    "train_programs", "train_sampled", "train_slowly",
]  # fmt: skip


@dataclass(frozen=True)
class RandomSource:
    """Random samples of any length, the same for the same (seed, iteration, id)."""

    model: Model
    seed: int = 0

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """Draws the sample."""
        generator = np.random.default_rng((self.seed, iteration, sample))
        config = self.model.config
        if not length:
            size = config["image_size"]
            image = generator.standard_normal((3, size, size), dtype=np.float32)
            return Sample(image, np.array(generator.integers(config["num_classes"])))
        vocab = config["vocab"]
        loss_length = dec_length or length
        bert = self.model.family == "bert"
        return Sample(
            generator.integers(1, vocab, length),
            generator.integers(0, vocab, loss_length),
            generator.integers(1, vocab, dec_length) if dec_length else None,
            types=generator.integers(0, 2, length) if bert else None,
            next_sentence=int(generator.integers(2)) if bert else None,
        )


@dataclass(frozen=True)
class Weight:
    """A weight as one rank holds it."""

    op: int
    name: str
    tp_rank: int
    tp_size: int
    algo: int
    values: torch.Tensor


@dataclass(frozen=True)
class TrainedPrograms:
    """What running some programs gave on one rank; nothing on one without work."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    weights: tuple[Weight, ...] = ()
    statistics: tuple[torch.Tensor, ...] = ()
    """Running statistics of its ops."""


class OpenRank(Rank):
    """A rank with a source of its own, so that programs alone are enough to train."""

    source: Source

    def train(self, program: Program, source: Source | None = None) -> StepResult:
        """Runs one iteration."""
        return super().train(program, source or self.source)

    def evaluate(self, program: Program, source: Source | None = None) -> Evaluated:
        """Runs forward passes alone."""
        return super().evaluate(program, source or self.source)


def rank_of(
    plan: Plan, groups: ProcessGroups, settings: TrainingSettings, source: Source | None = None, model: Model | None = None,
    observer: Observer | None = None,
) -> OpenRank:  # fmt: skip
    """This process' rank of a plan, on random samples unless told otherwise."""
    model = model or model_of(plan)
    rank = OpenRank(model, groups, settings)
    rank.executor.observer = observer
    rank.source = source or RandomSource(model)
    rank.adopt(plan)
    return rank


def open_rank(
    worker: Worker, plan: Plan, settings: TrainingSettings, source: Source | None = None, model: Model | None = None
) -> OpenRank | None:
    """This worker's rank of a plan; None if the plan has no work for it."""
    rank = rank_of(plan, worker.groups, settings, source, model, worker.status)
    return rank if rank.world.rank >= 0 else None


def train_programs(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings) -> TrainedPrograms:
    """Trains (or evaluates) with the programs of each iteration, given for all ranks, and returns the weights."""
    rank = open_rank(worker, plan, settings)
    if rank is None:
        return TrainedPrograms()
    losses, norms, evaluated = [], [], []
    place = rank.world.place
    for iteration in programs:
        own = iteration[place]
        if own.training:
            rank.train(own)
            losses += [result.loss.item() for result in rank.results]
            norms += [float("nan") if result.norm is None else result.norm.item() for result in rank.results]
        else:
            evaluated.append(rank.evaluate(own))
    return TrainedPrograms(tuple(losses), tuple(norms), tuple(evaluated), *collected(rank))


def collected(rank: Rank) -> tuple[tuple[Weight, ...], tuple[torch.Tensor, ...]]:
    """Weights and statistics of a rank; where weights are divided, all ranks must ask."""
    with ExitStack() as stack:
        for stage in rank.stages.values():
            if stage.weights is not None:
                for number in range(len(stage.pieces)):
                    stack.enter_context(stage.weights.around(number, backward=False))
        held = [one for stage in rank.stages.values() for one in stage.held]
        weights = tuple(
            Weight(one.place.index, one.name, one.module.tp.rank, one.module.tp.size, one.module.algo, one.parameter.detach().cpu().clone())
            for one in held
        )
    statistics = tuple(buffer.cpu() for stage in rank.stages.values() for module in stage.modules() for buffer in module.buffers())
    return weights, statistics


def run_timed(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], workloads: Sequence[Workload], settings: ClockSettings
) -> list[tuple[float, float]]:
    """A job for workers: of each iteration, whose programs are given for all ranks, `workloads` for the replicas, its seconds by the wall
    clock and by the devices' own."""
    world = World(plan, worker.groups)
    if world.rank < 0:
        return []
    rank, place = TimedRank(world, settings, worker.status), world.place
    return [(rank.run(iteration[place], workloads[iteration[place].replica]), rank.clock.device_s) for iteration in programs]


@dataclass(frozen=True)
class GivenTimes:
    """The times of each replica's programs, as a test wants them, in place of those of a plan's costs."""

    workloads: Sequence[Workload]

    def workload(self, program: Program) -> Workload:
        """Of the program's replica."""
        return self.workloads[program.replica]


def run_paced(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], workloads: Sequence[Workload], settings: ClockSettings
) -> tuple[list[float], TrainedPrograms]:
    """A job for workers: trains on paced devices; the seconds of each iteration by their clocks, and what came of it."""
    model = model_of(plan)
    rank = PacedRank(model, worker.groups, TrainingSettings(), settings)
    rank.executor.observer = worker.status
    rank.adopt(plan)
    if rank.world.rank < 0:
        return [], TrainedPrograms()
    rank.times = GivenTimes(workloads)  # type: ignore[assignment]
    times_s, losses = [], []
    for iteration in programs:
        losses.append(rank.train(iteration[rank.world.place], RandomSource(model)).loss.item())
        times_s.append(rank.clock.device_s)
        # The slower of two ranks that wait for each other never waits itself.
        assert 0.0 < rank.clock.busy_s <= rank.clock.device_s * (1 + 1e-9)
    return times_s, TrainedPrograms(tuple(losses), (), (), *collected(rank))


def train_sampled(
    with_nvml: bool, worker: Worker, request: TrainRequest, handover: Handover, token: str, *given: Any
) -> TrainResult:
    """A rank of `penstock train` whose processor is taken for a GPU that NVML knows, or that nobody knows since there is no NVML."""
    uuid = "GPU-a" if worker.rank == 0 else "GPU-b"
    with (
        mock.patch.dict(sys.modules, pynvml=import_module("standins.pynvml") if with_nvml else None),
        mock.patch("penstock.runtime.steps.records.gpu_uuid", lambda device: uuid),
    ):
        return train_rank(worker, request, handover, token, *given)


def train_slowly(worker: Worker, request: TrainRequest, handover: Handover, token: str, *options: Any) -> TrainResult:
    """A rank of `penstock train`; rank 0's micro-batches take a second to load once it is warm."""

    def late(source: Source, program: Program, *given: Any, **named: Any) -> Batch:
        time.sleep(1.0 if program.rank == 0 and program.iteration >= WARM_UP else 0.0)
        return load_share(source, program, *given, **named)

    with mock.patch("penstock.runtime.rank.load_share", late):
        return train_rank(worker, request, handover, token, *options)


WAITED_S = 1000.0


def train_waiting(worker: Worker, request: TrainRequest) -> None:
    """A job for workers: a run that is said to wait so long for each of its programs."""
    with Run(worker, request, ("", None), "one") as run:
        planned_here = run.loader.next_planned_here

        def waiting() -> LoadedProgram:
            run.loader.wait_s += WAITED_S
            return planned_here()

        run.loader.next_planned_here = waiting  # type: ignore[method-assign]
        run.train()
