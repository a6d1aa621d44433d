"""Ops that one kernel runs where torch has several: on a GPU, where that and not its host takes the time. A function of ours takes the host
about twice as long as torch's own, so that small tensors want them only where all kernels are issued at once (`Batch.at_once`).

    norm                its input's gradient comes with that of the residual stream, with its weights', which are added where they are
                        kept, and with the sums of its columns, which are the gradient of a bias before it
    gelu                its gradient comes with such sums too
    linear              adds weight gradients where they are kept instead of making them first
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["add_product", "gelu", "has_kernels", "has_triton", "is_busy", "linear", "norm"]

_LARGE = 2**23
"""Elements from which on a kernel takes longer than its launch."""
_BUSY = 2**34
"""Tokens × width² from which on the GPU takes longer for a layer than the host that issues it: 4,096 tokens of width 2,048."""
_WIDER = 4
"""Inside its feed-forward part a layer is about so many times as wide."""
_SUMS = "_penstock_column_sums"
"""Attribute of a gradient: (parts of its columns' sums, its version when they were made)."""
_WIDEST = 2**14
"""Columns that a norm's kernel holds at once."""


@functools.cache
def has_triton() -> bool:
    """Whether own kernels can be compiled at all."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(x: torch.Tensor, at_once: bool = False) -> bool:
    """Whether own kernels run, and pay, for a tensor."""
    return x.is_cuda and (at_once or x.numel() >= _LARGE) and has_triton()


def is_busy(tokens: int, width: int, at_once: bool = False) -> bool:
    """Whether the time of kernels counts and that of their launches does not: a layer of this width keeps a GPU busy."""
    return at_once or tokens * width * width >= _BUSY


class _Norm(torch.autograd.Function):
    """(norm(x), x): the second is the residual stream, whose gradient is added on the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from penstock.models.modules import triton_kernels

        y, mean, rstd = triton_kernels.norm(x.contiguous(), weight, bias, eps, rms)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.trained = [weight] if bias is None else [weight, bias]
        ctx.in_place = all(map(_is_kept, ctx.trained))
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from penstock.models.modules import triton_kernels

        grad, added = grads
        x, weight, mean, rstd = ctx.saved_tensors
        if grad is None:
            return added, None, None, None, None
        added = None if added is None else added.contiguous()
        dx, parts = triton_kernels.norm_gradient(grad.contiguous(), x.contiguous(), weight, mean, rstd, added)
        _bring_sums(dx, None if mean is None else parts[2])
        if not ctx.in_place:
            for_weight, *for_bias = parts[: len(ctx.trained)].sum(1).to(weight.dtype)
            return dx, for_weight, for_bias[0] if for_bias else None, None, None
        for parameter, own in zip(ctx.trained, parts, strict=False):  # the last part is the sums of dx
            triton_kernels.add_column_sums(own, parameter.grad)
            _tell(parameter)
        return dx, None, None, None, None


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool, at_once: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm or RMS norm of each row, and the residual stream that goes on beside it."""
    if has_kernels(x, at_once) and x.shape[-1] <= _WIDEST and is_busy(*x.shape, at_once):
        y, residual = _Norm.apply(x, weight, bias, eps, rms)
        return y, residual
    if rms:
        return F.rms_norm(x, weight.shape, weight, eps), x
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


class _Linear(torch.autograd.Function):
    """A product that adds its weight gradients to those already there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, at_once: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias, ctx.at_once = weight, bias, at_once
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        (x, values), (grad,) = ctx.saved_tensors, grads
        dx = grad @ values if ctx.needs_input_grad[0] else None
        add_product(ctx.weight.grad, grad.t(), x)
        _tell(ctx.weight)
        if ctx.bias is not None:
            _add_column_sums(grad, ctx.bias.grad, ctx.at_once)
            _tell(ctx.bias)
        return dx, None, None, None


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a · b, also where `total` is of a wider dtype than both."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _bring_sums(grad: torch.Tensor, parts: torch.Tensor | None) -> None:
    """Lets the bias of an op before find the sums of a gradient's columns on it."""
    setattr(grad, _SUMS, (parts, grad._version))


def _add_column_sums(x: torch.Tensor, result: torch.Tensor, at_once: bool) -> None:
    if not has_kernels(x, at_once):
        result.add_(x.sum(0))
        return
    from penstock.models.modules import triton_kernels

    parts, version = getattr(x, _SUMS, (None, 0))
    if version != x._version:  # somebody has added to it since
        parts = None
    triton_kernels.add_column_sums(triton_kernels.column_parts(x.contiguous()) if parts is None else parts, result)


class _Gelu(torch.autograd.Function):
    """GELU; the gradient that it hands on brings the sums of its columns along, which a bias before it wants."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, approximate: str) -> torch.Tensor:
        from penstock.models.modules import triton_kernels

        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return triton_kernels.gelu(x.contiguous(), approximate == "tanh")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        from penstock.models.modules import triton_kernels

        dx, parts = triton_kernels.gelu_gradient(grads[0].contiguous(), ctx.saved_tensors[0].contiguous(), ctx.approximate == "tanh")
        _bring_sums(dx, parts)
        return dx, None


def gelu(x: torch.Tensor, approximate: str = "none", at_once: bool = False) -> torch.Tensor:
    """GELU of each value, by the error function or ("tanh") approximately."""
    if has_kernels(x, at_once) and torch.is_grad_enabled() and is_busy(x.shape[0], x.shape[1] // _WIDER, at_once):
        result: torch.Tensor = _Gelu.apply(x, approximate)
        return result
    return F.gelu(x, approximate=approximate)


def _tell(parameter: nn.Parameter) -> None:
    """Runs the hooks that autograd would run after it has added to a gradient."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        hook(parameter)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, at_once: bool = False, torch_products: bool = False
) -> torch.Tensor:
    """x · weightᵀ + bias; for a trained weight that no other op uses.

    `torch_products`: it is torch's, see `Chain`. A mode that puts weight gradients aside wants to see that, too.
    """
    pays = not torch_products and (not x.is_cuda or is_busy(x.numel() // x.shape[-1], min(weight.shape), at_once))
    watched = torch._C._len_torch_function_stack() > 0
    in_place = pays and torch.is_grad_enabled() and not watched and _is_kept(weight) and (bias is None or _is_kept(bias))
    return _Linear.apply(x, weight, bias, at_once) if in_place else F.linear(x, weight, bias)


def _is_kept(parameter: torch.Tensor) -> bool:
    """Whether its gradient is there to be added to."""
    return parameter.requires_grad and parameter.is_leaf and parameter.grad is not None
