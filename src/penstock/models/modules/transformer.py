"""The torch side of the transformer ops: embedding, norm, linear, activation, BERT's pooler, logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from penstock.models.modules import fused
from penstock.models.modules.base import Carry, OpModule, Shard
from penstock.models.modules.batch import Batch
from penstock.models.modules.parallel import copy_to, gather, gather_input, reduce_from, reduce_scatter, slice_to

__all__ = ["Activation", "Embedding", "Linear", "Logits", "Norm", "Pooler"]


class Embedding(OpModule):
    """Token ids → hidden; each tp rank holds a part of the vocabulary."""

    def build(self) -> None:
        c = self.config
        self.part = self.tp.shard(c["vocab"])
        self.add("weight", (c["vocab"], c["width"]), shard=lambda whole: whole[self.part])
        if c["max_positions"]:
            self.add("positions", (c["max_positions"], c["width"]))
        if c["types"]:
            self.add("types", (c["types"], c["width"]))
        if c["buckets"]:
            self.add("bias", (c["buckets"], c["heads"]))

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c, side = self.config, batch.side(self.config["side"])
        hidden = self._lookup(side.ids)
        if c["max_positions"]:
            hidden = hidden + F.embedding(side.positions, self.positions)
        if c["types"] and side.types is not None:
            hidden = hidden + F.embedding(side.types, self.types)
        elif c["types"]:
            hidden = hidden + self.types[0]
        updates = {c["output"]: self.drop(hidden, batch)}
        if c["bias_output"]:
            # Cloned, so that the parameter and the tensor that travels are two: their gradients arrive separately.
            updates[c["bias_output"]] = self.bias.clone()
        return self.following(carry, **updates)

    def _lookup(self, ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        mine = (ids >= self.part.start) & (ids < self.part.stop)
        local = F.embedding((ids - self.part.start) * mine, self.weight) * mine[:, None]
        return reduce_from(local, self.tp)


class Norm(OpModule):
    """Layer norm or RMS norm."""

    def build(self) -> None:
        width = self.config["width"]
        self.add("weight", (width,), fill=1.0)
        if not self.config["rms"]:
            self.add("bias", (width,), fill=0.0)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        x = carry[c["source"]]
        y, residual = fused.norm(x, self.weight, None if c["rms"] else self.bias, c["eps"], c["rms"], batch.at_once)
        updates = {c["output"]: self.drop(y, batch)}
        if c["residual"]:
            updates["residual"] = residual
        return self.following(carry, **updates)


def _rows_of(tp_rank: int, tp_size: int, parts: Sequence[int]) -> list[slice]:
    """This rank's rows of a weight whose parts (q, k, v) are divided one by one."""
    rows, start = [], 0
    for part in parts:
        share = part // tp_size
        rows.append(slice(start + tp_rank * share, start + (tp_rank + 1) * share))
        start += part
    return rows


