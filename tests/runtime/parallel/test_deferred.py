"""A split backward pass gives the gradients of a whole one, and none of the products' before its second half."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.runtime.parallel.deferred import DeferWeights


def gradients(split: bool, make: str, with_bias: bool) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """(after the first half, of the input, after the second)."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        parameter.grad = torch.ones_like(parameter)  # gradients add up
        return parameter

    if make == "linear":
        weights = [weight(5, 4), *([weight(5)] if with_bias else [])]
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    else:
        weights = [weight(5, 4, 3, 3), *([weight(5)] if with_bias else [])]
        x = torch.randn(2, 4, 7, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    norm = weight(5)
    mode = DeferWeights()
    bias = weights[1] if with_bias else None

    def forward() -> torch.Tensor:
        y = F.linear(x, weights[0], bias) if make == "linear" else F.conv2d(x, weights[0], bias, 2, 1).flatten(2).mean(-1)
        return (y * norm).square().sum()

    if split:
        with mode:
            loss = forward()
    else:
        loss = forward()
    loss.backward()
    first = [parameter.grad.clone() for parameter in (*weights, norm)]  # type: ignore[union-attr]
    paid: list[nn.Parameter] = []
    mode.pay(paid.append)
    assert [id(parameter) for parameter in paid] == ([id(parameter) for parameter in weights] if split else [])
    assert not mode.owed and x.grad is not None
    return first, x.grad, [parameter.grad for parameter in (*weights, norm)]  # type: ignore[misc]


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("make", ["linear", "conv"])
def test_two_halves_make_a_whole(make: str, with_bias: bool) -> None:
    _, whole_input, whole = gradients(False, make, with_bias)
    first, split_input, split = gradients(True, make, with_bias)
    torch.testing.assert_close(split_input, whole_input)
    for mine, its in zip(split, whole, strict=True):
        torch.testing.assert_close(mine, its)
    *products, norm = first
    assert all(torch.equal(gradient, torch.ones_like(gradient)) for gradient in products)
    assert torch.equal(norm, whole[-1])


def test_frozen_weights_and_no_grad_are_left_alone() -> None:
    frozen, x = nn.Parameter(torch.randn(3, 3), requires_grad=False), torch.randn(2, 3, requires_grad=True)
    mode = DeferWeights()
    with mode:
        F.linear(x, frozen).sum().backward()
        with torch.no_grad():
            F.linear(x, nn.Parameter(torch.randn(3, 3)))
    assert not mode.owed and x.grad is not None


class Products(nn.Module):
    """Parts that `run` calls as it likes."""

    def __init__(self, run: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.run, self.parts = run, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x, *self.parts)


def frozen(part: nn.Module, name: str) -> nn.Module:
    part.get_parameter(name).requires_grad_(False)
    return part


def each(x: torch.Tensor, *parts: nn.Module) -> torch.Tensor:
    for part in parts:
        x = part(x)
    return x


def first_row(x: torch.Tensor, part: nn.Module) -> torch.Tensor:
    return part(x[0])  # type: ignore[no-any-return]


def summed_in_place(x: torch.Tensor, *parts: nn.Module) -> torch.Tensor:
    x = x[:, None].expand(-1, 2, -1)  # rows of rows: torch multiplies them as one matrix
    for part in parts:
        y = part(x)
        y += x
        x = y
    return x


def made_bias(x: torch.Tensor, part: nn.Linear) -> torch.Tensor:
    return F.linear(x, part.weight, part.bias * 2.0)


MODULES: dict[str, Callable[[], Products]] = {
    "linear, frozen bias": lambda: Products(each, frozen(nn.Linear(4, 4), "bias"), nn.Linear(4, 4)),
    "linear, frozen weight": lambda: Products(each, nn.Linear(4, 4), frozen(nn.Linear(4, 4), "weight")),
    "linear, one row": lambda: Products(first_row, nn.Linear(4, 4)),
    "linear, bias made of weights": lambda: Products(made_bias, nn.Linear(4, 4)),
    "linear, summed in place": lambda: Products(summed_in_place, nn.Linear(4, 4), nn.Linear(4, 4)),
    "linear, again and again": lambda: Products(lambda x, a, b: a(b(a(b(x)))), nn.Linear(4, 4), nn.Linear(4, 4)),
    "conv, again and again": lambda: Products(lambda x, a, b: a(b(a(x))), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1)),
    "conv, frozen bias": lambda: Products(each, frozen(nn.Conv2d(4, 4, 3), "bias")),
    "conv, frozen weight": lambda: Products(each, frozen(nn.Conv2d(4, 4, 3), "weight")),
    "conv, every size": lambda: Products(each, nn.Conv2d(4, 4, (3, 2), (2, 1), (1, 0), (2, 1), groups=2)),
    "conv, padding by a word": lambda: Products(each, nn.Conv2d(4, 4, 3, padding="same")),
    "conv, one image": lambda: Products(first_row, nn.Conv2d(4, 4, 3)),
}


@pytest.mark.parametrize("name", MODULES)
def test_products_of_any_module_train_as_they_do_whole(name: str) -> None:
    torch.manual_seed(0)
    plain = MODULES[name]().double()
    split, mode = deepcopy(plain), DeferWeights()
    x = torch.randn((3, 4, 7, 7) if "conv" in name else (3, 4), dtype=torch.float64)
    plain(x).square().sum().backward()
    trained = {one: its.grad for one, its in zip(split.parameters(), plain.parameters(), strict=True) if one.requires_grad}
    for one in trained:
        one.grad = torch.zeros_like(one)
    with mode:
        loss = split(x).square().sum()
    loss.backward()
    told: list[nn.Parameter] = []

    def paid(one: nn.Parameter) -> None:
        torch.testing.assert_close(one.grad, trained[one])  # whoever is told may send it at once
        told.append(one)

    mode.pay(paid)
    assert len({id(one) for one in told}) == len(told)
    for one, gradient in trained.items():
        torch.testing.assert_close(one.grad, gradient)


def test_a_gradient_with_a_hook_does_not_wait() -> None:
    """Whoever freezes some rows of a weight by a hook is asked for its gradient, and not for none."""
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        net = nn.Linear(4, 5)
        net.weight.register_hook(lambda gradient: gradient * 0.25)
        mode = DeferWeights()
        with mode if split else nullcontext():
            loss = net(torch.ones(3, 4)).square().sum()
        loss.backward()
        mode.pay(lambda _: None)
        found.append([p.grad for p in net.parameters()])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)
