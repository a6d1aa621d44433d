"""AdamW with fp32 masters: the numbers of torch's own, whatever the pieces, and no memory beyond one piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from live_bytes import Made
from oracles.optimizers import torch_optimizer
from torch import nn

from penstock.costs.memory import OPTIMIZER_CHUNK
from penstock.runtime.optimizing.optimizer import MasterAdamW, _Masters, make_adamw, make_optimizer, squared_norms
from penstock.runtime.optimizing.update_rules import update_rule
from penstock.runtime.settings import OptimizerSettings

SHAPES = ((7, 5), (13,), (1,), (4, 3, 2), (64, 9))
COUNT = sum(torch.Size(shape).numel() for shape in SHAPES)


def weights(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def give_gradients(parameters: Sequence[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.copy_(gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chunk", [1, 7, 100, COUNT, OPTIMIZER_CHUNK])
def test_equals_torch_on_fp32_copies(chunk: int, dtype: torch.dtype) -> None:
    mine = weights(dtype)
    copies = [nn.Parameter(parameter.detach().float()) for parameter in mine]
    optimizer = MasterAdamW(mine, lr=1e-2, weight_decay=0.1, chunk=chunk)
    reference = torch.optim.AdamW(copies, lr=1e-2, weight_decay=0.1)
    for step in range(6):
        give_gradients(mine, step)
        for copy, parameter in zip(copies, mine, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
        for copy, parameter in zip(copies, mine, strict=True):
            assert parameter.dtype == dtype
            torch.testing.assert_close(parameter.detach(), copy.detach().to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_pieces_of_any_size_give_the_same_weights() -> None:
    results = []
    for chunk in (3, 64, COUNT - 1, COUNT, COUNT + 1, OPTIMIZER_CHUNK):
        mine = weights()
        optimizer = MasterAdamW(mine, lr=3e-3, weight_decay=0.01, chunk=chunk)
        for step in range(4):
            give_gradients(mine, step)
            optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in mine]))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=torch.finfo(torch.bfloat16).eps * 4)


def test_small_updates_are_not_lost_to_rounding() -> None:
    parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([parameter], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert parameter[0].item() == pytest.approx(0.99, abs=0.004)  # one step alone is below the resolution of bf16


def test_gradients_stay_allocated() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        mine = weights(dtype)
        optimizer = make_adamw(mine)
        give_gradients(mine, 0)
        where = [parameter.grad.data_ptr() for parameter in mine if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        assert [parameter.grad.data_ptr() for parameter in mine if parameter.grad is not None] == where
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in mine)


def test_a_missing_gradient_is_told() -> None:
    mine = weights()
    optimizer = make_adamw(mine)
    give_gradients(mine, 0)
    mine[3].grad = None
    with pytest.raises(RuntimeError, match=r"shape \(4, 3, 2\) has no gradient"):
        optimizer.step()


def test_frozen_weights_are_left_alone() -> None:
    mine = weights()
    mine[1].requires_grad_(False)
    before = mine[1].detach().clone()
    optimizer = make_adamw(mine, lr=0.1)
    give_gradients([parameter for parameter in mine if parameter.requires_grad], 0)
    optimizer.step()
    assert torch.equal(mine[1].detach(), before) and not torch.equal(mine[0].detach(), weights()[0].detach())


def test_half_precision_gets_masters_and_fp32_does_not() -> None:
    assert isinstance(make_adamw(weights()), MasterAdamW) and not isinstance(make_adamw(weights(torch.float32)), MasterAdamW)


class Peak(Made):
    """The most that storages made while it is on hold at any moment."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.alive_bytes())
        return result


@pytest.mark.parametrize("chunk", [1000, 5000])
def test_a_step_takes_no_more_than_one_piece(chunk: int) -> None:
    mine = [nn.Parameter(torch.randn(70, 100).bfloat16()) for _ in range(6)]
    optimizer = MasterAdamW(mine, lr=1e-3, weight_decay=0.01, chunk=chunk)
    give_gradients(mine, 0)
    optimizer.step()  # Makes the moments.
    with Peak() as made:
        optimizer.step()
        optimizer.zero_grad()
    assert 4 * chunk <= made.peak <= 4 * chunk + 1024
    assert made.alive_bytes() <= 1024


