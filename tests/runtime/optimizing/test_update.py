"""The update: how far weights move, fp16's loss scale, and settings that cannot be."""

from __future__ import annotations

import math

import pytest
import torch
from runtime_cases import Choice, make_case
from torch import nn
from training_jobs import RandomSource, rank_of

from penstock.errors import InputError
from penstock.models.modules import build_chain
from penstock.models.modules.build import TORCH_DTYPES
from penstock.runtime.optimizing.optimizer import make_optimizer
from penstock.runtime.optimizing.update import LossScale
from penstock.runtime.parallel.gradients import Gradients
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.source import load_share
from penstock.runtime.transport.world import ProcessGroups


def test_the_loss_scale_falls_on_overflow_and_rises_after_a_while() -> None:
    scale = LossScale(value=8.0, patience=3)
    rising = [(False, 4.0), (False, 4.0), (False, 8.0), (False, 8.0), (False, 8.0), (False, 16.0)]
    for overflowed, value in ((False, 8.0), (True, 4.0), *rising, (False, 16.0), (True, 8.0)):
        scale.after(overflowed)
        assert scale.value == value
    low, high = LossScale(value=1.0), LossScale(value=2.0**23, patience=1)
    low.after(True)
    assert low.value == 1.0
    for _ in range(3):  # a hundred thousand steps without an overflow do not end in one that is sure
        high.after(False)
    assert high.value == 2.0**24


def test_a_norm_to_clip_to_is_above_zero() -> None:
    with pytest.raises(InputError, match="clip_norm is 0"):
        TrainingSettings(clip_norm=0.0)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_from_one_optimizer_to_another(kind: str, dtype: torch.dtype) -> None:
    settings = OptimizerSettings(kind)  # type: ignore[arg-type]

    def fresh() -> list[nn.Parameter]:
        generator = torch.Generator().manual_seed(0)
        return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (5,), ())]

    def give(weights: list[nn.Parameter], step: int) -> None:
        for number, weight in enumerate(weights):
            weight.grad = torch.full_like(weight, 0.1 * (step + 1) * (number + 1))

    whole, first = fresh(), fresh()
    straight, before = make_optimizer(whole, settings, 0.1), make_optimizer(first, settings, 0.1)
    for step in range(2):
        give(whole, step)
        give(first, step)
        straight.step()
        before.step()
    second = [nn.Parameter(weight.detach().clone()) for weight in first]
    after = make_optimizer(second, settings, 0.1)
    for old, new in zip(first, second, strict=True):
        state = before.state(old)
        assert {value.shape for name, value in state.items() if name != "step"} == {old.shape}
        after.load_state(new, state)
    for step in range(2, 4):
        give(whole, step)
        give(second, step)
        straight.step()
        after.step()
    for mine, its in zip(second, whole, strict=True):
        assert torch.equal(mine, its)


