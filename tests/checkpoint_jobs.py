"""Jobs for worker processes: train a while and save, or load and go on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from training_jobs import TrainedPrograms, collected, open_rank

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import load_rank, rank_pieces, rank_state
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.worker import Worker

__all__ = ["train_part"]


def train_part(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings, load: Path | None, save: Path | None
) -> TrainedPrograms:
    """Goes on from a checkpoint, if one is given; saves one at the end, if asked to."""
    rank = open_rank(worker, plan, settings)
    if rank is None:
        return TrainedPrograms()
    if load is not None:
        for parameter in (held.parameter for own in rank.gradients.values() for held in own.kept()):
            parameter.detach().fill_(7.0)  # what is not loaded is seen
        load_rank(Checkpoint(load), rank)
    place = rank.world.place
    losses = [rank.train(iteration[place]).loss.item() for iteration in programs]
    if save is not None:
        writer = CheckpointWriter(save, rank=place, world_size=len(rank.world.ranks), token="test", limit_s=60)
        writer.save(programs[-1][place].iteration + 1, rank_pieces(rank), rank_state(rank))
        writer.wait()
    return TrainedPrograms(tuple(losses), (), (), *collected(rank))
