"""The second half of a split backward pass: matrix products and convolutions put their weight gradients aside.

    whole backward pass    grad_x = grad · W      grad_W += gradᵀ · x
    split                  grad_x = grad · W      (x, grad) are kept ──────► later: grad_W += gradᵀ · x

Only the products are put aside: the gradients of norms and embeddings cost little and are made at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.models.modules.fused import add_product

__all__ = ["DeferWeights"]


class _Owed(NamedTuple):
    """The weight gradients of one product."""

    whose: tuple[nn.Parameter, ...]
    add: Callable[[], None]


class _Linear(torch.autograd.Function):
    """A matrix product whose backward pass gives the gradient of its input, and leaves those of its weights in `owed`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, owed: list[_Owed]) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.owed = weight, bias, owed
        out = F.linear(x, weight, bias)
        # Of more than two dimensions it is a view of a flat product, which nobody could go on with in place; this one is no view.
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (x,), (grad,), weight, bias = ctx.saved_tensors, grads, ctx.weight, ctx.bias

        def add() -> None:
            flat = grad.reshape(-1, grad.shape[-1])
            add_product(weight.grad, flat.t(), x.reshape(-1, x.shape[-1]))
            if _trained(bias):
                bias.grad.add_(flat.sum(0))

        ctx.owed.append(_Owed(tuple(filter(_trained, (weight, bias))), add))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


class _Conv(torch.autograd.Function):
    """A convolution whose backward pass gives the gradient of its input, and leaves those of its weights in `owed`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, shape: tuple[Any, ...], owed: list[_Owed]
    ) -> torch.Tensor:
        """`shape`: stride, padding, dilation and groups."""
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.owed, ctx.shape = weight, bias, owed, shape
        return F.conv2d(x, weight, bias, *shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        (x,), (grad,), weight, bias = ctx.saved_tensors, grads, ctx.weight, ctx.bias
        *sizes, groups = ctx.shape
        stride, padding, dilation = ([size] * 2 if isinstance(size, int) else list(size) for size in sizes)

        def part(*wanted: bool) -> Any:
            length = None if bias is None else list(bias.shape)
            return torch.ops.aten.convolution_backward(
                grad, x, weight, length, stride, padding, dilation, False, [0, 0], groups, list(wanted)
            )

        def add() -> None:
            _, for_weight, for_bias = part(False, True, _trained(bias))
            weight.grad.add_(for_weight)
            if _trained(bias):
                bias.grad.add_(for_bias)

        ctx.owed.append(_Owed(tuple(filter(_trained, (weight, bias))), add))
        return (part(True, False, False)[0] if ctx.needs_input_grad[0] else None), None, None, None, None


_USUAL: dict[Any, tuple[Any, ...]] = {F.linear: (None,) * 3, F.conv2d: (None, None, None, 1, 0, 1, 1)}
"""What products are given where nobody says otherwise: input, weight and bias; of convolutions stride, padding, dilation and groups."""


class DeferWeights(TorchFunctionMode):
    """While it is on, products of trained weights owe their weight gradients to `owed` once their backward pass has run."""

    def __init__(self) -> None:
        super().__init__()
        self.owed: list[_Owed] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func not in _USUAL or given or not torch.is_grad_enabled():
            return func(*args, **given)
        x, weight, bias, *shape = (*args, *_USUAL[func][len(args) :])
        if not _trained(weight) or _is_made(bias) or _is_hooked(weight) or _is_hooked(bias):
            return func(*args)
        if func is F.linear:
            return _Linear.apply(x, weight, bias, self.owed)
        if x.dim() < 4 or isinstance(shape[1], str):  # one image by itself, padding by a word: too rare to be put aside
            return func(*args)
        return _Conv.apply(x, weight, bias, tuple(shape), self.owed)

    @torch.no_grad()
    def pay(self, paid: Callable[[nn.Parameter], None]) -> None:
        """Adds all weight gradients that are owed, last op first; `paid` is told each weight after the last of its products."""
        last = {id(parameter): number for number, owed in enumerate(self.owed) for parameter in owed.whose}
        for number, owed in enumerate(self.owed):
            owed.add()
            for parameter in owed.whose:
                if last[id(parameter)] == number:
                    paid(parameter)
        self.owed.clear()


def _trained(weight: Any) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad


def _is_made(bias: Any) -> bool:
    """Whether a bias is made of trained weights: its gradient has a way to go, and cannot wait."""
    return bias is not None and not isinstance(bias, nn.Parameter) and bias.requires_grad


def _is_hooked(weight: torch.Tensor | None) -> bool:
    """Whether somebody changes this gradient on its way."""
    return weight is not None and bool(weight._backward_hooks)
