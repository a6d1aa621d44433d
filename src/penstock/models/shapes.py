"""The shape of a micro-batch as the cost formulas see it, and linear forms over its features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add, mul
from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["FEATURES", "NOTHING", "Form", "Layout", "Quantity", "Shape", "feature_matrix"]

Layout = Literal["padded", "packed"]

FEATURES = ("one", "samples", "tokens", "squares", "dec_tokens", "dec_squares", "cross")
"""What every amount of work or memory is linear in; `squares` are sums of squared lengths, `cross` of products."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One micro-batch: token positions computed (padding included) and the squares that attention pays for."""

    samples: int
    tokens: int = 0
    squares: int = 0
    dec_tokens: int = 0
    dec_squares: int = 0
    cross: int = 0
    layout: Layout = "padded"

    @classmethod
    def padded(cls, rows: int, length: int, dec_length: int = 0) -> Shape:
        """`rows` samples, each padded to `length` (and `dec_length` on the decoder's side)."""
        return cls(rows, rows * length, rows * length**2, rows * dec_length, rows * dec_length**2, rows * length * dec_length)

    @classmethod
    def packed(cls, lengths: Iterable[int], dec_lengths: Iterable[int] = ()) -> Shape:
        """Sequences laid end to end, attention kept inside each."""
        own, dec = list(lengths), list(dec_lengths)
        cross = sum(a * b for a, b in zip(own, dec, strict=True)) if dec else 0
        return cls(len(own), sum(own), sum(n * n for n in own), sum(dec), sum(n * n for n in dec), cross, "packed")

    @classmethod
    def images(cls, samples: int) -> Shape:
        """Images of the model's own resolution."""
        return cls(samples)

    @property
    def features(self) -> tuple[int, ...]:
        """The values of `FEATURES` for this micro-batch."""
        return (1, self.samples, self.tokens, self.squares, self.dec_tokens, self.dec_squares, self.cross)


def feature_matrix(shapes: Sequence[Shape]) -> NDArray[np.float64]:
    """One row of features per shape."""
    return np.array([shape.features for shape in shapes], dtype=np.float64).reshape(len(shapes), len(FEATURES))


@dataclass(frozen=True, slots=True)
class Form:
    """An amount that is linear in the features of a micro-batch, for example `Form.of(tokens=2 * width)`."""

    coefficients: tuple[float, ...] = (0.0,) * len(FEATURES)

    @classmethod
    def of(cls, **terms: float) -> Form:
        """A form from named terms; a name that is not a feature is refused."""
        unknown = set(terms) - set(FEATURES)
        if unknown:
            raise ValueError(f"unknown features {sorted(unknown)}; known: {FEATURES}")
        return cls(tuple(float(terms.get(name, 0.0)) for name in FEATURES))

    def __call__(self, shape: Shape) -> float:
        amount: float = sum(map(mul, self.coefficients, shape.features))
        return amount

    def __add__(self, other: Form) -> Form:
        return Form(tuple(map(add, self.coefficients, other.coefficients)))

    def __mul__(self, factor: float) -> Form:
        return Form(tuple(c * factor for c in self.coefficients))

    __rmul__ = __mul__

    def terms(self) -> dict[str, float]:
        """The non-zero terms by name."""
        return {name: c for name, c in zip(FEATURES, self.coefficients, strict=True) if c}


_ZERO = Form()


@dataclass(frozen=True, slots=True)
class Quantity:
    """An amount per tensor-parallel rank: `whole` stays on every rank, `split` is divided among them."""

    whole: Form = _ZERO
    split: Form = _ZERO

    def at(self, shape: Shape, tp: int = 1) -> float:
        """The amount on one of `tp` ranks."""
        return self.whole(shape) + self.split(shape) / tp

    def form(self, tp: int = 1) -> Form:
        """The form for one of `tp` ranks."""
        return self.whole + self.split * (1 / tp)

    def __add__(self, other: Quantity) -> Quantity:
        return Quantity(self.whole + other.whole, self.split + other.split)

    def __mul__(self, factor: float) -> Quantity:
        return Quantity(self.whole * factor, self.split * factor)

    __rmul__ = __mul__


NOTHING = Quantity()
