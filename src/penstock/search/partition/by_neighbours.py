"""A bound for pipelines over several kinds of devices: whole stages that know their neighbours, in boxes of plans.

A plan takes (m - 1) · τ + sum of stages + A, where τ is its slowest stage and A what the last stage to end does after the last micro-batch.
A box holds the plans with τ and A in two intervals, in one of the two orders of ranks (`least_links`), and with the ends of a shared weight
on given kinds. Its stages take at most the most of τ, and of A after the last micro-batch. What they take together is limited as well:

    devices of each kind, and stages                    what there is of them
    the work of each kind, over its devices or stages   τ
    what each kind sums after the last micro-batch      A

With a price for each of these, a plan costs at least the cheapest way to cut the chain into stages that pay them (`chain_kernels`), less
what all of it would cost, at the τ and A of the box for which that is least: a bound whatever the prices are. Each chain that was the
cheapest once limits what other prices can give, so that a small linear programme (`chain_prices`) says which to try next. The box with the
least bound is divided until that is good enough. In a narrow box devices are counted besides (`counting_kernels`): a mix of two chains, of
which one takes too many of a kind and the other too few, is no plan.
"""

from __future__ import annotations

import heapq
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from penstock.costs.table import Floats
from penstock.search.bounds.by_ops import Bound, subspace_bound
from penstock.search.partition.chain_prices import CutChain, PlanLimits, dearest
from penstock.search.partition.neighbour_stages import NeighbourTables, OrderedStages
from penstock.search.partition.stage_space import Machine, StageSpace, build_space
from penstock.search.space.families import PlanFamily, Subspace

__all__ = ["NeighbourBound"]

_ROUNDS, _GOOD = 8, 1e-3
"""How often the prices of a box are improved, if there is more than this share to be gained."""
_NARROW = 0.5
"""Share of the time within which the τ and A of a box lie before it is divided by the kinds at the ends of a shared weight."""
_DONE = 0.001
"""A box as narrow as this share has what prices can give."""
_COUNTED, _ABOVE = 0.03, 1.03
"""In a box as narrow as this share devices are counted, of chains up to so many times the bound that prices give."""
_DEARER = 8
"""Stages that are looked at in the time in which one is where devices are counted."""
_AT_ONCE = 4
"""Boxes that are divided together."""
_ANY = (-1, -1)
_FAR = 8.0
"""Where no plan is known, plans of up to so many times the bound by ops are looked at."""


@dataclass(frozen=True)
class _Box:
    """Plans whose slowest stage, and what follows the last micro-batch, are within limits."""

    side_by_side: bool
    """Whether a replica's stages are."""
    ends: tuple[int, int]
    """The kinds on which the two ends of a shared weight lie, or `_ANY`."""
    limits: PlanLimits
    prices: Floats
    """The best so far."""
    chains: tuple[CutChain, ...] = ()
    """That were the cheapest at some prices."""


