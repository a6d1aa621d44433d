"""GPU kernels for what torch runs as several: norms with all their gradients, the loss over a large vocabulary, sums of columns, and AdamW
for half-precision weights with fp32 masters.

Each reads its input once. Sums are in fp32 and in a fixed order. Numbers of rows are not specialised: they change with every micro-batch,
and a kernel must not be compiled again for one that happens not to divide by 16. Numbers of values are: only what is known to divide by 16
is read in wide words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = [
    "adamw", "add_column_sums", "column_parts", "cross_entropy", "cross_entropy_gradient", "gelu", "gelu_gradient", "norm", "norm_gradient",
]  # fmt: skip

_LOSS_BLOCK = 4096
_FLAT_BLOCK = 1024


class _Tile(NamedTuple):
    """Rows and columns that a program sums at once, its warps, and how many programs share the rows of one GPU's processor."""

    rows: int
    columns: int
    warps: int
    programs: int


_SUMS = _Tile(32, 128, 4, 8)
_GELU = _Tile(16, 256, 8, 8)
_PARTS = _Tile(64, 16, 4, 0)


@triton.jit
def _norm(x, weight, bias, y, mean, rstd, width, eps, RMS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        centre = tl.sum(value, 0) / width
        tl.store(mean + row, centre)
        value = tl.where(inside, value - centre, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    tl.store(rstd + row, scale)
    result = value * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        result += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + at, result, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_gradient(
    grad, x, weight, mean, rstd, added, dx, weight_parts, bias_parts, dx_parts, rows, width, RMS: tl.constexpr, ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    for_weight = tl.zeros((BLOCK,), tl.float32)
    for_bias = tl.zeros((BLOCK,), tl.float32)
    of_dx = tl.zeros((BLOCK,), tl.float32)
    place = first.to(tl.int64) * width + at
    for row in range(first, rows, tl.num_programs(0)):
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        if not RMS:
            value = tl.where(inside, value - tl.load(mean + row), 0.0)
            for_bias += own
        hat = value * scale
        for_weight += own * hat
        own = own * factor
        result = own - hat * (tl.sum(own * hat, 0) / width)
        if not RMS:
            result -= tl.sum(own, 0) / width
        result = result * scale
        if ADDED:
            result += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        rounded = result.to(dx.dtype.element_ty)
        tl.store(dx + place, rounded, mask=inside)
        if not RMS:
            of_dx += rounded.to(tl.float32)
        place += tl.num_programs(0).to(tl.int64) * width
    tl.store(weight_parts + first * width + at, for_weight, mask=inside)
    if not RMS:
        tl.store(bias_parts + first * width + at, for_bias, mask=inside)
        tl.store(dx_parts + first * width + at, of_dx, mask=inside)


@triton.jit
def _cross_entropy(logits, labels, log_sums, picked, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    highest = -float("inf")
    total = 0.0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
        above = tl.maximum(highest, tl.max(value, 0))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(value - above), 0)
        highest = above
    tl.store(log_sums + row, highest + tl.log(total))
    mine = label >= 0
    tl.store(picked + row, tl.load(logits + row * vocab + label, mask=mine, other=0.0).to(tl.float32))


@triton.jit
def _cross_entropy_gradient(logits, labels, log_sums, scales, result, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label, whole, scale = tl.load(labels + row), tl.load(log_sums + row), tl.load(scales + row)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * vocab + at, mask=at < vocab, other=0.0).to(tl.float32)
        chance = tl.exp(value - whole) - tl.where(at == label, 1.0, 0.0)
        tl.store(result + row * vocab + at, chance * scale, mask=at < vocab)


@triton.jit(do_not_specialize=["rows", "share"])
def _column_sums(x, parts, rows, width, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    last = tl.minimum((part + 1) * share, rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * share, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (at < width)[None, :]
        total += tl.load(x + row[:, None].to(tl.int64) * width + at[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + part * width + at, tl.sum(total, 0), mask=at < width)


@triton.jit(do_not_specialize=["count"])
def _add_columns(parts, result, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        part = start + tl.arange(0, ROWS)
        total += tl.load(parts + part[:, None] * width + at[None, :], mask=(part < count)[:, None] & inside[None, :], other=0.0)
    tl.store(result + at, tl.load(result + at, mask=inside, other=0.0).to(tl.float32) + tl.sum(total, 0), mask=inside)


@triton.jit
def _gelu(x, y, count, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    if TANH:
        result = value / (1.0 + tl.exp(-1.5957691216057308 * value * (1.0 + 0.044715 * value * value)))
    else:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(y + at, result, mask=at < count)


@triton.jit(do_not_specialize=["rows", "share"])
def _gelu_gradient(grad, x, dx, parts, rows, width, share, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    last = tl.minimum((part + 1) * share, rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(part * share, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (at < width)[None, :]
        place = row[:, None].to(tl.int64) * width + at[None, :]
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if TANH:
            square = value * value
            bent = 1.0 - 2.0 / (tl.exp(1.5957691216057308 * value * (1.0 + 0.044715 * square)) + 1.0)  # tanh
            slope = 0.5 * (1.0 + bent) + 0.5 * value * (1.0 - bent * bent) * 0.7978845608028654 * (1.0 + 0.134145 * square)
        else:
            slope = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476)) + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
        result = (own * slope).to(dx.dtype.element_ty)
        tl.store(dx + place, result, mask=inside)
        total += result.to(tl.float32)
    tl.store(parts + part * width + at, tl.sum(total, 0), mask=at < width)


@triton.jit
def _adamw(
    weight, grad, master, average, square, factor, count, shift, lr, first, second, eps, decay, first_sum, second_sum, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    own = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
    place = shift + at
    mean = tl.load(average + place, mask=inside, other=0.0)
    mean += (1 - first) * (own - mean)
    spread = second * tl.load(square + place, mask=inside, other=0.0) + (1 - second) * own * own
    value = tl.load(master + place, mask=inside, other=0.0) * (1 - lr * decay)
    value -= lr / first_sum * mean / (tl.sqrt(spread) / tl.sqrt(second_sum) + eps)
    tl.store(average + place, mean, mask=inside)
    tl.store(square + place, spread, mask=inside)
    tl.store(master + place, value, mask=inside)
    tl.store(weight + at, value, mask=inside)


def _block(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 1024))}


def _programs(device: torch.device) -> int:
    """About as many as run at once."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, rms: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Layer norm, or RMS norm, of each row: (result, means, reciprocal deviations)."""
    rows, width = x.shape
    y, rstd = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = None if rms else torch.empty_like(rstd)
    _norm[(rows,)](x, weight, bias, y, mean, rstd, width, eps, RMS=rms, BIAS=bias is not None, **_block(width))
    return y, mean, rstd


def norm_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mean: torch.Tensor | None, rstd: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the input (plus `added`), and (sums, programs, width) parts of the columns' sums that are the gradients of weight and, of
    a layer norm, bias; its last are those of the gradient of the input."""
    rows, width = x.shape
    programs = min(rows, _programs(x.device))
    dx = torch.empty_like(x)
    parts = torch.empty((1 if mean is None else 3, programs, width), dtype=torch.float32, device=x.device)
    for_bias, of_dx = (parts[0], None) if mean is None else (parts[1], parts[2])
    _norm_gradient[(programs,)](
        grad, x, weight, mean, rstd, added, dx, parts[0], for_bias, of_dx, rows, width, RMS=mean is None, ADDED=added is not None,
        **_block(width),
    )  # fmt: skip
    return dx, parts


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of each row and the logit of its label, 0 where that is negative."""
    rows, vocab = logits.shape
    log_sums, picked = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    _cross_entropy[(rows,)](logits, labels, log_sums, picked, vocab, BLOCK=_LOSS_BLOCK, num_warps=8)
    return log_sums, picked


def cross_entropy_gradient(logits: torch.Tensor, labels: torch.Tensor, log_sums: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """scale × (exp(logit - log-sum) - 1 at the label) of each row."""
    result = torch.empty_like(logits)
    rows, vocab = logits.shape
    _cross_entropy_gradient[(rows,)](logits, labels, log_sums, scales, result, vocab, BLOCK=_LOSS_BLOCK, num_warps=8)
    return result


def _column_grid(rows: int, width: int, tile: _Tile, device: torch.device) -> tuple[int, int, int]:
    """Programs over columns, programs over rows, and the rows of each."""
    columns = triton.cdiv(width, tile.columns)
    splits = max(1, min(triton.cdiv(rows, 4 * tile.rows), tile.programs * _programs(device) // (4 * columns)))
    return columns, splits, triton.cdiv(rows, splits)


def column_parts(x: torch.Tensor) -> torch.Tensor:
    """(parts, width) fp32 sums of some rows each; added up, the sum of each column."""
    rows, width = x.shape
    columns, splits, share = _column_grid(rows, width, _SUMS, x.device)
    parts = torch.empty((splits, width), dtype=torch.float32, device=x.device)
    _column_sums[(columns, splits)](x, parts, rows, width, share, ROWS=_SUMS.rows, COLUMNS=_SUMS.columns, num_warps=_SUMS.warps)
    return parts


def add_column_sums(parts: torch.Tensor, result: torch.Tensor) -> None:
    """Adds to `result` the sums of which `column_parts` made parts."""
    count, width = parts.shape
    _add_columns[(triton.cdiv(width, _PARTS.columns),)](
        parts, result, count, width, ROWS=_PARTS.rows, COLUMNS=_PARTS.columns, num_warps=_PARTS.warps
    )


def gelu(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """GELU of each value."""
    y = torch.empty_like(x)
    _gelu[(triton.cdiv(x.numel(), _FLAT_BLOCK),)](x, y, x.numel(), TANH=tanh, BLOCK=_FLAT_BLOCK, num_warps=4)
    return y


def gelu_gradient(grad: torch.Tensor, x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """grad × gelu'(x), and the parts of its columns' sums."""
    rows, width = x.shape
    columns, splits, share = _column_grid(rows, width, _GELU, x.device)
    dx = torch.empty_like(x)
    parts = torch.empty((splits, width), dtype=torch.float32, device=x.device)
    _gelu_gradient[(columns, splits)](
        grad, x, dx, parts, rows, width, share, TANH=tanh, ROWS=_GELU.rows, COLUMNS=_GELU.columns, num_warps=_GELU.warps
    )
    return dx, parts


def adamw(
    weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, average: torch.Tensor, square: torch.Tensor, shift: int,
    factor: torch.Tensor, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    """One update of flat `weight` from flat `grad` × `factor`; its fp32 state lies at `shift` of the other three."""
    sums = [1.0 - beta**step for beta in betas]
    _adamw[(triton.cdiv(weight.numel(), _FLAT_BLOCK),)](
        weight, grad, master, average, square, factor, weight.numel(), shift, lr, *betas, eps, weight_decay, *sums, BLOCK=_FLAT_BLOCK,
        num_warps=4,
    )  # fmt: skip
