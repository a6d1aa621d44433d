"""Random plans, and jobs for worker processes that train under one after the other and move between them in mid-run."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from adopting_jobs import Part
from generation_jobs import Footprint, footprint, no_collection
from runtime_cases import DIMENSIONS, Case, Choice, is_possible, make_case
from training_jobs import OpenRank, TrainedPrograms, collected, rank_of

from penstock.adapting.moving import MoveAbortedError, move
from penstock.adapting.overlapping import OverlappedMove
from penstock.errors import PenstockError
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import rank_pieces, rank_state
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.worker import Worker

__all__ = ["Chain", "Failure", "differences", "drawn_chain", "move_to_and_fro", "placed", "train_moving", "train_on", "train_overlapping"]

_USUAL = {"pp": 1, "tp": 1, "dp": 1, "replicas": 1, "zero": 0}


@dataclass(frozen=True)
class Chain:
    """Plans of one model and precision, one after the other, with the programs of the steps under each."""

    name: str
    parts: tuple[Part, ...]


def placed(case: Case, places: Sequence[int], precision: str) -> Case:
    """The case with rank r of its plan on device `places[r]`."""
    stages = tuple(
        replace(stage, devices=tuple(tuple(places[rank] for rank in ranks) for ranks in stage.devices)) for stage in case.plan.stages
    )
    plan = replace(case.plan, stages=stages, precision=precision)
    return replace(case, plan=plan, model=model_of(plan))


def drawn_chain(number: int, length: int, steps: int, seed: int, num_processes: int, given: Choice | None = None) -> Chain:
    """`length` plans of every kind, but for what is `given`, some steps under each, on random devices of the job: a plan may leave some
    out. Family and precision change with every `number`."""
    generator, families = random.Random(f"{seed}/{number}"), DIMENSIONS["family"]
    family, precision = families[number % len(families)], ("fp32", "bf16")[number // len(families) % 2]
    parts, names = [], []
    for at in range(length):
        choice = _drawn(generator, {"family": family} | (given or {}), num_processes)
        case = make_case(choice, generator.randrange(2**30), iterations=(at + 1) * steps)
        case = placed(case, generator.sample(range(num_processes), num_processes), precision)
        parts.append((case.plan, case.programs()[at * steps :]))
        names.append(_brief(choice, case.plan))
    return Chain(f"{number} {family} {precision}: {' to '.join(names)}", tuple(parts))


def _drawn(generator: random.Random, given: Choice, num_processes: int) -> Choice:
    while True:
        choice = {name: generator.choice(values) for name, values in DIMENSIONS.items()} | given
        crowded = choice["degrees"] == "per stage"  # draws as many ranks as eight processes allow
        if is_possible(choice, num_processes) and not crowded:
            return choice


def _brief(choice: Choice, plan: Plan) -> str:
    words = [f"{name} {choice[name]}" for name, usual in _USUAL.items() if choice[name] != usual]
    return f"{', '.join([*words, choice['schedule']])} on {list(plan.ranks)}"


@dataclass(frozen=True)
class Failure:
    """What goes wrong in a move: a process cannot handle the box that comes after some others which it sent or received."""

    process: int
    after: int


def failing(worker: Worker, failure: Failure) -> AbstractContextManager[object]:
    """On the process of the failure it happens; on others nothing."""
    if worker.rank != failure.process:
        return nullcontext()
    handled: list[object] = []

    def piece(*fields: Any) -> TensorPiece:
        handled.append(fields)
        if len(handled) > failure.after:
            raise OSError("as a test wants it")
        return TensorPiece(*fields)

    return mock.patch("penstock.adapting.moving.TensorPiece", piece)


def small_rounds() -> AbstractContextManager[object]:
    """So little in each round of transfers that these small models need many."""
    return mock.patch("penstock.adapting.moving.MAX_MOVE_BYTES", 20_000)


def train_moving(worker: Worker, parts: Sequence[Part], settings: TrainingSettings, save: Path) -> tuple[TrainedPrograms, float]:
    """Runs the programs of each part under its plan, moved to between two steps, and saves what came of it; with the seconds of the last
    move."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    losses, taken_s = [], 0.0
    for plan, programs in parts:
        start = time.monotonic()
        with small_rounds():
            move(rank, plan, programs[0][0].iteration if programs else 0)  # the first time to where it is
        taken_s = time.monotonic() - start
        losses += _steps(rank, (plan, programs))
    return _saved(rank, losses, parts[-1][1][-1][0].iteration + 1, save), taken_s