class NeighbourBound:
    """What no plan of one subspace that is faster than `known_s` can be below, sharper step by step; `good_s` is enough."""

    def __init__(self, family: PlanFamily, subspace: Subspace, plain: Bound, known_s: float, good_s: float) -> None:
        """`plain` is the bound by ops."""
        self._family, self._subspace, self._good_s = family, subspace, min(good_s, known_s)
        self._pools = sorted({option.pool for option in subspace.options})
        self._numbers, self._boxes = itertools.count(), list[tuple[float, int, _Box]]()
        self._plain_s = plain.time_s
        if subspace.max_stages == 1:  # its pass uses one kind
            alone = [replace(subspace, options=tuple(o for o in subspace.options if o.pool == pool)) for pool in self._pools]
            self._plain_s = min(subspace_bound(family, one, known_s).time_s for one in alone)
        elif len(self._pools) > 1 and not family.request.cluster.overrides and self._plain_s < good_s:
            if self._good_s == math.inf:
                self._good_s = _FAR * self._plain_s
            limits = PlanLimits((0.0, self._good_s / family.count), (0.0, self._good_s), family.count - 1)
            sizes = [*(pool.num_devices for pool in family.pools), subspace.max_stages]
            prices = np.concatenate([np.zeros(2 * len(family.pools) + 1), np.array(plain.weights) * sizes])
            for side_by_side in (True, False) if family.replicas > 1 else (True,):
                self._add(self._plain_s, _Box(side_by_side, _ANY, limits, prices))

    @property
    def time_s(self) -> float:
        """The bound so far: that of the weakest box."""
        return self._boxes[0][0] if self._boxes else self._plain_s

    def sharpen(self) -> int:
        """Divides the weakest boxes, whose parts are bounded at once where there are processors for them; returns how many stages were
        looked at, 0 where nothing can be made sharper."""
        weakest = [heapq.heappop(self._boxes) for _ in range(_AT_ONCE) if self._divides()]
        parts = [(least_s, part) for least_s, _, box in weakest for part in self._parts(box)]
        with ThreadPoolExecutor() as pool:
            bounded = list(pool.map(self._bounded, (part for _, part in parts)))
        for (least_s, _), (found_s, part, _) in zip(parts, bounded, strict=True):
            self._add(max(least_s, found_s), part)
        return sum(looked for _, _, looked in bounded)

    def _divides(self) -> bool:
        """Whether the weakest box holds plans that count, and is not too narrow to be made sharper."""
        return bool(self._boxes) and self._boxes[0][0] < self._good_s and self._boxes[0][2].limits.width_s >= _DONE * self._good_s

    def _add(self, time_s: float, box: _Box) -> None:
        heapq.heappush(self._boxes, (min(time_s, self._good_s), next(self._numbers), box))

    def _parts(self, box: _Box) -> list[_Box]:
        """A box that was never bounded, as it is; else its parts."""
        if not box.chains:
            return [box]
        if box.ends == _ANY and self._family.prices.tables.tied[0] >= 0 and box.limits.width_s < _NARROW * self._good_s:
            return [replace(box, ends=ends) for ends in product(self._pools, self._pools)]
        return [replace(box, limits=limits) for limits in box.limits.halves()]

    def _bounded(self, box: _Box) -> tuple[float, _Box, int]:
        """The bound of a box; the box with its best prices, and without the parts that hold nothing better than what is good enough; and
        how many stages were looked at."""
        stages, limits, prices, best, best_s, looked = self._orders[box.side_by_side], box.limits, box.prices, box.prices, -np.inf, 0
        tables = stages.tables()
        chains = [chain for chain in box.chains if chain.slowest_s <= limits.stage_s[1] and chain.latest_s <= limits.after_s[1]]
        for number in range(_ROUNDS):
            if chains:
                most_s, prices = dearest(chains, limits, self._good_s)
                if most_s <= best_s * (1 + _GOOD):
                    break
                prices = (prices + best) / 2 if number else prices
            found = stages.cheapest(limits, box.ends, prices, tables)
            looked += found.looked
            if found.chain is None:
                return self._good_s, box, looked
            found_s = found.cost_s + limits.least(prices)
            if found_s > best_s:
                best_s, best = found_s, prices
            if best_s >= self._good_s:
                break
            limits = limits.below(self._good_s - found.cost_s, prices)
            chains.append(found.chain)
        part = replace(box, limits=limits, prices=best, chains=tuple(chains))
        if best_s < self._good_s and limits.width_s < _COUNTED * self._good_s:
            counted_s, more = self._counted(part, best_s, tables)
            best_s, looked = max(best_s, counted_s), looked + more
        return best_s, part, looked

    def _counted(self, box: _Box, priced_s: float, tables: NeighbourTables) -> tuple[float, int]:
        """The bound of a box whose devices are counted, at its best prices, which give `priced_s`; and how many stages were looked at."""
        stages, top_s = self._orders[box.side_by_side], min(self._good_s, _ABOVE * priced_s)
        found, least_s = stages.cheapest(box.limits, box.ends, box.prices, tables), box.limits.least(box.prices)
        counted_s, looked = stages.counted(box.limits, box.ends, box.prices, tables, top_s - least_s)
        return min(top_s, counted_s + least_s), found.looked + _DEARER * looked

    @cached_property
    def _orders(self) -> dict[bool, OrderedStages]:
        return {side_by_side: OrderedStages(self._family, self._subspace, self._space, side_by_side) for side_by_side in (True, False)}

    @cached_property
    def _space(self) -> StageSpace:
        """All stages at least as short as under any schedule and with any number of stages behind them."""
        prices, options = self._family.prices, self._subspace.options
        return build_space(
            [prices.hiding(prices.least_costs(option)) for option in options], self._family.request.blocks,
            Machine(self._family.pools, 1.0, 0.0), max_stages=1, longest=self._good_s / self._family.count, recompute="bounded",
            levels=[prices.levels(option) for option in options],
        )  # fmt: skip
