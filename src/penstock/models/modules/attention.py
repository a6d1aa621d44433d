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

__all__ = ["Attention", "position_bias", "rotary_angles"]


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


def position_bias(
    table: torch.Tensor, queries: int, keys: int, *, buckets: int, max_distance: int, bidirectional: bool
) -> torch.Tensor:
    """(heads, queries, keys) T5's bias; it depends on the distance alone, so the table is read once per distance."""
    distance = torch.arange(-(queries - 1), keys, device=table.device)
    return table[_bucket(distance, buckets, max_distance, bidirectional)].t().unfold(1, keys, 1).flip(1)


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
            raise InputError(f"op '{self.name}': attention dropout {c['dropout']} exists only on the unfused path (fused_attention: false).")
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
        both, value = carry[c["source"]].unflatten(-1, (-1, self.width)).split([self.heads + self.kv_heads, self.kv_heads], 1)
        if c["qk_norm"]:
            query, key = both.split([self.heads, self.kv_heads], 1)
            query = F.rms_norm(query, (self.width,), self.q_norm, c["qk_norm"])
            key = F.rms_norm(key, (self.width,), self.k_norm, c["qk_norm"])
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
        masked = not own.full or not keys.full
        if c["fused"] and not c["bias_source"] and self._has_varlen(query) and (own.layout == "packed" or (masked and not c["causal"])):
            return self._varlen(query, key, value, own, keys)
        if own.layout == "packed":
            return self._piecewise(query, key, value, own, keys, batch)
        rows = (x.unflatten(0, (-1, side.row_length)).transpose(1, 2) for x, side in ((query, own), (key, keys), (value, keys)))
        mask = self._mask(own, keys, carry, query.dtype)
        context = self._kernel(*rows, mask=mask, row_keys=own.row_keys(), batch=batch)
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
            mask = self._window_mask(length, query.device)
            context = self._kernel(*rows, mask=mask, row_keys=row_keys[starts[0] : ends[0]], batch=batch)
            parts.append(context[0].transpose(0, 1))
            starts = ends
        return torch.cat(parts)

    def _window_mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        window = self.config["window"]
        if not window or length <= window:
            return None
        position = torch.arange(length, device=device)
        distance = position[:, None] - position[None, :]
        return (distance >= 0) & (distance < window)

    def _mask(self, own: Sequences, keys: Sequences, carry: Carry, dtype: torch.dtype) -> torch.Tensor | None:
        """What `scaled_dot_product_attention` must add or hide in a padded batch; None where `is_causal` says it all."""
        c = self.config
        if not c["bias_source"]:
            hidden = keys.key_padding()[:, None, None, :] if not c["causal"] and not keys.full else None
            return self._window_mask(own.row_length, own.ids.device) if c["causal"] else hidden
        table = carry[c["bias_source"]][:, self.tp.shard(c["heads"])]
        bias = position_bias(table, own.row_length, keys.row_length, buckets=c["buckets"], max_distance=c["max_distance"],
                             bidirectional=c["bidirectional"])  # fmt: skip
        allowed = keys.key_padding()[:, None, None, :]
        if c["causal"]:
            allowed = allowed & torch.ones(own.row_length, keys.row_length, dtype=torch.bool, device=bias.device).tril()
        return bias[None] + torch.zeros(allowed.shape, dtype=dtype, device=bias.device).masked_fill_(~allowed, torch.finfo(dtype).min)

    def _kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, mask: torch.Tensor | None, row_keys: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """(rows, heads, length, width) attention by the fused kernel, or step by step where probabilities are dropped."""
        causal = self.config["causal"] and mask is None
        if self.config["fused"]:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=self.heads != self.kv_heads
            )
        groups = self.heads // self.kv_heads
        key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
        scores = query @ key.transpose(-1, -2) * self.scale
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
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