def train_overlapping(worker: Worker, parts: Sequence[Part], settings: TrainingSettings, save: Path) -> tuple[TrainedPrograms, int]:
    """The same, but each move begins before the last step under the plan that is left; with how many did, the others having blocked."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    losses, count = [], 0
    for number, (plan, programs) in enumerate(parts):
        losses += _steps(rank, (plan, programs[:-1]))
        following = parts[number + 1 :]
        with small_rounds():
            begun = OverlappedMove(rank, following[0][0], following[0][1][0][0].iteration) if following else None
            if begun is not None and not begun.begin(always=True):
                begun = None
            losses += _steps(rank, (plan, programs[-1:]))
            if begun is not None:
                begun.finish()
                count += 1
            elif following:
                move(rank, following[0][0], following[0][1][0][0].iteration)
    return _saved(rank, losses, parts[-1][1][-1][0].iteration + 1, save), count


def train_on(
    worker: Worker, part: Part, other: Plan, settings: TrainingSettings, save: Path, failure: Failure | None
) -> tuple[TrainedPrograms, str, bool]:
    """Runs the programs of a part; before the last a move to another plan is tried, and fails as told, or is not tried at all. With what it
    said, and whether the process groups are still the same."""
    plan, programs = part
    rank = rank_of(plan, worker.groups, settings, observer=worker.status)
    losses, said, generation = _steps(rank, (plan, programs[:-1])), "", worker.groups.generation
    if failure is not None:
        try:
            with failing(worker, failure), small_rounds():
                move(rank, other, programs[-1][0].iteration)
        except PenstockError as error:
            said = f"{type(error).__name__}: {error}"
    losses += _steps(rank, (plan, programs[-1:]))
    return _saved(rank, losses, programs[-1][0].iteration + 1, save), said, worker.groups.generation is generation


def _steps(rank: OpenRank, part: Part) -> list[float]:
    if rank.world.rank < 0:
        return []
    return [rank.train(iteration[rank.world.place]).loss.item() for iteration in part[1]]


def _saved(rank: OpenRank, losses: list[float], step: int, save: Path) -> TrainedPrograms:
    if rank.world.rank < 0:
        return TrainedPrograms(tuple(losses))
    writer = CheckpointWriter(save, rank=rank.world.place, world_size=len(rank.world.ranks), token="test", limit_s=60)
    writer.save(step, rank_pieces(rank), rank_state(rank))
    writer.wait()
    return TrainedPrograms(tuple(losses), (), (), *collected(rank))


def move_to_and_fro(worker: Worker, parts: Sequence[Part], settings: TrainingSettings, rounds: int) -> list[Footprint]:
    """Moves between plans again and again, with a step under each, each time after a move that failed; what the process has after each
    round, the collector being off."""
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    found = []
    with no_collection():
        for _ in range(rounds):
            for plan, programs in (*parts[1:], parts[0]):
                with failing(worker, Failure(1, 3)), small_rounds(), suppress(MoveAbortedError):
                    move(rank, plan, 0)
                move(rank, plan, 0)
                _steps(rank, (plan, programs[:1]))
            rank.groups.barrier()
            found.append(footprint())
    return found


def differences(one: Path, other: Path) -> list[str]:
    """Names of the tensors (weights, masters, moments, step counts, statistics) in which two checkpoints differ by a bit."""
    first, second = Checkpoint(one), Checkpoint(other)
    names = {*first.manifest.tensors, *second.manifest.tensors}
    assert first.state == second.state
    return sorted(
        name
        for name in names
        if not (name in first.manifest.tensors and name in second.manifest.tensors and torch.equal(first.read(name), second.read(name)))
    )
