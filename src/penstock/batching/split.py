"""Cuts an ordered batch into padded micro-batches: the least total time for each bound τ on the slowest one, by dynamic programming.

    J(τ) = fill · τ + F(τ) / replicas        F: sum of the charges of micro-batches, each ≤ τ

Filling and draining a pipeline of S stages takes about 0.4 · (S - 1) times its largest micro-batch when small ones run first and last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.batching.costs import PipelineCosts
from penstock.batching.ordering import Ints, curves
from penstock.errors import InfeasibleError

__all__ = ["BatchSplit", "Windows", "best_splits", "window_sizes"]

FILL = 0.4
"""Of the largest micro-batch, for each stage but one."""
BOUNDS = 16
"""Values of τ that are tried, in a geometric series."""
SPREAD = 8.0
"""From the least possible τ to this many times it."""
_KEPT = 6
"""Splits that are looked at further."""
_COARSE, _FINE, _FINEST, _FEW = 4, 24, 48, 512
"""How finely sizes of windows are tried: to choose a curve, for many samples, for few, and how many are few."""


class BatchSplit(NamedTuple):
    """An order of the samples and where it is cut."""

    objective_s: float
    order: Ints
    cuts: Ints
    """First place of each micro-batch, and the end."""


def best_splits(costs: PipelineCosts, enc: Ints, dec: Ints, orders: Sequence[Ints] = ()) -> list[BatchSplit]:
    """The most promising splits of some orders (`curves` if none are given), best first; all are split roughly and the best finely."""
    orders, found = orders or curves(enc, dec, costs.round_to), list[BatchSplit]()
    if len(orders) > 1:
        rough = [_sweep(costs, enc, dec, order, _COARSE) for order in orders]
        orders = [min(rough, key=lambda splits: splits[0].objective_s)[0].order]
        found = [split for splits in rough for split in splits]
    found += _sweep(costs, enc, dec, orders[0], _FINE if len(enc) > _FEW else _FINEST)
    return sorted(found, key=lambda split: split.objective_s)[:_KEPT]


def window_sizes(most: int, fine: int) -> NDArray[np.int64]:
    """Sizes of windows that are tried: all up to `fine`, then steps of one part in `fine`, so that there are few per sample."""
    sizes = [1]
    while (size := sizes[-1] + max(1, sizes[-1] // fine)) <= most:
        sizes.append(size)
    return np.array(sizes, dtype=np.int64)


class Windows:
    """Priced windows of one order."""

    def __init__(self, costs: PipelineCosts, enc: Ints, dec: Ints, order: Ints, fine: int) -> None:
        from penstock.batching.kernels import price_windows

        most = min(len(order), int(costs.layouts["padded"].axes[0][-1]), costs.max_samples)
        self.order, self.sizes = order, window_sizes(most, fine)
        self.start = np.empty(len(order) + 1, dtype=np.int64)
        self.charges = np.empty(len(order) * len(self.sizes))
        self._price(price_windows(costs.tables, enc, dec, order, self.sizes[:1], np.inf, self.start, self.charges), enc, dec)
        self.least = float(self.charges[: len(order)].max())
        cap = np.inf if costs.num_stages == 1 else SPREAD * self.least
        used = price_windows(costs.tables, enc, dec, order, self.sizes, cap, self.start, self.charges)
        self._price(used, enc, dec)
        self.charges = self.charges[:used]

    def _price(self, used: int, enc: Ints, dec: Ints) -> None:
        if used < 0:
            sample = self.order[-1 - used]
            raise InfeasibleError(f"a sample of {enc[sample]} and {dec[sample]} tokens fits no device, not even alone.")

    def split(self, bound: float) -> tuple[float, Ints]:
        """(F(bound), cuts)."""
        from penstock.batching.kernels import split

        n = len(self.order)
        total, back = np.empty(n + 1), np.zeros(n + 1, dtype=np.int64)
        value = float(split(self.start, self.charges, self.sizes, bound, total, back))
        cuts = [n]
        while cuts[-1] > 0 and value < np.inf:
            cuts.append(cuts[-1] - int(back[cuts[-1]]))
        return value, np.array(cuts[::-1], dtype=np.int64)


def _sweep(costs: PipelineCosts, enc: Ints, dec: Ints, order: Ints, fine: int) -> list[BatchSplit]:
    """Splits for rising τ until even the unbounded sum cannot make up for the fill."""
    windows = Windows(costs, enc, dec, order, fine)
    fill, replicas = FILL * (costs.num_stages - 1), costs.num_replicas
    free, cuts = windows.split(np.inf)
    if fill == 0:
        return [BatchSplit(free / replicas, order, cuts)]
    found: list[BatchSplit] = []
    for bound in windows.least * SPREAD ** (np.arange(BOUNDS) / (BOUNDS - 1)):
        if found and fill * bound + free / replicas > found[0].objective_s * 1.05:
            break
        total, cuts = windows.split(bound * (1 + 1e-12))
        if all(len(cuts) != len(other.cuts) or (cuts != other.cuts).any() for other in found):
            found.append(BatchSplit(fill * bound + total / replicas, order, cuts))
            found.sort(key=lambda one: one.objective_s)
    return found
