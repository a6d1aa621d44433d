"""Attention inside the pieces of a flat row of tokens, as GPU kernels: samples that lie end to end, however short or unequal.

A tile is a run of tokens, whatever pieces they belong to, so short samples share one and a long one takes many:

    tokens   aaaaabbbbbbbbbbbbcccdddddddddd
    tiles    └──────┘└──────┘└──────┘└──────┘      a tile of queries reads keys from its first token's piece on

A key is seen by a query of its own piece: those before it in a causal row, all of them otherwise. Nothing is added up by atomics, so equal
inputs give equal bits. The backward pass makes scores again, once for queries' gradients and once for those of keys and values.

A tile of a long piece takes up to thirty times as long as one of short pieces. Tiles are therefore started longest first, all heads of one
before the next: started as they lie, a GPU would wait for a few long ones at the end of every kernel, 30 % of the time at 6,000 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from penstock.models.modules.pieces import TILE, Pieces

__all__ = ["ragged_attention"]

_LOG2E = 1.4426950408889634


@triton.jit
def _visible(queries, keys, starts, ends, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys a query sees; all four broadcast against each other."""
    seen = keys >= starts
    if CAUSAL:
        seen &= keys <= queries
    else:
        seen &= keys < ends
    if WINDOW > 0:
        seen &= keys > queries - WINDOW
    return seen


@triton.jit
def _rows(base, at, stride, tokens, WIDTH: tl.constexpr):
    """(rows, width) of a tensor whose last dimension is dense; zeros beyond the last token."""
    return tl.load(base + at[:, None].to(tl.int64) * stride + tl.arange(0, WIDTH)[None, :], mask=(at < tokens)[:, None], other=0.0)


