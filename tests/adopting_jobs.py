"""Jobs for worker processes: train under one plan after another, without a break or with one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from training_jobs import TrainedPrograms, collected, rank_of

from penstock.data.loader import DynamicLoader
from penstock.data.planners import BatchSource
from penstock.data.planning import ProgramPlanner
from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import adopt_with_state, load_rank, rank_pieces, rank_state
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.workers import Worker
from penstock.stores import Job

__all__ = ["Part", "train_adopting", "train_loaded"]

Part = tuple[Plan, Sequence[Sequence[Program]]]
"""A plan, and the programs of its iterations for all ranks."""


def train_adopting(worker: Worker, parts: Sequence[Part], settings: TrainingSettings, folder: Path) -> tuple[TrainedPrograms, int]:
    """Runs the programs of each part under its plan, adopted between two steps; with how many modules survived the last adoption."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    losses, modules = [], 0
    for plan, programs in parts:
        before = {id(module) for stage in rank.stages.values() for module in stage.modules()}
        adopt_with_state(rank, plan, programs[0][0].iteration, folder)
        modules = len(before & {id(module) for stage in rank.stages.values() for module in stage.modules()})
        if rank.world.rank >= 0:
            losses += [rank.train(iteration[rank.world.place]).loss.item() for iteration in programs]
    weights = collected(rank) if rank.world.rank >= 0 else ((), ())
    return TrainedPrograms(tuple(losses), (), (), *weights), modules


def train_loaded(
    worker: Worker, source: BatchSource, planners: Sequence[tuple[int, ProgramPlanner]], settings: TrainingSettings, folder: Path,
    handover: tuple[str, Job | None], resume: Path | None = None, save: Path | None = None,
) -> tuple[TrainedPrograms, list[tuple[int, int]]]:  # fmt: skip
    """Trains on data, by the programs of each planner from its step on; with (iteration, stages) of every program that was run.

    The launcher is told when a plan is adopted, so that its planner processes adopt it too.
    """
    first, planner = planners[0]
    rank = rank_of(planner.plan, worker.groups, settings, observer=worker.status)
    if resume is not None:
        load_rank(Checkpoint(resume), rank)
    address, job = handover
    loader = DynamicLoader(
        source, planner, rank.world.rank, address=address, job=job, planners=1 if job else 0, starts_planners=False, first_step=first,
        timeout=250,
    )  # fmt: skip
    later, losses, ran = dict(planners[1:]), [], []
    with loader:
        for loaded in loader:
            losses.append(rank.train(loaded.program, loaded).loss.item())
            ran.append((loaded.program.iteration, loaded.program.num_stages))
            if (planner := later.pop(loader.step, None)) is not None:
                adopt_with_state(rank, planner.plan, loader.step, folder)
                loader.adopt(loader.step, planner)
                assert not [thread for thread in threading.enumerate() if thread.name == "loader"]
                if worker.rank == 0:
                    worker.tell(loader.step)
    if save is not None:
        writer = CheckpointWriter(save, rank=worker.rank, world_size=len(rank.world.ranks), token="test", limit_s=60)
        writer.save(loader.step, rank_pieces(rank), {**rank_state(rank), "data": loader.state_dict()})
        writer.wait()
    return TrainedPrograms(tuple(losses), (), (), *collected(rank)), ran


def until(source: BatchSource, step: int) -> BatchSource:
    """The batches of the steps before `step`."""
    return replace(source, num_steps=step)