ONE: Choice = {"family": "llama", "pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "gpipe", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 1e-4), ("fp16", 2e-2)])
@pytest.mark.parametrize("clip", [None, 0.05, 1e6])
def test_a_step_is_as_long_as_the_norm_that_is_left(dtype: str, tolerance: float, clip: float | None) -> None:
    """By plain SGD: what weights move by is the rate of the step times the norm, or what it is clipped to; fp16's scale shows nowhere."""
    case = make_case(ONE, 3, iterations=3, precision=dtype)
    rates = LearningRate(0.4, warmup_steps=4)
    settings = TrainingSettings(rates, OptimizerSettings("sgd", weight_decay=0.0, momentum=0.0), clip_norm=clip)
    rank = rank_of(case.plan, ProcessGroups(), settings)
    plain, (program, *_) = build_chain(make_case(ONE, 3, iterations=1).model), case.programs()[0]
    for micro in program.micro_batches:
        bounds, needs = (0, len(micro.samples)), ("inputs", "labels")
        plain(load_share(RandomSource(case.model), program, micro, bounds, needs, torch.device("cpu"), settings.seed))["loss"].backward()
    norms = [torch.stack([parameter.grad.norm() for parameter in plain.parameters() if parameter.grad is not None]).norm().item()]

    def weights() -> torch.Tensor:
        optimizer = rank.update.optimizer
        return torch.cat([optimizer.state(own).get("master", own.detach()).reshape(-1).clone() for own in optimizer.parameters])

    assert {own.dtype for own in rank.update.optimizer.parameters} == {TORCH_DTYPES[dtype]}
    for number, (program, *_) in enumerate(case.programs()):
        before, result = weights(), rank.train(program)
        assert result.norm is not None and not result.skipped
        norms.append(result.norm.item())
        assert result.rate == pytest.approx(0.1 * (number + 1))
        moved = (weights() - before).double().norm().item()
        assert moved == pytest.approx(0.1 * (number + 1) * min(norms[-1], clip or math.inf), rel=tolerance)
    assert norms[1] == pytest.approx(norms[0], rel=tolerance) and norms[0] > 0.05


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_nothing_though_its_gradients_are(loss: float) -> None:
    case = make_case(ONE, 3, iterations=1)
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings(on_nan="skip"))
    for held in rank.stages[0].held:
        assert held.parameter.grad is not None
        held.parameter.grad.fill_(0.5)
    before = [own.detach().clone() for own in rank.update.optimizer.parameters]
    result = rank.update.step(0, torch.tensor(loss), 1)
    assert result.skipped and result.norm is not None and result.norm.isfinite()
    assert all(map(torch.equal, before, rank.update.optimizer.parameters))
    assert not any(held.parameter.grad.any() for held in rank.stages[0].held if held.parameter.grad is not None)


def test_the_loss_scale_falls_with_the_update_that_overflowed_and_with_no_other() -> None:
    """Which moves no weight; and what the last update exchanged is all that is remembered of it."""
    case = make_case(ONE, 3, iterations=1, precision="fp16")
    rank = rank_of(case.plan, ProcessGroups(), TrainingSettings())
    assert rank.update.scale is not None
    values = [rank.update.scale.value]
    for step, gradient in enumerate((1.0, math.inf, 1.0)):
        before = [own.detach().clone() for own in rank.update.optimizer.parameters]
        for held in rank.stages[0].held:
            assert held.parameter.grad is not None
            held.parameter.grad.fill_(gradient)
        result = rank.update.step(step, torch.tensor(1.0), 1)
        values.append(rank.update.scale.value)
        assert result.skipped == math.isinf(gradient) == all(map(torch.equal, before, rank.update.optimizer.parameters))
        assert len(rank.update.exchanges) == (1 if result.skipped else 2)
    assert values == [65536.0, 65536.0, 32768.0, 32768.0]


def test_an_update_is_that_of_all_stages_of_the_rank() -> None:
    """Chunks of an interleaved schedule: the weights of each are handed on, and its gradients forgotten."""

    class Counted(Gradients):
        def __init__(self) -> None:
            self.calls: list[str] = []

        def share_updates(self) -> None:
            self.calls.append("shared")

        def zero(self) -> None:
            self.calls.append("zero")

    rank = rank_of(make_case(ONE, 3, iterations=1).plan, ProcessGroups(), TrainingSettings())
    chunks = [Counted(), Counted(), Counted()]
    rank.update.gradients = chunks
    rank.update.step(0, torch.tensor(1.0), 1)
    assert [own.calls for own in chunks] == [["shared", "zero"]] * 3
    rank.update.step_alone(1)
    assert [own.calls for own in chunks] == [["shared", "zero", "zero"]] * 3


def test_gradients_are_multiplied_in_fp32() -> None:
    """fp16 gradients of a scaled loss would vanish if they were scaled back in fp16."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    weight.grad = torch.full((1,), 1e-3, dtype=torch.float16)
    optimizer = make_optimizer([weight], OptimizerSettings("sgd", weight_decay=0.0), lr=1e6)
    optimizer.step(torch.tensor(2.0**-16))
    assert weight.item() == pytest.approx(-1e6 * 1e-3 / 2**16, rel=1e-2)
