"""Checkpoint under plan A, resume under plan B: the same curve and the same weights as without the break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoint_jobs import train_part
from runtime_cases import Case, Choice, largest_difference, make_case, reference
from training_jobs import OpenRank, rank_of

from penstock.errors import InputError
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.optimizing.update import LossScale
from penstock.runtime.rank_state import adopt_state, checkpoint_state, load_rank, rank_pieces, rank_state
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.transport.world import ProcessGroups
from penstock.runtime.workers import WorkerError, WorkerPool

BREAK = 2
TOLERANCE = 1e-5
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
SGD = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"), clip_norm=1.0)
FIRST: Choice = {"family": "gpt", "pp": 2, "tp": 2, "dp": 1, "replicas": 2, "schedule": "1f1b", "layout": "packed", "recompute": "none",
                 "cuts": "uneven", "degrees": "equal", "zero": 1, "sequence_parallel": False}  # fmt: skip
ONE = FIRST | {"pp": 1, "tp": 1, "replicas": 1, "zero": 0}
CASES: dict[str, tuple[Choice, Choice, TrainingSettings]] = {
    "gpt, tied on two stages, ZeRO, to tp and dp": (FIRST, FIRST | {"pp": 1, "tp": 2, "dp": 2, "replicas": 1, "zero": 0}, ADAMW),
    "gpt to one process": (FIRST, ONE, ADAMW),
    "one process to four stages": (ONE | {"family": "llama"}, FIRST | {"family": "llama", "pp": 4, "tp": 1, "replicas": 2}, ADAMW),
    "t5, degrees of each op, to interleaved chunks": (
        FIRST | {"family": "t5", "layout": "padded", "degrees": "per op", "replicas": 1, "dp": 2, "zero": 0},
        FIRST | {"family": "t5", "layout": "padded", "schedule": "interleaved", "tp": 1, "dp": 2, "replicas": 1}, SGD),
    "bert, zero-bubble, to degrees of each stage": (
        FIRST | {"family": "bert", "schedule": "zero-bubble"}, FIRST | {"family": "bert", "degrees": "per stage", "pp": 3, "replicas": 1,
                                                                       "zero": 0}, SGD),
    "gpt, ZeRO-3 and tp, to two stages": (FIRST | {"pp": 1, "zero": 3}, FIRST | {"tp": 1, "zero": 0}, ADAMW),
    "t5, two stages, to ZeRO-3": (
        FIRST | {"family": "t5", "layout": "padded", "tp": 1}, FIRST | {"family": "t5", "layout": "padded", "pp": 1, "zero": 3}, SGD),
    "llama, ZeRO-2, to ZeRO-3 of another dp": (
        FIRST | {"family": "llama", "pp": 1, "tp": 1, "zero": 2}, FIRST | {"family": "llama", "pp": 1, "dp": 2, "tp": 1, "zero": 3}, ADAMW),
    "resnet with its statistics": (
        FIRST | {"family": "resnet", "layout": "padded", "replicas": 1, "dp": 2},
        FIRST | {"family": "resnet", "layout": "padded", "pp": 3, "tp": 1, "replicas": 1, "dp": 2, "zero": 0}, SGD),
}  # fmt: skip


@dataclass(frozen=True)
class Broken(Case):
    """Iterations of one plan, then those of another."""

    before: Case | None = None

    def programs(self) -> list[tuple[Program, ...]]:
        assert self.before is not None
        return [*self.before.programs()[:BREAK], *super().programs()[BREAK:]]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_s=250) as workers:
        yield workers


@pytest.mark.parametrize("name", CASES)
def test_the_same_curve_as_without_the_break(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    first, second, settings = CASES[name]
    one, other = make_case(first, 3, iterations=BREAK + 1), make_case(second, 4, iterations=BREAK + 1)
    before = pool.run(train_part, one.plan, one.programs()[:BREAK], settings, None, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    checkpoint.verify()
    assert checkpoint.step == BREAK and checkpoint.state["optimizer"] == settings.optimizer.kind
    after = pool.run(train_part, other.plan, other.programs()[BREAK:], settings, tmp_path, None)
    whole = Broken(other.plan, other.model, other.works, one)
    losses, weights = reference(whole, settings)
    found = [*before[0].losses, *after[0].losses]
    assert found == pytest.approx(losses, rel=TOLERANCE)
    working = [outcome for outcome in after if outcome.losses]
    assert largest_difference(other, working, weights)[0] <= TOLERANCE
    if one.plan.num_replicas == 2:  # those that hold the same share the writing
        sizes = [(checkpoint.path / f"rank-{process:05}.safetensors").stat().st_size for process in range(len(one.plan.ranks))]
        per_stage = len(sizes) // one.plan.num_stages
        assert all(
            min(sizes[start : start + per_stage]) > 0.2 * max(sizes[start : start + per_stage]) for start in range(0, len(sizes), per_stage)
        )
    if "resnet" in name:
        assert any(kind == "buffers" for kind in checkpoint.kinds)


def alone(case: Case, settings: TrainingSettings = SGD) -> OpenRank:
    """The only rank of a plan, in this process."""
    return rank_of(case.plan, ProcessGroups(), settings, model=case.model)


def save_alone(rank: OpenRank, folder: Path, step: int) -> None:
    writer = CheckpointWriter(folder, rank=0, world_size=1, token="test", limit_s=60)
    writer.save(step, rank_pieces(rank), rank_state(rank))
    writer.wait()


def statistics_of(rank: OpenRank) -> dict[str, torch.Tensor]:
    modules = [module for stage in rank.stages.values() for module in stage.modules()]
    return {f"{module.name}.{name}": buffer.clone() for module in modules for name, buffer in module.named_buffers()}


def test_running_statistics_come_back(tmp_path: Path) -> None:
    """They move no loss of training, only evaluation reads them: they are compared themselves."""
    case = make_case(ONE | {"family": "resnet", "layout": "padded"}, 3, iterations=2)
    before, after = alone(case), alone(case)
    for (program,) in case.programs():
        before.train(program)
    save_alone(before, tmp_path, 2)
    fresh = statistics_of(after)
    load_rank(Checkpoint(tmp_path), after)
    saved, loaded = statistics_of(before), statistics_of(after)
    assert loaded.keys() == saved.keys() and len(saved) > 10
    for name, values in saved.items():
        assert torch.equal(loaded[name], values) and not torch.equal(values, fresh[name]), name


def test_the_loss_scale_comes_back(tmp_path: Path) -> None:
    """A run that has found its scale goes on with it, and with the steps it has counted towards a larger one."""
    case = make_case(ONE, 3, iterations=1, precision="fp16")
    before, after = alone(case), alone(case)
    found = LossScale(value=128.0, good_steps=17)
    before.update.scale = found
    save_alone(before, tmp_path, 1)
    assert after.update.scale == LossScale() != found
    load_rank(Checkpoint(tmp_path), after)
    assert after.update.scale == found


@pytest.mark.parametrize(("precision", "other"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_other_precisions(precision: str, other: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Masters travel in fp32: after going to and fro in one precision everything is exactly as it was."""
    one, two = (make_case(ONE, 3, iterations=BREAK + 1, precision=dtype) for dtype in (precision, other))
    unbroken = pool.run(train_part, one.plan, one.programs(), ADAMW, None, None)[0]
    before = pool.run(train_part, one.plan, one.programs()[:BREAK], ADAMW, None, tmp_path)[0]
    after = pool.run(train_part, two.plan, two.programs()[BREAK:], ADAMW, tmp_path, None)[0]
    assert Checkpoint(tmp_path).manifest.tensors["weights/layers.0.qkv.weight"].dtype == "F32"
    if precision == other:
        assert (*before.losses, *after.losses) == unbroken.losses
    assert (*before.losses, *after.losses) == pytest.approx(unbroken.losses, rel=2e-2)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    case = make_case(ONE, 3, iterations=2)
    with WorkerPool(1, timeout_s=250) as pool:
        pool.run(train_part, case.plan, case.programs()[:1], ADAMW, None, tmp_path)
        with pytest.raises(WorkerError, match=r"has the optimizer state of adamw, but sgd is asked for\. Train with adamw"):
            pool.run(train_part, case.plan, case.programs()[1:], SGD, tmp_path, None)


def test_what_another_precision_or_model_has_learned_is_not_gone_on_with(tmp_path: Path) -> None:
    rank = rank_of(make_case(ONE, 3).plan, ProcessGroups(), ADAMW)
    before = rank.plan
    writer = CheckpointWriter(tmp_path)
    writer.save(1, rank_pieces(rank), rank_state(rank))
    writer.wait()
    state = checkpoint_state(Checkpoint(tmp_path), rank.model, "adamw")
    for case in (make_case(ONE, 3, precision="bf16"), make_case(ONE | {"family": "llama"}, 3)):
        with pytest.raises(InputError, match="Use plans of one model and precision"):
            adopt_state(rank, case.plan, state)
    assert rank.plan is before
