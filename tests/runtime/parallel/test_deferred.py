"""A split backward pass gives the gradients of a whole one, and none of the products' before its second half."""

from __future__ import annotations

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
