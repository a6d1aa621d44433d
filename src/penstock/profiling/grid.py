"""Which shapes to measure: a coarse geometric grid, made denser where a prediction from its neighbours misses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from penstock.models.ops import Model
from penstock.models.shapes import Layout

__all__ = ["Lengths", "Limits", "attention_grid", "refine", "sweep_lengths"]


@dataclass(frozen=True)
class Limits:
    """The range of sizes worth measuring on a device: token positions, and samples for images."""

    min_tokens: int
    max_tokens: int
    min_samples: int
    max_samples: int
    depth: int
    """How often an interval of the coarse grid may be halved."""

    @classmethod
    def for_device(cls, kind: str) -> Limits:
        """GPUs saturate at thousands of tokens, a CPU at hundreds."""
        return cls(256, 65536, 2, 128, 2) if kind == "cuda" else cls(64, 2048, 2, 8, 1)


@dataclass(frozen=True)
class Lengths:
    """A batch of equal sequences to measure: `rows` of `length` (and `dec_length`); images have length 0."""

    rows: int
    length: int = 0
    dec_length: int = 0
    layout: Layout = "padded"


def sweep_lengths(model: Model, size: int) -> Lengths:
    """`size` token positions in rows of a usual length, or `size` images."""
    if not model.seq_length:
        return Lengths(size)
    length = min(512, size, model.seq_length)
    return Lengths(max(1, size // length), length, min(length, 512) if model.dec_length else 0)


def attention_grid(limits: Limits, longest: int, fine: bool = True) -> list[tuple[int, int]]:
    """(token positions, length) pairs, lengths in steps of 2 (about √2 if `fine`), from short sequences to one that fills the batch."""
    sizes = [limits.min_tokens * 4**k for k in range(12) if limits.min_tokens * 4**k <= limits.max_tokens]
    lengths = sorted({64 * 2**k for k in range(9)} | ({96 * 2**k for k in range(8)} if fine else set()))
    return [(size, length) for size in sizes for length in lengths if length <= min(size, longest)]


def refine(
    low: int, high: int, measure: Callable[[int], float | None], *, ratio: int = 4, depth: int = 2, tolerance: float = 0.02, step: int = 1
) -> list[tuple[int, float]]:
    """Measures sizes from `low` to `high` by factors of `ratio`, then halves (on a log axis) the intervals that bend.

    `measure(size)` returns a time, or None where memory does not suffice; larger sizes are then left out. Returned are the
    sizes of midpoints with the relative error of the prediction made for them beforehand: the grid's own held-out test.
    """
    known: dict[int, float] = {}
    size = low
    while size <= high:
        time_s = measure(size)
        if time_s is None:
            break
        known[size] = time_s
        size *= ratio
    errors: list[tuple[int, float]] = []
    sizes = sorted(known)
    for first, second in pairwise(sizes):
        errors += _halve(first, second, known, measure, depth, tolerance, step)
    return errors


def _halve(
    first: int, second: int, known: dict[int, float], measure: Callable[[int], float | None], depth: int, tolerance: float, step: int
) -> list[tuple[int, float]]:
    middle = round(math.sqrt(first * second) / step) * step
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
    if abs(error) > tolerance:
        for a, b in ((first, middle), (middle, second)):
            errors += _halve(a, b, known, measure, depth - 1, tolerance, step)
    return errors
