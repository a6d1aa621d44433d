"""What is not finite is found and named, never learned from and never saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from training_jobs import OpenRank, RandomSource, rank_of

from penstock.cli.main import run
from penstock.data.samples import Sample
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import uniform_plan
from penstock.plans.references import model_of
from penstock.plans.schema import write_plan
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.checkpoints.folder import step_of, whole_checkpoints
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.steps.divergence import MAX_DROPPED, DivergedError, DivergenceGuard, describe_divergence, is_diverged
from penstock.runtime.steps.messages import StepMessage
from penstock.runtime.telemetry.steps import StepRecord
from penstock.runtime.transport.world import ProcessGroups
from penstock.schedules.orders import gpipe

PLAN = uniform_plan("resnet-tiny", "1xcpu", global_batch=6, micro_batch=2)


@dataclass(frozen=True)
class HoledSource(RandomSource):
    """Random images, one of which is not a number."""

    hole: int = -1

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """The sample."""
        found = super().sample(iteration, sample, length, dec_length)
        return replace(found, inputs=np.full_like(found.inputs, np.nan)) if sample == self.hole else found


def opened(hole: int = -1, **settings: Any) -> OpenRank:
    model = model_of(PLAN)
    return rank_of(PLAN, ProcessGroups(), TrainingSettings(**settings), HoledSource(model, hole=hole))


def programs() -> Iterator[Program]:
    """One iteration after the other, of three micro-batches of two images."""
    micro = tuple(MicroBatch(number, (2 * number, 2 * number + 1), "padded") for number in range(3))
    for iteration in range(10):
        yield lower(PLAN, model_of(PLAN), [ReplicaWork(micro, tuple(gpipe(1, 3)))], iteration)[0]


def weights_of(rank: OpenRank) -> list[torch.Tensor]:
    return [held.parameter.detach().clone() for held in rank.stages[0].held]


def test_of_many_samples_the_first_are_named_and_the_others_counted() -> None:
    rank = opened(hole=3)
    work = ReplicaWork((MicroBatch(0, tuple(range(20)), "padded"),), tuple(gpipe(1, 1)))
    program = lower(PLAN, model_of(PLAN), [work], 0)[0]
    told = describe_divergence(rank, program, rank.train(program))
    assert f"samples {', '.join(map(str, range(16)))} and 4 more: the loss" in told


@pytest.mark.parametrize("on_nan", ["stop", "skip"])
def test_a_loss_is_traced_to_its_samples(on_nan: str) -> None:
    rank, program = opened(hole=3, on_nan=on_nan), next(programs())
    before = weights_of(rank)
    result = rank.train(program)
    assert is_diverged(result.loss.item(), result.norm.item() if result.norm is not None else None, scaled=False)
    assert describe_divergence(rank, program, result) == "rank 0, stage 0, micro-batch 1, samples 2, 3: the loss of step 0 is nan"
    kept = all(torch.equal(mine, its) for mine, its in zip(weights_of(rank), before, strict=True))
    assert kept == result.skipped == (on_nan == "skip")


@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_are_traced_to_their_ops(clip: float | None) -> None:
    rank, program = opened(clip_norm=clip, on_nan="skip"), next(programs())
    spoiled = rank.stages[0].held[2]
    before = weights_of(rank)
    spoiled.parameter.register_hook(lambda gradient: gradient * math.inf)
    result = rank.train(program)
    told = describe_divergence(rank, program, result)
    assert math.isfinite(result.loss.item()) and told.startswith(f"rank 0, stage 0, ops {spoiled.place.name}: the norm of"), told
    assert result.skipped and all(torch.equal(mine, its) for mine, its in zip(weights_of(rank), before, strict=True))


def test_a_skipped_update_leaves_no_trace() -> None:
    """The next step is that of a run that never met the bad one, at the same rate."""
    met, spared = opened(hole=3, on_nan="skip"), opened()
    first, second, *_ = programs()
    assert met.train(first).skipped
    clean = HoledSource(model_of(PLAN))
    assert not met.train(second, clean).skipped and not spared.train(second, clean).skipped
    assert list(met._statistics())
    for mine, its in zip([*weights_of(met), *met._statistics()], [*weights_of(spared), *spared._statistics()], strict=True):
        assert torch.equal(mine, its)


def test_the_fifth_in_a_row_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.steps.divergence.describe_divergence", lambda *_: "the loss of step 7 is nan")
    done, notes, record = list[Any](), list[str](), StepRecord(6)
    world = SimpleNamespace(barrier=lambda: done.append("met"))
    rank: Any = SimpleNamespace(update=SimpleNamespace(scale=None), world=world)
    saves: Any = SimpleNamespace(wait=lambda: done.append("whole"))
    records: Any = SimpleNamespace(note=notes.append, tell=lambda trained: done.append(trained.record))
    guard = DivergenceGuard(rank, "skip", saves, records)
    check: Any = guard.check
    for loss in [math.nan] * (MAX_DROPPED - 1) + [1.0] + [math.inf] * (MAX_DROPPED - 1):
        check(None, None, loss, 1.0)
    assert len(notes) == 2 * (MAX_DROPPED - 1) and not done
    with pytest.raises(DivergedError, match="It was the 5th in a row"):
        check(None, None, 1.0, math.nan)
    assert done == ["whole", "met"]
    guard._dropped = MAX_DROPPED - 1
    with pytest.raises(DivergedError):
        check(None, None, math.nan, None, [StepMessage(record=record)])
    assert done[2:] == [record, "whole", "met"]  # a step before it in the same program is told
    guard._dropped, rank.update.scale = 0, object()
    check(None, None, 1.0, math.inf)  # fp16: the loss scale sees to it
    assert guard._dropped == 0


def test_a_run_that_diverges_keeps_what_was_good(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=4, layout="packed"))
    given = ["--data", data, "--steps", "6", "--out", str(tmp_path / "run"), "--lr", "1e20", "--checkpoint-every", "1", "--planners", "0"]
    assert run(["train", str(tmp_path / "plan.json"), *given]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "error: rank 0, stage 0, micro-batch 0, samples " in told and "is nan. Nothing" in told
    good = whole_checkpoints(tmp_path / "run" / "checkpoints")
    assert f"Step {step_of(good[-1])} is safe. Go on with:" in told
    for saved in good:
        checkpoint = Checkpoint(saved)
        assert all(torch.isfinite(checkpoint.read(name)).all() for name in checkpoint.manifest.tensors)
