"""Ops that one kernel runs where torch has several: on a GPU, for tensors so large that kernels and not their launches take the time.

    norm                its input's gradient comes with that of the residual stream, and with its weights', in one pass
    linear              adds weight gradients where they are kept instead of making them first
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["add_product", "has_kernels", "has_triton", "linear", "norm"]

LARGE = 2**22
"""Elements from which on a kernel takes longer than its launch."""
_WIDEST = 2**14
"""Columns that a norm's kernel holds at once."""


@functools.cache
def has_triton() -> bool:
    """Whether own kernels can be compiled at all."""
    return importlib.util.find_spec("triton") is not None


def has_kernels(x: torch.Tensor) -> bool:
    """Whether own kernels run, and pay, for a tensor."""
    return x.is_cuda and x.numel() >= LARGE and has_triton()


class _Norm(torch.autograd.Function):
    """(norm(x), x): the second is the residual stream, whose gradient is added on the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from penstock.models.modules import triton_kernels

        y, mean, rstd = triton_kernels.norm(x.contiguous(), weight, bias, eps, rms)
        ctx.save_for_backward(x, weight, mean, rstd)
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
        dx, for_weight, for_bias = triton_kernels.norm_gradient(grad.contiguous(), x.contiguous(), weight, mean, rstd, added)
        return dx, for_weight, for_bias, None, None


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Layer norm or RMS norm of each row, and the residual stream that goes on beside it."""
    if has_kernels(x) and x.shape[-1] <= _WIDEST:
        y, residual = _Norm.apply(x, weight, bias, eps, rms)
        return y, residual
    if rms:
        return F.rms_norm(x, weight.shape, weight, eps), x
    return F.layer_norm(x, weight.shape, weight, bias, eps), x


class _Linear(torch.autograd.Function):
    """A product that adds its weight gradients to those already there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        (x, values), (grad,) = ctx.saved_tensors, grads
        dx = grad @ values if ctx.needs_input_grad[0] else None
        add_product(ctx.weight.grad, grad.t(), x)
        _tell(ctx.weight)
        if ctx.bias is not None:
            ctx.bias.grad.add_(_column_sums(grad))
            _tell(ctx.bias)
        return dx, None, None


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a · b, also where `total` is of a wider dtype than both."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _column_sums(x: torch.Tensor) -> torch.Tensor:
    if not has_kernels(x):
        return x.sum(0)
    from penstock.models.modules import triton_kernels

    return triton_kernels.column_sums(x.contiguous())


def _tell(parameter: nn.Parameter) -> None:
    """Runs the hooks that autograd would run after it has added to a gradient."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
        hook(parameter)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x · weightᵀ + bias; for a trained weight that no other op uses."""
    in_place = torch.is_grad_enabled() and not _is_watched() and _is_kept(weight) and (bias is None or _is_kept(bias))
    return _Linear.apply(x, weight, bias) if in_place else F.linear(x, weight, bias)


def _is_kept(parameter: torch.Tensor) -> bool:
    """Whether its gradient is there to be added to."""
    return parameter.requires_grad and parameter.is_leaf and parameter.grad is not None


def _is_watched() -> bool:
    """Whether somebody wants to see torch's own product: a mode that puts weight gradients aside, or a recomputed segment, which is run
    again only until all that its ops save is there: torch's product saves its input before it runs, a function of ours after."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
