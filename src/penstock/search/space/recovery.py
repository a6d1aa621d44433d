"""What recomputation can bring back at best, op by op: the part of memory that a bound from ops alone knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.costs.table import Floats
from penstock.models.kept import KeptPart, kept_parts, shortened
from penstock.models.ops import Model
from penstock.models.shapes import NOTHING, Quantity, Shape
from penstock.search.space.stage_costs import Ints

__all__ = ["Recovery"]

PARTS = 6
"""Parts that are told apart of what an op keeps; more of them than this count as one that nothing brings back."""


@dataclass(frozen=True)
class Recovery:
    """What each of the O distinct ops keeps, in P parts; of an op whose copies keep different amounts, the one that keeps least."""

    sizes: tuple[tuple[Quantity, ...], ...]
    makers: Ints
    """[O, P] the distinct op that must run again to bring a part back; -1 where nothing does."""
    shares: Floats
    """[O, P] how much of that op's time the part answers for: it runs once for all that it brings back."""
    made: tuple[Quantity, ...]
    """What is kept of that which each op makes, whoever keeps it: no longer kept if the op and the next one are recomputed."""
    passed: tuple[Quantity, ...]
    """What was made in an op's block up to it and is kept behind it: by the next stage, if the op is the last of its own."""

    @classmethod
    def of(cls, model: Model) -> Recovery:
        """Reads them from the chain."""
        short, stands_for = shortened(model)
        number = {op.signature: index for index, op in enumerate(model.distinct_ops)}
        chain, kept = [number[place.op.signature] for place in short.ops], kept_parts(short)
        runs = Counter(part.maker for parts in kept for part in parts if part.inside)
        copies, made = [0.0] * len(number), [NOTHING] * len(number)
        for op, weight in zip(chain, stands_for, strict=True):
            copies[op] += weight
        for weight, parts in zip(stands_for, kept, strict=True):
            for part in parts:
                if part.maker >= 0:
                    made[chain[part.maker]] = made[chain[part.maker]] + part.size_bytes * weight
        least: dict[int, tuple[KeptPart, ...]] = {}
        for op, parts in zip(chain, kept, strict=True):
            if op not in least or _amount(short, parts) < _amount(short, least[op]):
                least[op] = parts
        sizes, makers, shares = [], np.full((len(number), PARTS), -1), np.zeros((len(number), PARTS))
        for op in range(len(number)):
            own, rest = least[op][: PARTS - 1], least[op][PARTS - 1 :]
            for p, part in enumerate(own):
                if part.inside:
                    makers[op, p], shares[op, p] = chain[part.maker], 1 / runs[part.maker]
            blank = (NOTHING,) * (PARTS - 1 - len(own))
            sizes.append((*(part.size_bytes for part in own), *blank, sum((part.size_bytes for part in rest), NOTHING)))
        means = tuple(total * (1 / count) for total, count in zip(made, copies, strict=True))
        return cls(tuple(sizes), makers, shares, means, _passed(short, chain, kept))

    @cached_property
    def _known(self) -> dict[tuple[Shape, int], Floats]:
        return {}

    def bytes_at(self, shape: Shape, tp: int) -> Floats:
        """[O, P] on one of `tp` ranks."""
        if (shape, tp) not in self._known:
            sizes = [[size.at(shape, tp) if size is not NOTHING else 0.0 for size in row] for row in self.sizes]
            self._known[shape, tp] = np.array(sizes)
        return self._known[shape, tp]

    def least_s(self, forward_s: Floats) -> Floats:
        """[O, P] time that bringing a part back takes at least, given the forward times of the distinct ops."""
        return np.where(self.makers < 0, np.inf, forward_s[self.makers] * self.shares)


def _passed(model: Model, chain: list[int], kept: tuple[tuple[KeptPart, ...], ...]) -> tuple[Quantity, ...]:
    """For each distinct op the bytes made in its block up to it that later ops keep: the most of all its copies."""
    total = [NOTHING] * len(chain)
    for keeper, parts in enumerate(kept):
        for part in parts:
            for op in range(max(part.maker, 0), keeper) if part.maker >= 0 else ():
                if (model.ops[op].block, model.ops[op].copy) == (model.ops[part.maker].block, model.ops[part.maker].copy):
                    total[op] = total[op] + part.size_bytes
    most = [NOTHING] * (max(chain) + 1)
    for op, amount in zip(chain, total, strict=True):
        most[op] = max(most[op], amount, key=lambda found: found.at(model.usual_shape(1)))
    return tuple(most)


def _amount(model: Model, parts: tuple[KeptPart, ...]) -> float:
    return sum(part.size_bytes.at(model.usual_shape(1)) for part in parts)
