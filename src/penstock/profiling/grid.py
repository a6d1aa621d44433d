"""Which shapes to measure: a coarse geometric grid, made denser where a prediction from its neighbours misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

from penstock.models.ops import Model
from penstock.models.shapes import Layout

__all__ = [
    "GridLimits", "Lengths", "attention_grid", "mixed_lengths", "refine", "spread_lengths", "sweep_lengths", "sweep_size", "usual_lengths",
]  # fmt: skip

_RATIO = 4
"""Sizes of the coarse grid are so many times as large as those before."""
_STRAIGHT = 0.02
"""An interval whose middle lies no further from a straight line is not halved again."""


@dataclass(frozen=True)
class GridLimits:
    """The range of sizes worth measuring on a device: token positions, and samples for images."""

    min_tokens: int
    max_tokens: int
    min_samples: int
    max_samples: int
    depth: int
    """How often an interval of the coarse grid may be halved."""

    @classmethod
    def for_device(cls, kind: str) -> GridLimits:
        """GPUs saturate at thousands of tokens, a CPU at hundreds; a few dozen tell how long the host takes for each op."""
        return cls(64, 65536, 2, 128, 2) if kind == "cuda" else cls(64, 2048, 2, 8, 1)


@dataclass(frozen=True)
class Lengths:
    """A batch to measure: `rows` of `length` (and `dec_length`), or the sequences in `mixed`; images have length 0."""

    rows: int
    length: int = 0
    dec_length: int = 0
    layout: Layout = "padded"
    mixed: tuple[int, ...] = ()


IMAGE_TOKENS = 700
"""Tokens of text that take about as long as an image."""
SPREAD = (0.08, 0.15, 0.22, 0.31, 0.42, 0.59, 0.88, 1.7)
"""Lengths as spread out as those of real text, scaled so that a token sees one unit of keys on average."""


def mixed_lengths(size: int, length: int, longest: int) -> Lengths:
    """A packed batch of `size` tokens in which a token sees `length` keys on average; equal sequences where a mixture does not fit."""
    pattern = [max(1, round(length * share)) for share in SPREAD]
    if pattern[-1] > longest or size < 2 * sum(pattern):
        return Lengths(size // length, length, layout="packed")
    return _mixture(size, length, pattern)


def spread_lengths(size: int, length: int, longest: int) -> Lengths:
    """A packed batch of `size` tokens of lengths as spread out as those of real text, none above `longest`: a token sees about `length`
    keys, fewer where that cuts lengths off. There are as many sequences as in real batches: on a processor each has a price of its own."""
    pattern = [max(1, min(round(length * share), longest)) for share in reversed(SPREAD)]
    return _mixture(size, length, pattern)


def _mixture(size: int, length: int, pattern: Sequence[int]) -> Lengths:
    """Sequences of these lengths in turn, the last one cut to fill `size`."""
    lengths: list[int] = []
    parts = cycle(pattern)
    while (left := size - sum(lengths)) > 0:
        lengths.append(min(next(parts), left))
    return Lengths(len(lengths), length, layout="packed", mixed=tuple(lengths))


def _row_length(model: Model) -> int:
    return min(512, model.seq_length)


def sweep_size(model: Model, size: int) -> int:
    """The nearest size up to `size` that can be measured: whole rows of a usual length, or one row of a power of two."""
    row = _row_length(model)
    if not row:
        return size
    return size // row * row if size >= row else 2 ** (size.bit_length() - 1)


def sweep_lengths(model: Model, size: int) -> Lengths:
    """`sweep_size` token positions in rows of a usual length, or `size` images."""
    if not model.seq_length:
        return Lengths(size)
    whole = sweep_size(model, size)
    length = min(_row_length(model), whole)
    return Lengths(whole // length, length, length if model.dec_length else 0)


def usual_lengths(model: Model, tokens: int) -> list[Lengths]:
    """Batches of about `tokens` as they come in training, one for each layout; of images, one that works a device as hard."""
    if not model.seq_length:
        return [Lengths(max(1, tokens // IMAGE_TOKENS))]
    row, mean = min(700, model.seq_length), min(256, model.seq_length // 2)
    rows = Lengths(max(1, tokens // row), row, row // 2 if model.dec_length else 0)
    return [mixed_lengths(tokens, mean, model.seq_length) if layout == "packed" else rows for layout in model.layouts]


def attention_grid(limits: GridLimits, longest: int, fine: bool = True) -> list[tuple[int, int]]:
    """(token positions, length) pairs, lengths in steps of 2 (of about √2, and shorter ones, if `fine`) up to one that fills it."""
    sizes = [limits.min_tokens * 4**k for k in range(12) if limits.min_tokens * 4**k <= limits.max_tokens]
    lengths = sorted({64 * 2**k for k in range(9)} | ({32} | {96 * 2**k for k in range(8)} if fine else set()))
    return [(size, length) for size in sizes for length in lengths if length <= min(size, longest)]


def refine(
    low: int, high: int, measure: Callable[[int], float | None], *, depth: int = 2, snap: Callable[[int], int] = int
) -> list[tuple[int, float]]:  # fmt: skip
    """Measures sizes from `low` to `high` by factors of 4, then halves (on a log axis) the intervals that bend, `depth` times at most.

    `measure(size)` returns a time, or None where memory does not suffice; larger sizes are then left out. `snap` gives the
    size that can really be measured for one that is wanted. Returned are the sizes of midpoints with the relative error of the
    prediction made for them beforehand: the grid's own held-out test.
    """
    known: dict[int, float] = {}
    size = low
    while size <= high:
        if snap(size) not in known:
            time_s = measure(snap(size))
            if time_s is None:
                break
            known[snap(size)] = time_s
        size *= _RATIO
    errors: list[tuple[int, float]] = []
    sizes = sorted(known)
    for first, second in pairwise(sizes):
        errors += _halve(first, second, known, measure, depth, snap)
    return errors


def _halve(
    first: int, second: int, known: dict[int, float], measure: Callable[[int], float | None], depth: int, snap: Callable[[int], int]
) -> list[tuple[int, float]]:
    """Measures the middle of an interval, and those of its halves where the straight line missed it; sizes with relative errors."""
    middle = snap(round(math.sqrt(first * second)))
    if depth == 0 or not first < middle < second:
        return []
    share = math.log(middle / first) / math.log(second / first)
    predicted = math.exp((1 - share) * math.log(known[first]) + share * math.log(known[second]))
    time_s = measure(middle)
    if time_s is None:
        return []
    known[middle] = time_s
    error = predicted / time_s - 1
    errors = [(middle, error)]
    if abs(error) > _STRAIGHT:
        for a, b in ((first, middle), (middle, second)):
            errors += _halve(a, b, known, measure, depth - 1, snap)
    return errors
