"""What no split of a batch into padded micro-batches can beat, as a linear programme whose columns are micro-batches.

    least T, x ≥ 0:    replicas · (T - reach of s) ≥ Σ x · seconds on stage s                        for every stage s    price λ
                       replicas · (T - reach of s) ≥ Σ x · room and seconds held on s / its room     for every stage s    price μ
                       Σ x · what its samples count ≥ what all samples count                                              price θ

A micro-batch holds its peaks during its own passes, and what it keeps for as long as it is away at later stages; so much room and time
each stage has. Few of all columns matter, and prices find them: if every sample is worth what θ says, the dearest samples of a rectangle of
lengths are its best column. Whatever the prices are, divided by the most that a column is worth of its own price they prove a bound.

Thousands of samples need no price each: worth is a sum of hats over a grid of the two lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.batching.costs import Floats, PipelineCosts
from penstock.batching.ordering import Ints
from penstock.batching.split import best_splits

__all__ = ["FEW_KNOTS", "KNOTS", "Prices", "column_bound_s"]

FEW_KNOTS, KNOTS = (6,), (4, 8, 12)
"""Of hats along a length: this many at equal shares of the samples, half as many at equal distances. Prices of few settle
soon; with few alone the bound is some three percent lower, in a tenth of the time."""
ROUNDS = 30
"""Most times that columns are added, with each number of knots."""
ENOUGH = 0.01
"""Of the programme's value: what may be missing when the search for better prices ends."""
SMOOTH = 0.3
"""How far prices that are tried lie from the programme's, which jump from round to round, towards the best so far."""
MOST_LINES = 256
"""Lengths that are told apart; of more, neighbours share a line: they fit where the longest does and pay as the shortest."""
_LEAST = 0.98
"""Columns worth less of their price need not be known exactly."""
_COLUMNS = 8
"""For each hat, so many columns are kept before the dearest are forgotten."""
_WORTH_MORE = 1 + 1e-6
"""Of its price, for a column to be added."""


@dataclass(frozen=True)
class Prices:
    """Dual prices of the linear programme: of a second on each stage, of its memory for a second (all of them sum to 1), and the worth of
    each sample."""

    time: Floats
    room: Floats
    worth: Floats

    def towards(self, other: Prices, part: float) -> Prices:
        """Prices on the way from these (`part` 0) to others (1)."""
        pairs = ((self.time, other.time), (self.room, other.room), (self.worth, other.worth))
        return Prices(*((1 - part) * own + part * there for own, there in pairs))

    def value_s(self, reach: Floats) -> float:
        """What they prove if no column is worth more than its price."""
        return float(self.worth.sum() + (self.time + self.room) @ reach)


def column_bound_s(costs: PipelineCosts, enc: Ints, dec: Ints, reach: Floats, known: Prices, rising: Sequence[int]) -> float:
    """The best bound found, from prices on that prove one already; `costs` know of as many rows as there are samples."""
    columns, best = _Columns(costs, enc, dec), known
    split = best_splits(costs, enc, dec)[0]
    columns.add([split.order[first:last] for first, last in pairwise(split.cuts)], known)
    for knots in rising:
        hats = np.einsum("ia,ib->iab", _hats(enc, knots), _hats(dec, knots)).reshape(len(enc), -1)
        hats = hats[:, hats.any(axis=0)]
        for _ in range(ROUNDS):
            asked, value_s = columns.solve(hats, reach)
            if best.value_s(reach) >= (1 - ENOUGH) * value_s:
                break
            for part in (SMOOTH, 0.0):  # the programme's own prices only where it knows all that matters at the others
                tried = asked.towards(best, part)
                found, most = columns.worth_most(tried)
                best = max(best, replace(tried, worth=tried.worth / most), key=lambda prices: prices.value_s(reach))
                if found:
                    break
            else:
                break
            columns.add(found, tried)
    return best.value_s(reach)


