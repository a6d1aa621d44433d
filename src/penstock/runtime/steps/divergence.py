"""A loss or gradients that are not finite: which samples or weights they come from, and whether their update is dropped or ends the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from penstock.errors import PenstockError, first_of
from penstock.plans.ranks import seats_of
from penstock.runtime.steps.messages import StepMessage, whole_digest
from penstock.runtime.steps.records import RunRecords, TrainedStep

if TYPE_CHECKING:
    from penstock.programs.instructions import Program
    from penstock.runtime.optimizing.update import StepResult
    from penstock.runtime.rank import Rank
    from penstock.runtime.recovering.saving import RunSaves

__all__ = ["MAX_DROPPED", "DivergedError", "DivergenceGuard", "describe_divergence", "is_diverged"]

MAX_DROPPED = 5
"""A run ends after so many updates in a row that were dropped: they are no accident."""
_MAX_SAMPLES, _MAX_NAMED = 16, 4


class DivergedError(PenstockError):
    """Training cannot go on: its numbers are no longer finite."""


class DivergenceGuard:
    """Ends a run, on all ranks, before anything of a step that is not finite is saved; or counts the updates that are dropped instead."""

    def __init__(self, rank: Rank, on_nan: str, saves: RunSaves, records: RunRecords) -> None:
        self._rank, self._on_nan, self._saves, self._records = rank, on_nan, saves, records
        self._dropped = 0
        """Updates in a row that were dropped."""

    def check(
        self, program: Program, result: StepResult, loss: float, norm: float | None, before: Sequence[StepMessage] = ()
    ) -> None:  # fmt: skip
        """Raises `DivergedError` unless the step is finite, or dropped. Steps `before` it in the same program are still told."""
        if not is_diverged(loss, norm, scaled=self._rank.update.scale is not None):
            self._dropped = 0
            return
        self._dropped += 1
        what = describe_divergence(self._rank, program, result, len(before))
        if self._on_nan == "skip" and self._dropped < MAX_DROPPED:
            self._records.note(f"{what}. Its update was dropped.")
            return
        for message in before:
            if message.record is not None:
                self._records.tell(TrainedStep(message.record, whole_digest([message])))
        self._saves.wait()
        self._rank.world.barrier()  # the first rank to fail ends the others, rank 0 included, which completes the checkpoint before
        advice = f"It was the {MAX_DROPPED}th in a row" if self._dropped > 1 else "--on-nan skip would drop such updates"
        raise DivergedError(f"{what}. Nothing of this step was saved. {advice}; look at the samples, or lower --lr.")


def is_diverged(loss: float, norm: float | None, *, scaled: bool) -> bool:
    """Whether an update is not to be kept. `scaled`: gradients of a scaled loss may overflow, for which the scale has its own cure."""
    return not math.isfinite(loss) or (norm is not None and not scaled and not math.isfinite(norm))


def describe_divergence(rank: Rank, program: Program, result: StepResult, number: int = 0) -> str:
    """What is not finite in iteration `number` of a program, and where: rank, stage, micro-batch and samples of a loss; ranks, stages and
    ops of gradients.

    All ranks call it, and all get the same.
    """
    step = program.iteration + number
    stages = {number: ", ".join(str(seat.stage) for seat in seats) for number, seats in seats_of(rank.plan).items()}
    named = []
    for number, (stage, micro_batch, count, *ids) in zip(rank.world.ranks, _bad_losses(rank, program, step), strict=True):
        if count:
            more = f" and {count - len(ids)} more" if count > len(ids) else ""
            samples = ", ".join(str(one) for one in ids[:count])
            named.append(f"rank {number}, stage {stage}, micro-batch {micro_batch}, samples {samples}{more}")
    if named:
        return f"{first_of(named, _MAX_NAMED, '; ')}: the loss of step {step} is {result.loss.item()}"
    for number, row in zip(rank.world.ranks, result.shares.cpu(), strict=True):
        ops = [rank.model.ops[int(place)].name for place in torch.nonzero(~torch.isfinite(row[:-2])).flatten()]
        if ops:
            named.append(f"rank {number}, stage {stages[number]}, ops {first_of(ops, _MAX_NAMED)}")
    norm = math.nan if result.norm is None else result.norm.item()
    return f"{first_of(named, _MAX_NAMED, '; ')}: the norm of the gradients of step {step} is {norm:g}, its loss {result.loss.item():g}"


def _bad_losses(rank: Rank, program: Program, iteration: int) -> list[list[int]]:
    """Of every rank: stage, number, size and first samples of its first micro-batch whose loss is not finite; zeros if it has none."""
    row = [0] * (3 + _MAX_SAMPLES)
    for stage, number, loss in rank.losses:
        if program.iteration_of(number) == iteration and not math.isfinite(loss.item()):
            samples = program.micro_batches[number].samples
            first = list(samples[:_MAX_SAMPLES])
            row = [stage, number, len(samples), *first, *[0] * (_MAX_SAMPLES - len(first))]
            break
    found: list[list[int]] = rank.world.gather(torch.tensor(row, device=rank.world.device)).tolist()
    return found
