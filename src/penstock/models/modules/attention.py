"""Attention inside each sequence, in both layouts, with the kernel that the device and dtype allow."""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any

import torch
from torch.nn import functional as F

from penstock.errors import InputError
from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch, Sequences
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.init import stable_hash
from penstock.models.modules.parallel import copy_to

__all__ = ["Attention", "distance_buckets", "position_bias", "rotary_angles"]


def rotary_angles(positions: torch.Tensor, width: int, theta: float, scaling: dict[str, Any] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, 1, width / 2) cosines and sines in fp32 of rotary positions."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=positions.device) / width)
    kind = (scaling or {}).get("rope_type", "default")
    if kind == "llama3":
        frequencies = _llama3(frequencies, scaling or {})
    elif kind == "linear":
        frequencies = frequencies / (scaling or {})["factor"]
    elif kind != "default":
        raise InputError(f"rotary positions of type '{kind}' are not supported; known: default, linear, llama3.")
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3's rule: long wavelengths slowed by `factor`, short ones left alone, a smooth ramp between."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    cycles = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    ramp = ((cycles - low) / (high - low)).clamp(0, 1)
    return frequencies * ((1 - ramp) / factor + ramp)


class _Rotate(torch.autograd.Function):
    """Rotates pairs (i, i + width/2) by the given angles; keeps only the angles."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, -sin), None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    one, two = out.chunk(2, -1)
    torch.mul(first, cos, out=one)
    one.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=two)
    two.addcmul_(first, sin)
    return out


def distance_buckets(
    queries: int, keys: int, device: torch.device, *, buckets: int, max_distance: int, bidirectional: bool
) -> torch.Tensor:
    """(queries + keys - 1,) T5's bucket of each distance between a query and a key, from the last query's first key on."""
    distance = torch.arange(-(queries - 1), keys, device=device)
    return _bucket(distance, buckets, max_distance, bidirectional)


def position_bias(table: torch.Tensor, buckets: torch.Tensor, keys: int) -> torch.Tensor:
    """(heads, queries, keys) T5's bias; it depends on the distance alone, so the table is read once per distance."""
    return table[buckets].t().unfold(1, keys, 1).flip(1)


def _bucket(distance: torch.Tensor, buckets: int, max_distance: int, bidirectional: bool) -> torch.Tensor:
    """Exact buckets for near keys, logarithmic ones up to `max_distance`."""
    start = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        start = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -distance.clamp(max=0)
    exact = buckets // 2
    ratio = torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
    return start + torch.where(distance < exact, distance, far)


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Zero where allowed, the least number elsewhere."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, torch.finfo(dtype).min)


@functools.cache
def _varlen_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