@triton.jit
def _key_range(first, last, starts, ends, tokens, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """[low, high) keys that queries [first, last] may see, and [from, to) those that all of them see; in whole blocks."""
    low = tl.load(starts + first)
    own = tl.load(starts + last)
    if WINDOW > 0:
        low = tl.maximum(low, first - WINDOW + 1)
        own = tl.maximum(own, last - WINDOW + 1)
    if CAUSAL:
        high, shared = last + 1, first + 1
    else:
        high, shared = tl.load(ends + last), tl.load(ends + first)
    clear = tl.minimum((own + KEYS - 1) // KEYS * KEYS, high)
    return low // KEYS * KEYS, clear, tl.maximum(shared // KEYS * KEYS, clear), high


@triton.jit
def _forward_blocks(
    total, highest, acc, query, key, value, begin, finish, at, starts, ends, tokens, key_stride, value_stride, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    for start in range(begin, finish, KEYS):
        keys = start + tl.arange(0, KEYS)
        scores = tl.dot(query, tl.trans(_rows(key, keys, key_stride, tokens, WIDTH)))
        if MASKED:
            scores = tl.where(_visible(at[:, None], keys[None, :], starts[:, None], ends[:, None], CAUSAL, WINDOW), scores, -float("inf"))
        above = tl.maximum(highest, tl.max(scores, 1) * scale)
        base = tl.where(above == -float("inf"), 0.0, above) if MASKED else above  # a row may have seen nothing yet
        chances = tl.exp2(scores * scale - base[:, None])
        fade = tl.exp2(highest - base)
        total = total * fade + tl.sum(chances, 1)
        values = _rows(value, keys, value_stride, tokens, WIDTH)
        acc = tl.dot(chances.to(values.dtype), values, acc * fade[:, None])
        highest = above
    return total, highest, acc


@triton.jit(do_not_specialize=["tokens"])
def _forward(
    query, key, value, out, log_sums, starts, ends, order, tokens, query_at, query_stride, key_at, key_stride, value_at, value_stride,
    out_stride, scale, group, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = tl.load(order + tl.program_id(1)) * QUERIES
    at = first + tl.arange(0, QUERIES)
    last = tl.minimum(first + QUERIES, tokens) - 1
    begins = tl.load(starts + at, mask=at < tokens, other=0)
    finishes = tl.load(ends + at, mask=at < tokens, other=0)
    own = _rows(query + query_at + head * WIDTH, at, query_stride, tokens, WIDTH)
    key += key_at + head // group * WIDTH
    value += value_at + head // group * WIDTH
    low, clear, shared, high = _key_range(first, last, starts, ends, tokens, CAUSAL, WINDOW, KEYS)
    total = tl.zeros((QUERIES,), tl.float32)
    highest = tl.full((QUERIES,), -float("inf"), tl.float32)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    total, highest, acc = _forward_blocks(
        total, highest, acc, own, key, value, low, clear, at, begins, finishes, tokens, key_stride, value_stride, scale,
        True, CAUSAL, WINDOW, WIDTH, KEYS,
    )  # fmt: skip
    total, highest, acc = _forward_blocks(
        total, highest, acc, own, key, value, clear, shared, at, begins, finishes, tokens, key_stride, value_stride, scale,
        False, CAUSAL, WINDOW, WIDTH, KEYS,
    )  # fmt: skip
    total, highest, acc = _forward_blocks(
        total, highest, acc, own, key, value, shared, high, at, begins, finishes, tokens, key_stride, value_stride, scale,
        True, CAUSAL, WINDOW, WIDTH, KEYS,
    )  # fmt: skip
    inside = at < tokens
    tl.store(log_sums + head.to(tl.int64) * tokens + at, highest + tl.log2(total), mask=inside)
    place = at[:, None].to(tl.int64) * out_stride + head * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _query_blocks(
    acc, query, grad, log_sum, delta, key, value, begin, finish, at, starts, ends, tokens, key_stride, value_stride, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    for start in range(begin, finish, KEYS):
        keys = start + tl.arange(0, KEYS)
        own = _rows(key, keys, key_stride, tokens, WIDTH)
        chances = tl.exp2(tl.dot(query, tl.trans(own)) * scale - log_sum[:, None])
        if MASKED:
            chances = tl.where(_visible(at[:, None], keys[None, :], starts[:, None], ends[:, None], CAUSAL, WINDOW), chances, 0.0)
        pulled = tl.dot(grad, tl.trans(_rows(value, keys, value_stride, tokens, WIDTH)))
        acc = tl.dot((chances * (pulled - delta[:, None])).to(own.dtype), own, acc)
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _query_gradient(
    query, key, value, out, grad, log_sums, deltas, for_query, starts, ends, order, tokens, query_at, query_stride, key_at, key_stride,
    value_at, value_stride, out_stride, to_query, for_stride, scale, factor, group, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    first = tl.load(order + tl.program_id(1)) * QUERIES
    at = first + tl.arange(0, QUERIES)
    last = tl.minimum(first + QUERIES, tokens) - 1
    inside = at < tokens
    begins = tl.load(starts + at, mask=inside, other=0)
    finishes = tl.load(ends + at, mask=inside, other=0)
    own = _rows(query + query_at + head * WIDTH, at, query_stride, tokens, WIDTH)
    down = _rows(grad + head * WIDTH, at, out_stride, tokens, WIDTH)
    result = _rows(out + head * WIDTH, at, out_stride, tokens, WIDTH)
    delta = tl.sum(down.to(tl.float32) * result.to(tl.float32), 1)
    tl.store(deltas + head.to(tl.int64) * tokens + at, delta, mask=inside)
    log_sum = tl.load(log_sums + head.to(tl.int64) * tokens + at, mask=inside, other=0.0)
    key += key_at + head // group * WIDTH
    value += value_at + head // group * WIDTH
    low, clear, shared, high = _key_range(first, last, starts, ends, tokens, CAUSAL, WINDOW, KEYS)
    acc = tl.zeros((QUERIES, WIDTH), tl.float32)
    acc = _query_blocks(acc, own, down, log_sum, delta, key, value, low, clear, at, begins, finishes, tokens, key_stride, value_stride,
                        scale, True, CAUSAL, WINDOW, WIDTH, KEYS)  # fmt: skip
    acc = _query_blocks(acc, own, down, log_sum, delta, key, value, clear, shared, at, begins, finishes, tokens, key_stride, value_stride,
                        scale, False, CAUSAL, WINDOW, WIDTH, KEYS)  # fmt: skip
    acc = _query_blocks(acc, own, down, log_sum, delta, key, value, shared, high, at, begins, finishes, tokens, key_stride, value_stride,
                        scale, True, CAUSAL, WINDOW, WIDTH, KEYS)  # fmt: skip
    place = at[:, None].to(tl.int64) * for_stride + to_query + head * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(for_query + place, (acc * factor).to(for_query.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _key_blocks(
    for_key, for_value, own_key, own_value, query, grad, log_sums, deltas, begin, finish, at, starts, ends, tokens, query_stride,
    grad_stride, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    for start in range(begin, finish, QUERIES):
        queries = start + tl.arange(0, QUERIES)
        inside = queries < tokens
        own = _rows(query, queries, query_stride, tokens, WIDTH)
        log_sum = tl.load(log_sums + queries, mask=inside, other=0.0)
        chances = tl.exp2(tl.dot(own_key, tl.trans(own)) * scale - log_sum[None, :])
        if MASKED:
            # Both lie in one piece, so the piece of the key says what that of the query would.
            seen = (queries[None, :] >= starts[:, None]) & (queries[None, :] < ends[:, None])
            if CAUSAL:
                seen &= queries[None, :] >= at[:, None]
            if WINDOW > 0:
                seen &= at[:, None] > queries[None, :] - WINDOW
            chances = tl.where(seen, chances, 0.0)
        down = _rows(grad, queries, grad_stride, tokens, WIDTH)
        for_value = tl.dot(chances.to(down.dtype), down, for_value)
        delta = tl.load(deltas + queries, mask=inside, other=0.0)
        pulled = tl.dot(own_value, tl.trans(down))
        for_key = tl.dot((chances * (pulled - delta[None, :])).to(own.dtype), own, for_key)
    return for_key, for_value


@triton.jit(do_not_specialize=["tokens"])
def _key_gradient(
    query, key, value, grad, log_sums, deltas, for_key, for_value, starts, ends, order, tokens, query_at, query_stride, key_at, key_stride,
    value_at, value_stride, grad_stride, to_key, for_key_stride, to_value, for_value_stride, scale, factor, group,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    first = tl.load(order + tl.program_id(1)) * KEYS
    at = first + tl.arange(0, KEYS)
    last = tl.minimum(first + KEYS, tokens) - 1
    inside = at < tokens
    begins = tl.load(starts + at, mask=inside, other=tokens)
    finishes = tl.load(ends + at, mask=inside, other=0)
    own_key = _rows(key + key_at + kv_head * WIDTH, at, key_stride, tokens, WIDTH)
    own_value = _rows(value + value_at + kv_head * WIDTH, at, value_stride, tokens, WIDTH)
    # Queries [low, high) may see one of these keys; from `clear` to `shared` all of them are seen.
    high = tl.load(ends + last)
    shared = tl.load(ends + first)
    if WINDOW > 0:
        high = tl.minimum(high, last + WINDOW)
        shared = tl.minimum(shared, first + WINDOW)
    low, clear = (first, last) if CAUSAL else (tl.load(starts + first), tl.load(starts + last))
    low = low // QUERIES * QUERIES
    clear = tl.minimum((clear + QUERIES - 1) // QUERIES * QUERIES, high)
    shared = tl.maximum(shared // QUERIES * QUERIES, clear)
    sum_key = tl.zeros((KEYS, WIDTH), tl.float32)
    sum_value = tl.zeros((KEYS, WIDTH), tl.float32)
    for member in range(group):
        head = kv_head * group + member
        own_query, own_grad = query + query_at + head * WIDTH, grad + head * WIDTH
        sums, own_deltas = log_sums + head.to(tl.int64) * tokens, deltas + head.to(tl.int64) * tokens
        sum_key, sum_value = _key_blocks(
            sum_key, sum_value, own_key, own_value, own_query, own_grad, sums, own_deltas, low, clear, at, begins, finishes, tokens,
            query_stride, grad_stride, scale, True, CAUSAL, WINDOW, WIDTH, QUERIES,
        )  # fmt: skip
        sum_key, sum_value = _key_blocks(
            sum_key, sum_value, own_key, own_value, own_query, own_grad, sums, own_deltas, clear, shared, at, begins, finishes, tokens,
            query_stride, grad_stride, scale, False, CAUSAL, WINDOW, WIDTH, QUERIES,
        )  # fmt: skip
        sum_key, sum_value = _key_blocks(
            sum_key, sum_value, own_key, own_value, own_query, own_grad, sums, own_deltas, shared, high, at, begins, finishes, tokens,
            query_stride, grad_stride, scale, True, CAUSAL, WINDOW, WIDTH, QUERIES,
        )  # fmt: skip
    column = kv_head * WIDTH + tl.arange(0, WIDTH)[None, :]
    row = at[:, None].to(tl.int64)
    tl.store(for_key + to_key + row * for_key_stride + column, (sum_key * factor).to(for_key.dtype.element_ty), mask=inside[:, None])
    tl.store(for_value + to_value + row * for_value_stride + column, sum_value.to(for_value.dtype.element_ty), mask=inside[:, None])


FORWARD = {"QUERIES": TILE, "KEYS": 64, "num_warps": 4, "num_stages": 3}
FOR_QUERY = {"QUERIES": TILE, "KEYS": 32, "num_warps": 4, "num_stages": 3}
FOR_KEY = {"QUERIES": 64, "KEYS": TILE, "num_warps": 4, "num_stages": 2}
"""Tiles and warps of the three kernels."""


def _places(parts: Sequence[torch.Tensor], counts: Sequence[int], width: int) -> list[tuple[torch.Tensor, int, int]]:
    """Of queries, keys and values: the tensor that holds them, where in its rows they begin, and how far apart rows are.

    Numbers instead of slices: making one takes the host longer than passing two.
    """
    found: list[tuple[torch.Tensor, int, int]] = []
    for part in parts:
        at = 0
        while at < part.shape[1]:
            found.append((part, at * width, part.stride(0)))
            at += counts[len(found) - 1]
    return found


class _RaggedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pieces: Pieces, counts: tuple[int, int, int], scale: float, causal: bool, window: int, *parts: torch.Tensor
    ) -> torch.Tensor:
        tokens, _, width = parts[0].shape
        heads = counts[0]
        (query, *query_at), (key, *key_at), (value, *value_at) = _places(parts, counts, width)
        out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
        log_sums = torch.empty((heads, tokens), dtype=torch.float32, device=query.device)
        _forward[(heads, len(pieces.query_order))](
            query, key, value, out, log_sums, pieces.starts, pieces.ends, pieces.query_order, tokens, *query_at, *key_at, *value_at,
            heads * width, scale * _LOG2E, heads // counts[1], CAUSAL=causal, WINDOW=window, WIDTH=width, **FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(out, log_sums, *parts)
        ctx.rule = pieces, counts, scale, causal, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        out, log_sums, *parts = ctx.saved_tensors
        pieces, counts, scale, causal, window = ctx.rule
        grad = grads[0].contiguous()
        tokens, heads, width = out.shape
        (query, *query_at), (key, *key_at), (value, *value_at) = _places(parts, counts, width)
        results = [torch.empty(part.shape, dtype=part.dtype, device=part.device) for part in parts]
        (for_query, *to_query), (for_key, *to_key), (for_value, *to_value) = _places(results, counts, width)
        deltas = torch.empty_like(log_sums)
        rule = {"CAUSAL": causal, "WINDOW": window, "WIDTH": width}
        places = (*query_at, *key_at, *value_at, heads * width)
        group = heads // counts[1]
        _query_gradient[(heads, len(pieces.query_order))](
            query, key, value, out, grad, log_sums, deltas, for_query, pieces.starts, pieces.ends, pieces.query_order, tokens, *places,
            *to_query, scale * _LOG2E, scale, group, **rule, **FOR_QUERY,
        )  # fmt: skip
        _key_gradient[(counts[1], len(pieces.key_order))](
            query, key, value, grad, log_sums, deltas, for_key, for_value, pieces.starts, pieces.ends, pieces.key_order, tokens, *places,
            *to_key, *to_value, scale * _LOG2E, scale, group, **rule, **FOR_KEY,
        )  # fmt: skip
        return (None, None, None, None, None, *results)


def ragged_attention(
    parts: Sequence[torch.Tensor], counts: tuple[int, int, int], pieces: Pieces, *, scale: float, causal: bool, window: int = 0
) -> torch.Tensor:
    """(tokens, heads, width) attention of each token to the tokens of its piece.

    `parts` are one to three (tokens, heads, width) tensors that hold queries, keys and values, of `counts` heads, in this order: gradients
    come back in tensors of the same kind, so that a joint product of the three needs no joining of its gradients. With `window` a query
    sees the last `window` keys up to its own.
    """
    result: torch.Tensor = _RaggedAttention.apply(pieces, counts, scale, causal, window, *parts)
    return result
