"""Tensor parallelism by explicit collectives, each with its dual in the backward pass.

    function        forward          backward
    copy_to         identity         all-reduce
    reduce_from     all-reduce       identity
    gather          all-gather       slice
    slice_to        slice            all-gather
    reduce_scatter  reduce-scatter   all-gather
    gather_input    all-gather       reduce-scatter
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["TensorParallel", "copy_to", "gather", "gather_input", "reduce_from", "reduce_scatter", "slice_to"]


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among the ranks that divide an op."""

    rank: int = 0
    size: int = 1
    find_group: Callable[[], Any] | None = None
    """Asked for the process group at every use: groups come and go while ops stay. None: the group of all processes."""
    lone: bool = False
    """One shard by itself, to be measured: collectives are skipped and leave their results undefined."""
    exchange: Callable[[int, torch.Tensor], list[torch.Tensor]] | None = None
    """All shards in threads of one process: gives a rank what all of them handed in."""

    @property
    def group(self) -> Any:
        """The process group of the ranks that divide the op."""
        return None if self.find_group is None else self.find_group()

    def shard(self, count: int) -> slice:
        """This rank's part of `count` items: equal parts, or, where they do not divide, shorter ones at the end."""
        part = -(-count // self.size)
        return slice(min(self.rank * part, count), min((self.rank + 1) * part, count))


def _all_reduce(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    if tp.lone:
        return x
    if tp.exchange is not None:
        return torch.stack(tp.exchange(tp.rank, x)).sum(0)
    x = x.contiguous().clone()
    dist.all_reduce(x, group=tp.group)
    return x


def _all_gather(x: torch.Tensor, tp: TensorParallel, dim: int) -> torch.Tensor:
    if tp.lone:
        sizes = list(x.shape)
        sizes[dim] *= tp.size
        return x.new_empty(sizes)
    if tp.exchange is not None:
        return torch.cat(tp.exchange(tp.rank, x), dim)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(parts, x.contiguous(), group=tp.group)
    return torch.cat(parts, dim)


def _slice(x: torch.Tensor, tp: TensorParallel, dim: int) -> torch.Tensor:
    return x.chunk(tp.size, dim)[tp.rank]


def _reduce_scatter(x: torch.Tensor, tp: TensorParallel, dim: int) -> torch.Tensor:
    if tp.lone:
        return torch.empty_like(_slice(x, tp, dim), memory_format=torch.contiguous_format)
    if dist.get_backend(tp.group) == "gloo":
        return _slice(_all_reduce(x, tp), tp, dim).contiguous()
    parts = [part.contiguous() for part in x.chunk(tp.size, dim)]
    out = torch.empty_like(parts[0])
    dist.reduce_scatter(out, parts, group=tp.group)
    return out


class _Dual(torch.autograd.Function):
    """Runs one collective forward and its dual backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: TensorParallel, dim: int, forward: Any, backward: Any) -> torch.Tensor:
        ctx.tp, ctx.dim, ctx.dual = tp, dim, backward
        return x.view_as(x) if forward is None else forward(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (grad,) = grads
        return (grad if ctx.dual is None else ctx.dual(grad, ctx.tp, ctx.dim)), None, None, None, None


def _reduce(x: torch.Tensor, tp: TensorParallel, dim: int) -> torch.Tensor:
    return _all_reduce(x, tp)


def _dual(x: torch.Tensor, tp: TensorParallel, dim: int, forward: Any, backward: Any) -> torch.Tensor:
    return x if tp.size == 1 else _Dual.apply(x, tp, dim, forward, backward)


def copy_to(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """A whole tensor enters a divided op: its gradient is the sum over ranks."""
    return _dual(x, tp, 0, None, _reduce)


def reduce_from(x: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Partial sums leave a divided op as the whole sum."""
    return _dual(x, tp, 0, _reduce, None)


def gather(x: torch.Tensor, tp: TensorParallel, dim: int = -1) -> torch.Tensor:
    """Parts become the whole on every rank; every rank then uses the whole alike, so the gradient is its own slice."""
    return _dual(x, tp, dim, _all_gather, _slice)


def gather_input(x: torch.Tensor, tp: TensorParallel, dim: int = -1) -> torch.Tensor:
    """Parts become the whole for an op that is divided otherwise: its gradient is a partial sum on every rank."""
    return _dual(x, tp, dim, _all_gather, _reduce_scatter)


def slice_to(x: torch.Tensor, tp: TensorParallel, dim: int = -1) -> torch.Tensor:
    """A whole tensor is cut to this rank's part."""
    return _dual(x, tp, dim, _slice, _all_gather)


def reduce_scatter(x: torch.Tensor, tp: TensorParallel, dim: int = -1) -> torch.Tensor:
    """Partial sums become this rank's part of the sum."""
    return _dual(x, tp, dim, _reduce_scatter, _all_gather)