class Attention(OpModule):
    """Scaled dot-product attention; heads are divided under tp.

    Kernels: the variable-length one on CUDA in half precision for packed rows and for padding in both directions; otherwise
    `scaled_dot_product_attention`, row by row of a padded batch or sequence by sequence of a packed one.
    """

    def build(self) -> None:
        c, size = self.config, self.tp.size
        if c["fused"] and c["dropout"]:
            raise InputError(f"op '{self.name}': attention dropout {c['dropout']} exists only unfused (fused_attention: false).")
        self.heads, self.kv_heads, self.width = c["heads"] // size, c["kv_heads"] // size, c["head_width"]
        self.scale = c["scale"] or self.width**-0.5
        if c["qk_norm"]:
            self.add("q_norm", (self.width,), fill=1.0)
            self.add("k_norm", (self.width,), fill=1.0)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        own = batch.side(self.config["side"])
        query, key, value = self._heads(carry, own)
        context = self._attend(query, key, value, own, batch, carry)
        return self.following(carry, **{self.config["output"]: context.reshape(context.shape[0], -1)})

    def _heads(self, carry: Carry, own: Sequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        if c["cross_source"]:
            query = carry[c["source"]].unflatten(-1, (self.heads, self.width))
            key, value = carry[c["cross_source"]].unflatten(-1, (2 * self.kv_heads, self.width)).chunk(2, 1)
            return query, key, value
        heads = carry[c["source"]].unflatten(-1, (-1, self.width))
        if not c["qk_norm"] and not c["rotary"]:  # gradients are then joined in one step
            query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
            return query, key, value
        both, value = heads.split([self.heads + self.kv_heads, self.kv_heads], 1)
        if c["qk_norm"]:
            query, key = both.split([self.heads, self.kv_heads], 1)
            # Whole on every rank but used by its heads alone, so their gradients are summed; the same goes for the bias table.
            query = F.rms_norm(query, (self.width,), copy_to(self.q_norm, self.tp), c["qk_norm"])
            key = F.rms_norm(key, (self.width,), copy_to(self.k_norm, self.tp), c["qk_norm"])
            both = torch.cat([query, key], 1)
        if c["rotary"]:
            angles = own.memo(("rotary", self.width, str(c["rotary"]), both.dtype), lambda: [part.to(both.dtype) for part in rotary_angles(
                own.positions, self.width, c["rotary"]["theta"], c["rotary"]["scaling"])])  # fmt: skip
            both = _Rotate.apply(both, *angles)
        query, key = both.split([self.heads, self.kv_heads], 1)
        return query, key, value

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Sequences, batch: Batch, carry: Carry
    ) -> torch.Tensor:
        c = self.config
        keys = batch.side("own") if c["cross_source"] else own
        if c["bias_source"] and own.layout == "packed":
            raise InputError(f"op '{self.name}': relative position bias has no packed kernel; use the padded layout.")
        # Padding in both directions is left out by the variable-length kernel: pads form pieces of their own.
        pieces = own.layout == "packed" or not (c["causal"] or c["cross_source"])
        if pieces and c["fused"] and not c["bias_source"] and self._has_varlen(query):
            return self._varlen(query, key, value, own, keys)
        if own.layout == "packed":
            return self._piecewise(query, key, value, own, keys, batch)
        rows = (x.unflatten(0, (-1, side.row_length)).transpose(1, 2) for x, side in ((query, own), (key, keys), (value, keys)))
        masks = self._mask(own, keys, carry)
        context = self._kernel(*rows, masks=masks, row_keys=own.row_keys(), batch=batch)
        return context.transpose(1, 2).flatten(0, 1)

    def _has_varlen(self, query: torch.Tensor) -> bool:
        return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)

    def _varlen(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Sequences, keys: Sequences) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        c, known = self.config, _varlen_parameters()
        left = c["window"] - 1 if c["window"] else -1
        if c["causal"] and "window_size" in known:
            options: dict[str, Any] = {"window_size": (left, 0)}
        else:
            options = {"is_causal": c["causal"]} if "is_causal" in known else {}
        if "scale" in known:
            options["scale"] = self.scale
        if "enable_gqa" in known and self.heads != self.kv_heads:
            options["enable_gqa"] = True
        result = varlen_attn(query, key, value, own.bounds, keys.bounds, own.longest, keys.longest, **options)
        assert isinstance(result, torch.Tensor)
        return result

    def _piecewise(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own: Sequences, keys: Sequences, batch: Batch
    ) -> torch.Tensor:
        """Each sequence alone: the correct path where no variable-length kernel exists."""
        parts = []
        row_keys = own.row_keys()
        starts = (0, 0)
        for length, key_length in zip(own.lengths, keys.lengths, strict=True):
            ends = (starts[0] + length, starts[1] + key_length)
            rows = (x[a:b].transpose(0, 1)[None] for x, a, b in (
                (query, starts[0], ends[0]), (key, starts[1], ends[1]), (value, starts[1], ends[1])))  # fmt: skip
            masks = [self._window_mask(length, query.device)] if self.config["window"] and length > self.config["window"] else []
            context = self._kernel(*rows, masks=masks, row_keys=row_keys[starts[0] : ends[0]], batch=batch)
            parts.append(context[0].transpose(0, 1))
            starts = ends
        return torch.cat(parts)

    def _window_mask(self, length: int, device: torch.device) -> torch.Tensor:
        """(queries, keys) true for the last `window` keys up to the query's own."""
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < self.config["window"])

    def _mask(self, own: Sequences, keys: Sequences, carry: Carry) -> list[torch.Tensor]:
        """What must be added to (or, if boolean, allowed in) the scores of a padded batch; nothing where `is_causal` says it all."""
        c = self.config
        masks = []
        if c["bias_source"]:
            masks.append(self._bias(own, keys, carry[c["bias_source"]]))
        elif c["causal"] and c["window"] and own.row_length > c["window"]:
            masks.append(self._window_mask(own.row_length, own.ids.device))
        if not c["causal"] and not keys.full:
            padding = keys.key_padding()[:, None, None, :]
            dtype = carry[c["source"]].dtype
            masks.append(padding if c["fused"] else keys.memo(("padding", dtype), lambda: _additive(padding, dtype)))
        return masks

    def _bias(self, own: Sequences, keys: Sequences, table: torch.Tensor) -> torch.Tensor:
        """(heads, queries, keys) relative position bias, future keys hidden where the op is causal."""
        c = self.config
        mine = copy_to(table, self.tp)[:, self.tp.shard(c["heads"])]
        rule = {name: c[name] for name in ("buckets", "max_distance", "bidirectional")}
        size = own.row_length, keys.row_length
        buckets = own.memo(("buckets", *size, *rule.values()), lambda: distance_buckets(*size, mine.device, **rule))
        bias = position_bias(mine, buckets, keys.row_length)
        if not c["causal"]:
            return bias
        future = own.memo(("future", *size), lambda: torch.ones(size, dtype=torch.bool, device=mine.device).triu_(1))
        return bias.masked_fill(future, torch.finfo(bias.dtype).min)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, masks: list[torch.Tensor], row_keys: torch.Tensor,
        batch: Batch,
    ) -> torch.Tensor:  # fmt: skip
        """(rows, heads, length, width) attention by the fused kernel, or step by step where the op asks for it."""
        causal = self.config["causal"] and not masks
        if self.config["fused"]:
            mask = masks[0] if masks else None
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
            )
        groups = self.heads // self.kv_heads
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        scores = (query if self.scale == 1.0 else query * self.scale) @ key.transpose(-1, -2)
        if causal:
            masks = [torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()]
        for mask in masks:
            scores.add_(_additive(mask, scores.dtype) if mask.dtype == torch.bool else mask)
        return self._dropped(scores.softmax(-1), row_keys, batch) @ value

    def _dropped(self, chances: torch.Tensor, row_keys: torch.Tensor, batch: Batch) -> torch.Tensor:
        probability = self.config["dropout"]
        if not probability or not batch.training:
            return chances
        rows, heads, length, _ = chances.shape
        key = stable_hash(batch.seed, batch.step, self.name)
        head = torch.arange(heads, device=chances.device) + self.tp.rank * heads
        keys = (row_keys.view(rows, 1, length) * 4099 + head[None, :, None]).flatten()
        return keyed_dropout(chances.flatten(0, 2), keys, probability, key).view_as(chances)
