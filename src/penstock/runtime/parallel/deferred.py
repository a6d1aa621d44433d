"""The second half of a split backward pass: matrix products and convolutions put their weight gradients aside.

    whole backward pass    grad_x = grad · W      grad_W += gradᵀ · x
    split                  grad_x = grad · W      (x, grad) are kept ──────► later: grad_W += gradᵀ · x

Only the products are put aside: the gradients of norms and embeddings cost little and are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.models.modules.fused import add_product

__all__ = ["DeferWeights"]

Owed = Callable[[], Iterable[nn.Parameter]]
"""Adds one product's weight gradients and tells whose they are."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, owed: list[Owed]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.owed = weight, bias, owed
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (x,), (grad,), weight, bias = ctx.saved_tensors, grads, ctx.weight, ctx.bias

        def add() -> Iterable[nn.Parameter]:
            flat = grad.flatten(0, -2)
            add_product(weight.grad, flat.t(), x.flatten(0, -2))
            if bias is None:
                return (weight,)
            bias.grad.add_(flat.sum(0))
            return (weight, bias)

        ctx.owed.append(add)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, stride: int, padding: int, owed: list[Owed]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.owed, ctx.size = weight, bias, owed, (stride, padding)
        return F.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None, None]:
        (x,), (grad,), weight, bias = ctx.saved_tensors, grads, ctx.weight, ctx.bias
        stride, padding = ctx.size

        def part(*wanted: bool) -> Any:
            sizes = None if bias is None else list(bias.shape)
            return torch.ops.aten.convolution_backward(
                grad, x, weight, sizes, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, list(wanted)
            )

        def add() -> Iterable[nn.Parameter]:
            _, for_weight, for_bias = part(False, True, bias is not None)
            weight.grad.add_(for_weight)
            if bias is None:
                return (weight,)
            bias.grad.add_(for_bias)
            return (weight, bias)

        ctx.owed.append(add)
        return (part(True, False, False)[0] if ctx.needs_input_grad[0] else None), None, None, None, None, None


class DeferWeights(TorchFunctionMode):
    """While it is on, products of trained weights owe their weight gradients to `owed` once their backward pass has run."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: list[Owed] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.linear and not given and _trained(args[1]) and torch.is_grad_enabled():
            return _Linear.apply(args[0], args[1], args[2] if len(args) > 2 else None, self.owed)
        if func is F.conv2d and not given and _trained(args[1]) and torch.is_grad_enabled():
            bias, stride, padding = (*args[2:], *(None, 1, 0)[len(args) - 2 :])
            return _Conv.apply(args[0], args[1], bias, stride, padding, self.owed)
        return func(*args, **given)

    @torch.no_grad()
    def pay(self, paid: Callable[[nn.Parameter], None]) -> None:
        """Adds all weight gradients that are owed, last op first, and tells whose."""
        for add in self.owed:
            for parameter in add():
                paid(parameter)
        self.owed.clear()


def _trained(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad
