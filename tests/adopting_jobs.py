"""Jobs for worker processes: train under one plan after another, without a break or with one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from generation_jobs import Footprint, footprint
from training_jobs import TrainedPrograms, collected, rank_of

from penstock.data.loader import ProgramLoader
from penstock.data.planners import BatchSource
from penstock.data.planning import ProgramPlanner
from penstock.plans.plan import Plan
from penstock.programs.instructions import Instruction, Program
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, TensorPiece
from penstock.runtime.checkpoints.manifest import Box
from penstock.runtime.checkpoints.reader import Checkpoint, PiecesInMemory
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.executor import ExecutionError
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import (
    TrainedState,
    adopt_state,
    checkpoint_state,
    load_rank,
    rank_pieces,
    rank_state,
    require_same_training,
)
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.generations import DESTROYING
from penstock.runtime.worker import Worker
from penstock.stores import Job

__all__ = ["Part", "train_abandoning", "train_adopting", "train_handing_over", "train_loaded"]

Part = tuple[Plan, Sequence[Sequence[Program]]]
"""A plan, and the programs of its iterations for all ranks."""


def adopt_through_checkpoint(rank: Rank, plan: Plan, step: int, folder: Path) -> None:
    """Puts `plan` in force before step `step` with all that training has reached, which travels through a checkpoint in `folder`: what
    live moves are compared with. Every process of the job calls it, also one to which either plan gives nothing; the folder is empty again
    afterwards, and the same plan moves nothing."""
    if plan == rank.plan:
        return
    require_same_training(rank.plan, plan)
    before = rank.world
    if before.rank >= 0:
        writer = CheckpointWriter(folder, rank=before.place, world_size=len(before.ranks), token=before.fresh_word())
        writer.save(step, rank_pieces(rank), rank_state(rank))
        writer.wait()
    rank.groups.barrier()  # the first process completes the checkpoint
    adopt_state(rank, plan, checkpoint_state(Checkpoint(folder), rank.model, rank.settings.optimizer.kind))
    rank.groups.barrier()
    if rank.groups.own == rank.groups.generation.members[0]:
        shutil.rmtree(folder)
        folder.mkdir()


def train_adopting(worker: Worker, parts: Sequence[Part], settings: TrainingSettings, folder: Path) -> tuple[TrainedPrograms, int]:
    """Runs the programs of each part under its plan, adopted between two steps; with how many modules survived the last adoption."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    losses, modules = [], 0
    for plan, programs in parts:
        before = {id(module) for stage in rank.stages.values() for module in stage.modules()}
        adopt_through_checkpoint(rank, plan, programs[0][0].iteration, folder)
        modules = len(before & {id(module) for stage in rank.stages.values() for module in stage.modules()})
        if rank.world.rank >= 0:
            losses += [rank.train(iteration[rank.world.place]).loss.item() for iteration in programs]
    weights = collected(rank) if rank.world.rank >= 0 else ((), ())
    return TrainedPrograms(tuple(losses), (), (), *weights), modules


class Failing(Exception):
    """What a test lets an instruction meet."""


def train_abandoning(
    worker: Worker, first: Part, second: Part, settings: TrainingSettings, saved: Path, failing: int, kind: type[Instruction]
) -> tuple[TrainedPrograms, Footprint, Footprint]:
    """Runs all programs of the first part but the last, which fails on one rank half-way: its peers wait for it in vain. All then adopt the
    second plan from a checkpoint of before, and go on. With threads and open files before and after."""
    plan, programs = first
    rank = rank_of(plan, worker.groups, settings, observer=worker.status)
    losses = [rank.train(iteration[rank.world.place]).loss.item() for iteration in programs[:-1]]
    writer = CheckpointWriter(saved, rank=rank.world.place, world_size=len(rank.world.ranks), token="test", limit_s=60)
    writer.save(len(losses), rank_pieces(rank), rank_state(rank))
    writer.wait()
    worker.groups.barrier()
    before = footprint()
    plain, met = rank.executor.handlers[kind], []

    def fail(step: Instruction) -> None:
        met.append(step)
        if worker.rank == failing and len(met) == 2:
            raise Failing("as a test wants it")
        plain(step)

    rank.executor.handlers[kind] = fail
    failed = False
    try:
        rank.train(programs[-1][rank.world.place])
    except ExecutionError:  # left before anything is dropped: it holds what was under way
        failed = True
    assert failed
    rank.executor.handlers[kind] = plain
    plan, programs = second
    adopt_state(rank, plan, checkpoint_state(Checkpoint(saved), rank.model, settings.optimizer.kind))
    losses += [rank.train(iteration[rank.world.place]).loss.item() for iteration in programs]
    worker.groups.barrier()
    left_behind = any(thread.name == DESTROYING for thread in threading.enumerate())  # where gloo misses the end of a connection
    return TrainedPrograms(tuple(losses), (), (), *collected(rank)), before, before if left_behind else footprint()


def train_handing_over(worker: Worker, parts: Sequence[Part], settings: TrainingSettings) -> TrainedPrograms:
    """Like `train_adopting`, but pieces go from memory to memory: everybody gets all of them."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    losses = []
    for number, (plan, programs) in enumerate(parts):
        if number:
            pieces = [(one.name, one.shape, one.box, one.tensor.clone()) for one in rank_pieces(rank)]
            everywhere: list[list[tuple[str, tuple[int, ...], Box, torch.Tensor]]] = [[] for _ in range(worker.size)]
            dist.all_gather_object(everywhere, pieces)
            table = [TensorPiece(*piece) for own in everywhere for piece in own]
            scalars = {one.name.partition("/")[0]: one.shape == () for one in table}
            kinds = tuple(kind for kind in scalars if kind not in (WEIGHTS, BUFFERS))
            adopt_state(rank, plan, TrainedState(PiecesInMemory(table), kinds, frozenset(kind for kind in kinds if scalars[kind])))
        losses += [rank.train(iteration[rank.world.place]).loss.item() for iteration in programs]
    return TrainedPrograms(tuple(losses), (), (), *collected(rank))


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
    loader = ProgramLoader(
        source, planner, rank.world.rank, address=address, job=job, planners=1 if job else 0, starts_planners=False, first_step=first,
        timeout=250,
    )  # fmt: skip
    later, losses, ran = dict(planners[1:]), [], []
    with loader:
        for loaded in loader:
            losses.append(rank.train(loaded.program, loaded).loss.item())
            ran.append((loaded.program.iteration, loaded.program.num_stages))
            if (planner := later.pop(loader.step, None)) is not None:
                adopt_through_checkpoint(rank, planner.plan, loader.step, folder)
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
