"""Dropout whose mask depends on (seed, step, sample, position, op) alone, so that no placement changes it.

The mask is a hash of those numbers, made again in the backward pass instead of being kept.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["keyed_dropout"]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit finaliser (xor-shift and multiply) on int64 values below 2^32."""
    x = x ^ (x >> 16)
    x = (x * 0x45D9F3B) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x45D9F3B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def keep_mask(row_keys: torch.Tensor, width: int, probability: float, key: int, first_column: int = 0) -> torch.Tensor:
    """(tokens, width) true where a value stays; `first_column` is the offset of this rank's part of the columns."""
    rows = _mix((row_keys * 0x9E3779B1 + key) & 0xFFFFFFFF)
    columns = torch.arange(first_column, first_column + width, device=row_keys.device) * 0x85EBCA6B & 0xFFFFFFFF
    values = _mix(rows[:, None] ^ columns[None, :])
    return values >= int(probability * 2**32)


class _KeyedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_keys: torch.Tensor, probability: float, key: int) -> torch.Tensor:
        ctx.save_for_backward(row_keys)
        ctx.probability, ctx.key = probability, key
        return x * keep_mask(row_keys, x.shape[-1], probability, key) / (1 - probability)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad,) = grads
        (row_keys,) = ctx.saved_tensors
        mask = keep_mask(row_keys, grad.shape[-1], ctx.probability, ctx.key)
        return grad * mask / (1 - ctx.probability), None, None, None


def keyed_dropout(x: torch.Tensor, row_keys: torch.Tensor, probability: float, key: int) -> torch.Tensor:
    """Drops entries of `x` (tokens, width); `row_keys` (tokens,) name sample and position, `key` names seed, step and op."""
    if probability == 0.0:
        return x
    return _KeyedDropout.apply(x, row_keys, probability, key & 0xFFFFFFFF)