def test_state_is_twelve_bytes_for_each_weight() -> None:
    mine = [nn.Parameter(torch.randn(70, 100).bfloat16()) for _ in range(3)]
    with Made() as made:
        optimizer = MasterAdamW(mine, lr=1e-3, weight_decay=0.01, chunk=8000)
        give_gradients(mine, 0)
        gradients = sum(parameter.grad.nbytes for parameter in mine if parameter.grad is not None)
        optimizer.step()
    assert made.alive_bytes() - gradients == pytest.approx(12 * 21000, abs=1024)


@pytest.mark.parametrize("kind", ["adamw", "lamb", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rules_without_decay_of_vectors(kind: str, dtype: torch.dtype) -> None:
    """Of some weights, in pieces that begin inside of others: as whole tensors in two groups."""
    settings = OptimizerSettings(kind, 0.4, (0.8, 0.95), 1e-2, no_decay=("vectors",))  # type: ignore[arg-type]
    mine = weights(dtype)
    copies = [nn.Parameter(parameter.detach().float().clone()) for parameter in mine]  # `float` alone gives fp32 weights themselves
    optimizer = make_optimizer(mine, settings, 1e-2, undecayed={id(one) for one in mine if one.dim() <= 1})
    reference = torch_optimizer(settings, copies, 1e-2)
    for step in range(4):
        give_gradients(mine, step)
        for copy, parameter in zip(copies, mine, strict=True):
            assert parameter.grad is not None
            copy.grad = parameter.grad.float() * 0.5
        if kind == "lamb":
            weight, way = optimizer.advance(torch.tensor(0.5)).sqrt().unbind(1)
            optimizer.move((weight / way).float())
        else:
            optimizer.step(torch.tensor(0.5))
        reference.step()
    for copy, parameter in zip(copies, mine, strict=True):
        torch.testing.assert_close(parameter.detach(), copy.detach().to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert {"exp_avg", "exp_avg_sq", "step"} <= set(optimizer.state(parameter)) or kind == "sgd"


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_of_some_weights_leaves_the_others(kind: str, dtype: torch.dtype) -> None:
    """Their gradients too: they may still be needed."""
    settings = OptimizerSettings(kind, no_decay=("vectors",))  # type: ignore[arg-type]
    mine, whole = weights(dtype), weights(dtype)
    optimizers = [
        make_optimizer(
            own, settings, 1e-2, {id(one): number // 2 for number, one in enumerate(own)}, {id(one) for one in own if one.dim() <= 1}
        )
        for own in (mine, whole)
    ]
    for own in (mine, whole):
        give_gradients(own, 0)
    gradients = [parameter.grad.clone() for parameter in mine if parameter.grad is not None]
    optimizers[0].step(torch.tensor(0.5), only=mine[:2])
    optimizers[1].step(torch.tensor(0.5))
    assert all(map(torch.equal, mine, [*whole[:2], *weights(dtype)[2:]])) and not torch.equal(mine[0], weights(dtype)[0])
    assert all(
        parameter.grad is not None and torch.equal(parameter.grad, given) for parameter, given in zip(mine[2:], gradients[2:], strict=True)
    )


@pytest.mark.parametrize("chunk", [1, 100])
def test_lamb_of_weights_that_are_larger_than_a_piece(chunk: int) -> None:
    """One ratio for all of a weight, wherever it is cut."""
    settings = OptimizerSettings("lamb", 0.4)
    cut, whole = weights(), weights()
    both = _Masters(cut, lambda own: update_rule(settings, own, 1e-2), chunk), make_optimizer(whole, settings, 1e-2)
    for step in range(3):
        for own, optimizer in zip((cut, whole), both, strict=True):
            give_gradients(own, step)
            weight, way = optimizer.advance(None).sqrt().unbind(1)
            optimizer.move((weight / way).float())
    for mine, its in zip(cut, whole, strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_are_added_up_in_fp32(dtype: torch.dtype) -> None:
    """Of fp16 gradients whose norm fp16 does not hold, and of many small ones whose digits bf16 does not."""
    values = torch.cat([torch.full((4,), 6e4), torch.full((1001,), 3.0)]).to(dtype)
    assert squared_norms([values]).item() == pytest.approx(values.double().square().sum().item(), rel=1e-6)


def test_what_decays_is_told_by_dimensions_and_names() -> None:
    settings = OptimizerSettings(no_decay=("vectors", "embedding"))
    named = (("qkv.weight", 2), ("qkv.bias", 1), ("embedding.tokens", 2))
    assert [settings.decays(name, dims) for name, dims in named] == [True, False, False]
    assert OptimizerSettings().decays("qkv.bias", 1)
