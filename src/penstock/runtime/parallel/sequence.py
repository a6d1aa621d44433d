"""Sequence parallelism: between tensor-parallel products each rank holds some rows of the tokens, and works on those alone.

norm            rows in, rows out; its weights are used by all ranks on different rows, so their gradients are summed
product         by column: rows are gathered before it         backward: partial sums, each rank gets its rows of the sum
                by row: each rank gets its rows of the sum     backward: rows are gathered
residual, dropout   rows
everything else     gathers the rows it reads, cuts the rows it makes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch
from penstock.models.modules.build import Chain
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.init import stable_hash
from penstock.models.modules.parallel import TensorParallel, copy_to
from penstock.models.ops import PlacedOp, TensorSpec

__all__ = ["SequenceChain"]

_SIDES = {"tokens": "own", "dec_tokens": "decoder"}
_READS = {"logits": ("hidden",), "pooler": ("hidden",)}
"""Which tensors an op of a kind reads whole, if they are divided by rows."""


def _all_rows(rows: torch.Tensor, count: int, tp: TensorParallel) -> torch.Tensor:
    part = -(-count // tp.size)  # the last ranks may have fewer rows, or none
    padded = rows if rows.shape[0] == part else torch.cat([rows, rows.new_zeros((part - rows.shape[0], *rows.shape[1:]))])
    parts = [torch.empty_like(padded, memory_format=torch.contiguous_format) for _ in range(tp.size)]
    dist.all_gather(parts, padded.contiguous(), group=tp.group)
    return torch.cat(parts)[:count]


def _own_rows(whole: torch.Tensor, count: int, tp: TensorParallel) -> torch.Tensor:
    return whole[tp.shard(count)].clone()  # a view would hold the whole


def _summed_rows(partial: torch.Tensor, count: int, tp: TensorParallel) -> torch.Tensor:
    part = -(-count // tp.size)
    if dist.get_backend(tp.group) == "gloo" or part * tp.size != count:
        total = partial.contiguous().clone()
        dist.all_reduce(total, group=tp.group)
        return _own_rows(total, count, tp)
    out = partial.new_empty((part, *partial.shape[1:]))
    dist.reduce_scatter_tensor(out, partial.contiguous(), group=tp.group)
    return out


class _Rows(torch.autograd.Function):
    """Runs one of the three forward and another, its dual, backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: int, tp: TensorParallel, forward: Any, backward: Any) -> torch.Tensor:
        ctx.count, ctx.tp, ctx.dual = count, tp, backward
        result: torch.Tensor = forward(x, count, tp)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.dual(grads[0], ctx.count, ctx.tp), None, None, None, None


class SequenceChain(Chain):
    """A run of ops of which tensors of tokens enter and leave by rows; `entering` is the carry before each op."""

    def __init__(self, ops: Sequence[OpModule], places: Sequence[PlacedOp], entering: Sequence[Sequence[TensorSpec]]) -> None:
        super().__init__(ops, places)
        self.tp = ops[0].tp
        self._entering = [_divided(specs) for specs in entering]
        self._leaving = [_divided(place.op.carry) for place in places]

    def _run(self, carry: Carry, batch: Batch, start: int, stop: int) -> Carry:
        for index in range(start, stop):
            module = self.ops[index]
            kind = self.places[index].op.kind
            if kind == "norm":
                carry = self._norm(module, carry, batch)
            elif kind == "linear" and module.way in ("column0", "row0", "whole"):
                carry = self._product(module, carry, batch, self._entering[index])
            elif kind == "activation":  # element by element: rows or columns, whatever it is given
                carry = module(carry, batch)
            else:
                carry = self._other(index, module, kind, carry, batch)
        return carry

    def _norm(self, module: Any, carry: Carry, batch: Batch) -> Carry:
        c = module.config
        x, weight = carry[c["source"]], copy_to(module.weight, self.tp)
        if c["rms"]:
            y = F.rms_norm(x, (c["width"],), weight, c["eps"])
        else:
            y = F.layer_norm(x, (c["width"],), weight, copy_to(module.bias, self.tp), c["eps"])
        updates = {c["output"]: self._drop(module, y, batch)}
        if c["residual"]:
            updates["residual"] = x
        return module.following(carry, **updates)

    def _product(self, module: Any, carry: Carry, batch: Batch, entering: dict[str, str]) -> Carry:
        c, tp = module.config, self.tp
        x, bias = carry[c["source"]], module.bias if c["bias"] else None
        if module.way == "column0":
            count = _count(batch, entering[c["source"]])
            y = F.linear(_Rows.apply(x, count, tp, _all_rows, _summed_rows), module.weight, bias)
        elif module.way == "row0":
            y = F.linear(x, module.weight)
            y = _Rows.apply(y, y.shape[0], tp, _summed_rows, _all_rows)
            y = y if bias is None else y + copy_to(bias, tp)
        else:
            y = F.linear(x, copy_to(module.weight, tp), None if bias is None else copy_to(bias, tp))
        updates = {c["output"]: y}
        if c["residual"] == "take":
            updates["residual"] = x
        elif c["residual"] == "add":
            updates[c["output"]] = carry["residual"] + self._drop(module, y, batch)
        elif c["dropout"]:
            updates[c["output"]] = self._drop(module, y, batch)
        return module.following(carry, **updates)

    def _other(self, index: int, module: Any, kind: str, carry: Carry, batch: Batch) -> Carry:
        """Runs an op on whole tensors; every rank then has the whole gradient, so that cutting and gathering are all there is to do."""
        given, entering = dict(carry), self._entering[index]
        reads = (module.config["source"], "residual") if kind == "linear" else _READS.get(kind, ())
        for name in reads:
            if name in entering:
                given[name] = _Rows.apply(carry[name], _count(batch, entering[name]), self.tp, _all_rows, _own_rows)
        result = module(given, batch)
        for name, feature in self._leaving[index].items():
            if name in given and result[name] is given[name]:
                result[name] = carry[name]
            else:
                result[name] = _Rows.apply(result[name], _count(batch, feature), self.tp, _own_rows, _all_rows)
        return result

    def _drop(self, module: Any, rows: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = module.config.get("dropout", 0.0)
        if not probability or not batch.training:
            return rows
        side = batch.side(module.config["side"])
        keys = side.row_keys()[self.tp.shard(side.ids.numel())]
        return keyed_dropout(rows, keys, probability, stable_hash(batch.seed, batch.step, module.name))


def _divided(specs: Sequence[TensorSpec]) -> dict[str, str]:
    """The tensors that are divided by rows, and what their rows count."""
    return {spec.name: str(spec.dims[0]) for spec in specs if not spec.split and spec.dims and spec.dims[0] in _SIDES}


def _count(batch: Batch, feature: str) -> int:
    return batch.side(_SIDES[feature]).ids.numel()
