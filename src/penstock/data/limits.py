"""How long samples may be, and what stays of those that are longer: one rule for lengths that are planned and tokens that are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["NO_LIMITS", "Limits"]

Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """The most tokens of each side (input, target), and of two sides together where they stand end to end.

        input ████████████░░░░░░   target ██████           too long together: the longer side is cut,
        input █████████░░░░        target █████████░░░     but to no less than half of what both may have; then the other too

    >>> [int(side) for side in Limits(together=10).kept([12, 3])]
    [7, 3]
    """

    sides: tuple[int | None, ...] = ()
    """The first tokens of each side stay; None, or no entry: all of them."""
    together: int | None = None
    """None: any number."""

    def kept(self, lengths: Sequence[Ints | int]) -> list[Ints]:
        """Tokens that stay of each side of samples, given how many each side has."""
        own = [np.asarray(side) if limit is None else np.minimum(side, limit) for side, limit in zip_longest(lengths, self.sides)]
        if self.together is None or len(own) != 2:
            return own
        target = np.minimum(own[1], np.maximum(self.together - own[0], self.together // 2))
        return [np.minimum(own[0], self.together - target), target]

    def suit(self, num_sides: int) -> bool:
        """Whether samples with so many sides can be held to these limits."""
        given = [limit for limit in self.sides if limit is not None]
        return len(self.sides) <= num_sides and min(given, default=1) >= 1 and (self.together is None or self.together >= num_sides == 2)

    def most(self, num_sides: int) -> float:
        """Tokens that no sample exceeds; infinite where a side may have any number."""
        given = [limit for limit in self.sides if limit is not None]
        every = float(sum(given)) if len(given) == num_sides else np.inf
        return every if self.together is None else min(every, self.together)


NO_LIMITS = Limits()
"""Every sample stays whole."""
