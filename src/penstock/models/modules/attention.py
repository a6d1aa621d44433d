"""Attention inside each sequence, in both layouts, with the kernel that the device and dtype allow."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.errors import InputError
from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch, Sequences
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.fused import has_triton, is_busy
from penstock.models.modules.init import stable_hash
from penstock.models.modules.parallel import copy_to
from penstock.models.transformer import RAGGED_WIDTHS

__all__ = ["Attention", "cudnn_attention", "distance_buckets", "position_bias", "rotary_angles"]


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


@contextmanager
def cudnn_attention(allowed: bool) -> Iterator[None]:
    """Attention of torch runs with cuDNN's kernel, which plans for 50 ms at each new shape, or without; the old setting comes back."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    if before == allowed:
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


class Attention(OpModule):
    """Scaled dot-product attention; heads are divided under tp.

    Kernels in half precision on a GPU: those of `ragged_attention` for packed rows, for padding in both directions and for large padded
    rows; cuDNN's where rows have a length that comes again and again, since it plans anew for 50 ms at each shape; torch's otherwise.
    Elsewhere `scaled_dot_product_attention`, row by row of a padded batch or sequence by sequence of a packed one.
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
        context = self._attend(self._parts(carry, own), own, batch, carry)
        return self.following(carry, **{self.config["output"]: context.reshape(context.shape[0], -1)})

    def _parts(self, carry: Carry, own: Sequences) -> list[torch.Tensor]:
        """(tokens, heads, width) tensors that hold queries, keys and values one after the other, in as few as there are."""
        c = self.config
        joint = carry[c["source"]]
        heads = joint.view(joint.shape[0], -1, self.width)
        if c["cross_source"]:
            other = carry[c["cross_source"]]
            return [heads, other.view(other.shape[0], -1, self.width)]
        if not c["qk_norm"] and not c["rotary"]:
            return [heads]
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
        return [both, value]

    def _attend(self, parts: list[torch.Tensor], own: Sequences, batch: Batch, carry: Carry) -> torch.Tensor:
        c = self.config
        keys = batch.side("own") if c["cross_source"] else own
        if c["bias_source"] and own.layout == "packed":
            raise InputError(f"op '{self.name}': relative position bias has no packed kernel; use the padded layout.")
        is_half = parts[0].is_cuda and parts[0].dtype in (torch.bfloat16, torch.float16)
        if is_half and c["fused"] and not c["bias_source"]:
            if self._is_ragged(parts[0], own):
                return self._ragged(parts, own)
            if own.layout == "packed":
                return self._varlen(*self._split(parts), own, keys)
        if own.layout == "packed":
            return self._piecewise(*self._split(parts), own, keys, batch)
        lengths = [own.row_length, *[keys.row_length] * (len(parts) - 1)]
        rows = [part.view(-1, length, *part.shape[1:]).transpose(1, 2) for part, length in zip(parts, lengths, strict=True)]
        masks = self._mask(own, keys, carry)
        with cudnn_attention(batch.repeats) if is_half else nullcontext():
            context = self._kernel(*self._split(rows), masks=masks, row_keys=own.row_keys(), batch=batch)
        return context.transpose(1, 2).flatten(0, 1)

    def _split(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Queries, keys and values, cut along the dimension of heads; a joint tensor in one step, so that gradients are joined in one."""
        counts = [self.heads, self.kv_heads, self.kv_heads]
        if len(parts) == 1:
            return list(parts[0].split_with_sizes(counts, 1))
        cut = 1 if parts[0].shape[1] == self.heads else 2
        return [piece for part, held in zip(parts, (counts[:cut], counts[cut:]), strict=True) for piece in part.split_with_sizes(held, 1)]

    def _is_ragged(self, part: torch.Tensor, own: Sequences) -> bool:
        """Whether our own kernels run: for padded causal rows, which torch's can do too, where skipping padding is worth their launch."""
        c = self.config
        if c["cross_source"] or not has_triton() or self.width not in RAGGED_WIDTHS:
            return False
        return own.layout == "packed" or not c["causal"] or (is_busy(part.shape[0], self.heads * self.width) and not own.full)

    def _ragged(self, parts: list[torch.Tensor], own: Sequences) -> torch.Tensor:
        from penstock.models.modules.ragged_attention import ragged_attention

        counts = self.heads, self.kv_heads, self.kv_heads
        causal, window = self.config["causal"], self.config["window"] or 0
        return ragged_attention(parts, counts, own.pieces(causal=causal), scale=self.scale, causal=causal, window=window)

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
            if mask is not None and query.is_cuda and torch.are_deterministic_algorithms_enabled():
                with sdpa_kernel(SDPBackend.MATH):  # the fast kernel for masks adds in any order on the way back
                    return F.scaled_dot_product_attention(
                        query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=self.heads != self.kv_heads
                    )
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
