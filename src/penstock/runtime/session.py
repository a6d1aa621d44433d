"""A job for workers: build a rank of a plan, run programs, say what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from penstock.models.ops import Model
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.programs.instructions import Program
from penstock.runtime.parallel.world import World
from penstock.runtime.rank import Evaluated, Rank
from penstock.runtime.source import RandomSource, Source
from penstock.runtime.update import TrainingSettings
from penstock.runtime.workers import Worker

__all__ = ["Outcome", "Weight", "collected", "open_rank", "train_programs"]


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
class Outcome:
    """What running some programs gave on one rank; nothing on one without work."""

    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    evaluated: tuple[Evaluated, ...] = ()
    weights: tuple[Weight, ...] = ()
    statistics: tuple[torch.Tensor, ...] = ()
    """Running statistics of its ops."""


def open_rank(
    worker: Worker, plan: Plan, settings: TrainingSettings, source: Source | None = None, model: Model | None = None
) -> Rank | None:
    """This worker's rank of a plan, on random samples unless told otherwise; None if the plan has no work for it."""
    world = World(plan, worker.device, staged=worker.shared_gpu)
    if world.rank < 0:
        return None
    model = model or model_of(plan)
    return Rank(plan, model, source or RandomSource(model), world, settings, worker.status)


def train_programs(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings) -> Outcome:
    """Trains (or evaluates) with the programs of each iteration, given for all ranks, and returns the weights."""
    rank = open_rank(worker, plan, settings)
    if rank is None:
        return Outcome()
    losses, norms, evaluated = [], [], []
    place = rank.world.process[rank.world.rank]
    for iteration in programs:
        own = iteration[place]
        if own.training:
            result = rank.train(own)
            losses.append(result.loss.item())
            norms.append(float("nan") if result.norm is None else result.norm.item())
        else:
            evaluated.append(rank.evaluate(own))
    return Outcome(tuple(losses), tuple(norms), tuple(evaluated), *collected(rank))


def collected(rank: Rank) -> tuple[tuple[Weight, ...], tuple[torch.Tensor, ...]]:
    """Weights and statistics of a rank; where weights are divided, all ranks must ask."""
    with ExitStack() as stack:
        for stage in rank.stages.values():
            stack.enter_context(stage.whole_weights())
        held = [one for stage in rank.stages.values() for one in stage.held]
        weights = tuple(
            Weight(one.place.index, one.name, one.module.tp.rank, one.module.tp.size, one.module.algo, one.parameter.detach().cpu().clone())
            for one in held
        )
    statistics = tuple(buffer.cpu() for stage in rank.stages.values() for module in stage.modules() for buffer in module.buffers())
    return weights, statistics