def _hats(lengths: Ints, num: int) -> Floats:
    """[samples, knots] by which each length counts: linear between knots, 1 in all."""
    distinct = np.unique(lengths).astype(np.float64)
    knots = np.append(np.quantile(lengths, np.linspace(0, 1, num)), np.linspace(distinct[0], distinct[-1], num // 2))
    knots = distinct if len(distinct) <= num else np.unique(knots)
    return np.stack([np.interp(lengths, knots, one) for one in np.eye(len(knots))], axis=1)


def _lines(lengths: Ints) -> Ints:
    """[2, lines] shortest and longest length of each."""
    distinct = np.unique(lengths)
    last = np.unique(np.linspace(0, len(distinct), min(len(distinct), MOST_LINES) + 1).round().astype(np.int64)[1:] - 1)
    return np.stack([distinct[np.append(0, last[:-1] + 1)], distinct[last]])


class _Columns:
    """Micro-batches of a batch: those known so far, and those that prices find."""

    def __init__(self, costs: PipelineCosts, enc: Ints, dec: Ints) -> None:
        unit = costs.round_to
        self.costs, self.enc, self.dec = costs, -(-enc // unit) * unit, -(-dec // unit) * unit
        self.lines, self.lines_dec = _lines(self.enc), _lines(self.dec)
        self.first = 0
        """So many columns hold each sample once, and are never forgotten."""
        self.members: list[Ints] = []
        self.loads: list[Floats] = []
        """[2 S] seconds on each stage, and share of its room · seconds."""

    def worth_most(self, prices: Prices) -> tuple[list[Ints], float]:
        """For each line of lengths the column worth most of its price, where that is more than all of it; and the most of all columns."""
        from penstock.batching.bounds.column_kernels import price_columns

        dearest, replicas = np.argsort(-prices.worth, kind="stable"), self.costs.num_replicas
        shape = self.lines.shape[1], self.lines_dec.shape[1]
        ratio, count = np.empty(shape), np.empty(shape, dtype=np.int64)
        price_columns(
            self.costs.tables, self.enc[dearest], self.dec[dearest], prices.worth[dearest], self.lines, self.lines_dec,
            prices.time / replicas, prices.room / replicas, _LEAST, ratio, count,
        )  # fmt: skip
        best = {(i, int(ratio[i].argmax())) for i in range(shape[0])} | {(int(ratio[:, j].argmax()), j) for j in range(shape[1])}
        found = [self._first(dearest, i, j, count[i, j]) for i, j in sorted(best) if ratio[i, j] > _WORTH_MORE]
        return found, max(float(ratio.max()), _LEAST)

    def _first(self, dearest: Ints, i: int, j: int, count: int) -> Ints:
        inside: NDArray[np.bool_] = (self.enc[dearest] <= self.lines[1, i]) & (self.dec[dearest] <= self.lines_dec[1, j])
        return dearest[inside][:count]

    def add(self, found: Sequence[Ints], prices: Prices) -> None:
        """Columns of these samples, in the modes that are cheapest at these prices."""
        from penstock.batching.bounds.column_kernels import column_loads

        rows = np.array([len(members) for members in found], dtype=np.int64)
        row, row_dec = (
            lines[0, np.searchsorted(lines[1], [lengths[members].max() for members in found])]
            for lengths, lines in ((self.enc, self.lines), (self.dec, self.lines_dec))
        )
        loads = np.empty((len(found), 2, self.costs.num_stages))
        column_loads(self.costs.tables, rows, row, row_dec, prices.time, prices.room, loads)
        self.first = self.first or len(found)
        self.members += found
        self.loads += list(loads.reshape(len(found), -1))

    def solve(self, hats: Floats, reach: Floats) -> tuple[Prices, float]:
        """Prices and value of the programme over the columns known, with samples counted by hats [samples, hats]."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        stages, replicas = len(reach), self.costs.num_replicas
        all_ = np.concatenate(self.members)
        inside = csr_matrix((np.ones(len(all_)), all_, np.append(0, np.cumsum([len(one) for one in self.members]))), dtype=np.float64)
        rows = np.block(
            [
                [np.stack(self.loads, axis=1), np.full((2 * stages, 1), -float(replicas))],
                [-(inside @ hats).T, np.zeros((hats.shape[1], 1))],
            ]
        )
        right = np.concatenate([-replicas * np.tile(reach, 2), -hats.sum(axis=0)])
        found = linprog(np.append(np.zeros(len(self.members)), 1.0), A_ub=rows, b_ub=right, method="highs-ds")
        price = np.maximum(-found.ineqlin.marginals, 0.0)
        if len(self.members) > _COLUMNS * hats.shape[1]:
            first = np.arange(self.first)
            kept = np.append(first, np.setdiff1d(np.argsort(price @ rows[:, :-1])[: _COLUMNS // 2 * hats.shape[1]], first))
            self.members, self.loads = [self.members[c] for c in kept], [self.loads[c] for c in kept]
        share = price[: 2 * stages] / price[: 2 * stages].sum()
        return Prices(share[:stages], share[stages:], hats @ price[2 * stages :]), float(found.fun)