class Linear(OpModule):
    """A matrix product per token, divided by columns or rows; `algo` 1 divides the other way between the same carries."""

    def build(self) -> None:
        c, tp = self.config, self.tp
        self.parts = c["parts"] or [c["outputs"]]
        by_column = c["split"] == "column"
        shard: Shard | None = None
        if c["split"] != "whole":
            shard = (self._own_outputs if by_column else self._own_inputs) if self.algo == 0 else (
                self._grouped_inputs if by_column else self._own_outputs)  # fmt: skip
        self.add("weight", (c["outputs"], c["inputs"]), shard=shard)
        if c["bias"]:
            self.add("bias", (c["outputs"],), fill=0.0, shard=self._own_outputs if by_column else None)
        self.way = "whole" if tp.size == 1 or c["split"] == "whole" else f"{c['split']}{self.algo}"

    def _own_outputs(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([whole[rows] for rows in _rows_of(self.tp.rank, self.tp.size, self.parts)])

    def _own_inputs(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[:, self.tp.shard(self.config["inputs"])]

    def _grouped_inputs(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's inputs, with the outputs ordered rank by rank, as the reduce-scatter hands them out."""
        order = [whole[rows] for rank in range(self.tp.size) for rows in _rows_of(rank, self.tp.size, self.parts)]
        return torch.cat(order)[:, self.tp.shard(self.config["inputs"])]

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        x = carry[c["source"]]
        y = self._product(x, batch)
        updates = {c["output"]: y}
        if c["residual"] == "take":
            updates["residual"] = x
        elif c["residual"] == "add":
            updates[c["output"]] = carry["residual"] + self.drop(y, batch)
        elif c["dropout"]:
            updates[c["output"]] = self.drop(y, batch)
        return self.following(carry, **updates)

    def _product(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        bias = self.bias if self.config["bias"] else None
        tp = self.tp
        if self.way == "whole":
            return fused.linear(x, self.weight, bias, at_once=batch.at_once, torch_products=batch.torch_products)
        if self.way == "column0":
            return fused.linear(copy_to(x, tp), self.weight, bias, torch_products=batch.torch_products)
        if self.way == "row0":
            y = reduce_from(fused.linear(x, self.weight, None, torch_products=batch.torch_products), tp)
        elif self.way == "column1":
            y = reduce_scatter(fused.linear(slice_to(x, tp), self.weight, None, torch_products=batch.torch_products), tp)
        else:
            y = gather(fused.linear(gather_input(x, tp), self.weight, None, torch_products=batch.torch_products), tp)
        return y if bias is None else y + bias


_GELUS = {"gelu": "none", "gelu_tanh": "tanh"}
FUNCTIONS = {name: partial(F.gelu, approximate=way) for name, way in _GELUS.items()} | {"silu": F.silu, "relu": F.relu}


def _function_gradient(name: str, grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes grad × function'(x) to `out`."""
    aten = torch.ops.aten
    if name == "silu":
        aten.silu_backward.grad_input(grad, x, grad_input=out)
    elif name == "relu":
        aten.threshold_backward.grad_input(grad, x, 0.0, grad_input=out)
    else:
        aten.gelu_backward.grad_input(grad, x, approximate="tanh" if name == "gelu_tanh" else "none", grad_input=out)


class _Gated(torch.autograd.Function):
    """function(first half) × second half; keeps its input alone and writes both gradients into one tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        gate, value = x.chunk(2, -1)
        return FUNCTIONS[name](gate).mul_(value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        (grad,) = grads
        result = torch.empty_like(x)
        (gate, value), (for_gate, for_value) = x.chunk(2, -1), result.chunk(2, -1)
        torch.mul(grad, FUNCTIONS[ctx.name](gate), out=for_value)
        _function_gradient(ctx.name, grad * value, gate, for_gate)
        return result, None


class Activation(OpModule):
    """An element-wise function, gated or not."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        x = carry[c["source"]]
        if c["gated"]:
            y = _Gated.apply(x, c["function"])
        elif c["function"] in _GELUS:
            y = fused.gelu(x, _GELUS[c["function"]], batch.at_once)
        else:
            y = FUNCTIONS[c["function"]](x)
        return self.following(carry, **{c["output"]: y})


class Pooler(OpModule):
    """BERT's next-sentence head on the first token of each sample."""

    def build(self) -> None:
        width = self.config["width"]
        self.add("dense", (width, width))
        self.add("dense_bias", (width,), fill=0.0)
        self.add("classifier", (2, width))
        self.add("classifier_bias", (2,), fill=0.0)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        first = carry["hidden"][batch.side("own").first_tokens]
        pooled = torch.tanh(F.linear(first, self.dense, self.dense_bias))
        return self.following(carry, next_sentence=F.linear(pooled, self.classifier, self.classifier_bias))


class Logits(OpModule):
    """hidden → logits of this rank's part of the vocabulary. A tied weight is the embedding's own where both are here."""

    def build(self) -> None:
        c = self.config
        part = self.tp.shard(c["outputs"])
        self.add("weight", (c["outputs"], c["inputs"]), shard=lambda whole: whole[part])
        if c["bias"]:
            self.add("bias", (c["outputs"],), fill=0.0, shard=lambda whole: whole[part])

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        hidden = copy_to(carry["hidden"], self.tp)
        if c["scale"] != 1.0:
            hidden = hidden * c["scale"]
        return self.following(carry, logits=F.linear(hidden, self.weight, self.bias if c["bias"] else None))
