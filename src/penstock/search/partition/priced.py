"""The partition programme with devices paid for instead of counted: a bound on all plans of a subspace, and good plans on the way.

With a price for devices, the least sum of stage times plus prices, less what all devices would pay, is a bound on the sum for each limit
τ on the slowest stage, whatever the price is. An interval (a, z] of τ then holds nothing better than (m - 1) · a + the bound
at z; the interval with the least bound is halved until the bound is good. Wherever the stages of an answer take no more devices than
there are, they are a plan.

Without counted devices a chain of a thousand ops is solved between any two ops in milliseconds, however many devices there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.partition.stage_space import StageChoice, StageSpace
from penstock.search.space.families import PlanFamily, Subspace

__all__ = ["Priced", "PricedAnswer"]

_Line = tuple[float, float, float]
"""A price, the value there, and its slope."""
_ROUNDS = 14
"""Prices that are looked at for one τ."""
_HALVINGS = 60
"""How often an interval of τ is halved, the one with the least bound first."""


@dataclass(frozen=True)
class PricedAnswer:
    """What no plan can be below, and the best stages that were met with the time they take; none if none were."""

    bound_s: float
    stages: tuple[StageChoice, ...] = ()
    time_s: float = np.inf


class Priced:
    """The programme for one subspace of a family over one space of stages."""

    def __init__(self, family: PlanFamily, subspace: Subspace, space: StageSpace, known_s: float) -> None:
        direction = np.ones(len(family.pools))
        if len(family.pools) > 1 and (weights := np.array(subspace_bound(family, subspace, known_s).weights[:-1])).max(initial=0.0) > 0:
            direction = weights / weights.max()
        taken = np.array([option.num_devices for option in subspace.options], float)
        after = np.stack([family.prices.updates.after_s(option) for option in subspace.options]) * (taken / family.num_devices)[:, None]
        prefix = np.concatenate([np.zeros((len(taken), 1)), np.cumsum(after, axis=1)], axis=1)[:, space.cuts]
        self._family, self._space, self._known_s = family, space, known_s
        self._devices = taken * direction[[option.pool for option in subspace.options]]
        self._size = float(np.array([pool.num_devices for pool in family.pools], float) @ direction)
        self._after, self._besides = float(after.sum(axis=1).max()), prefix - space.hidden_fill_s
        self._edges = np.array([family.prices.messages.edges(option) for option in subspace.options])
        shape = (space.times.shape[0] + 1, len(space.cuts))
        self._best, self._option, self._cut = np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self._values, self._used = np.full(shape[0], np.inf), np.zeros(shape[0])
        self._price, self._least_price = 1e-3 * known_s / self._size, 0.0 if len(family.pools) > 1 else -np.inf
        self._found = PricedAnswer(0.0)

    def solve(self, least_s: float, good_s: float, out_of_time: Callable[[], bool] = lambda: False) -> PricedAnswer:
        """The bound on plans faster than the known one; `least_s` holds already, `good_s` is enough."""
        depth, longest = len(self._best) - 1, self._known_s / self._family.count
        shortest = max((least_s - self._after) / (self._family.count - 1 + depth), 0.0)  # at most so many stages, none above the slowest
        more = self._family.count - self._filling_share(shortest)

        def bounded(low: float, high: float) -> tuple[float, float, float]:
            least = max(self._family.count * low, least_s)
            return max(least, more * low + self._least_sum(high, good_s - more * low)), low, high

        intervals = [bounded(min(shortest, longest), longest)]
        for _ in range(_HALVINGS):
            least, low, high = intervals[0]
            if least >= good_s or high - low < 1e-5 * longest or out_of_time():
                break
            middle = (low + high) / 2
            heapq.heapreplace(intervals, bounded(low, middle))
            heapq.heappush(intervals, bounded(middle, high))
        return PricedAnswer(min(intervals[0][0], self._known_s), self._found.stages, self._found.time_s)

    def _filling_share(self, shortest: float) -> float:
        """How much of the slowest stage's time can be in the sum at most, where it takes at least so long."""
        s, share = self._space, 0.0
        if not s.hidden_fill_s.any():
            return 1.0
        for c in range(len(s.costs)):
            starts = np.repeat(np.arange(s.width.shape[1]), s.width[c])
            time = s.times[0, s.offset[c, 0] : s.offset[c, 0] + len(starts)] + float(s.enter[c].max() + s.leave[c].max())
            ends = starts + 1 + np.arange(len(starts)) - (s.offset[c] - s.offset[c, 0])[starts]
            long = np.isfinite(time) & (time >= shortest)
            hidden_fill_s = s.hidden_fill_s[c, ends[long]] - s.hidden_fill_s[c, starts[long]]
            share = max(share, float((1 - hidden_fill_s / time[long]).max(initial=0.0)))
        return share or 1.0

    def _least_sum(self, tau: float, enough: float) -> float:
        """The best bound on the sum of stage times under a limit, or one that is `enough`, over several prices.

        Each depth has a best price of its own, since devices that are paid for can be taken in fractions but stages cannot. For a
        depth the value is concave in the price and its slope is how many devices are taken too many, so the next price to look at
        is where the lines at the nearest two so far, one rising and one falling, meet. Every price serves all depths.
        """
        found = np.full(len(self._best), np.inf)
        lines: tuple[dict[int, _Line], dict[int, _Line]] = ({}, {})
        price: float | None = self._price
        for number in range(_ROUNDS):
            if price is None:
                break
            values, slopes = self._at(tau, price)
            found = values.copy() if number == 0 else np.maximum(found, values)
            for k in np.flatnonzero(np.isfinite(values)):
                lines[int(slopes[k] < 0)][int(k)] = (price, float(values[k]), float(slopes[k]))
            worst = int(found.argmin())
            if found[worst] >= enough:
                break
            self._price = price
            price = self._next_price(lines[0].get(worst), lines[1].get(worst))
        return float(found.min())

    def _next_price(self, rising: _Line | None, falling: _Line | None) -> float | None:
        """Where the value of a depth may be higher; None where it cannot be much."""
        if falling is None:
            assert rising is not None
            return None if rising[2] == 0 else max(4 * rising[0], rising[0] + abs(rising[1]) / self._size)
        if rising is None:
            low = falling[0] / 4 if falling[0] > 1e-3 * abs(falling[1]) / self._size else falling[0] - abs(falling[1]) / self._size
            return None if (low := max(low, self._least_price)) == falling[0] else low
        (a, at_a, up), (b, at_b, down) = rising, falling
        price = (at_b - at_a + up * a - down * b) / (up - down)
        return None if min(price - a, b - price) < 1e-3 * (b - a) else price

    def _at(self, tau: float, price: float) -> tuple[Floats, Floats]:
        """For each depth the bound at this price, and how it grows with it; what fits is kept if it is the best so far."""
        from penstock.search.partition.partition_kernels import priced

        tables = self._best, self._option, self._cut, self._values, self._used
        priced(tau, price * self._devices, self._devices, self._edges, self._besides, self._space.table, *tables)
        sums = self._values - price * self._used
        fitting = np.flatnonzero((self._used <= self._size * (1 + 1e-9)) & np.isfinite(sums))
        if len(fitting) and (self._family.count - 1) * tau + sums[fitting].min() < self._found.time_s * 1.01:
            self._keep(int(fitting[sums[fitting].argmin()]), float(sums[fitting].min()))
        return self._values - price * self._size, self._used - self._size

    def _keep(self, depth: int, total_s: float) -> None:
        """Reads back the stages of the last answer and keeps them if they are the best so far."""
        s, a, chosen = self._space, 0, []
        for behind in range(depth - 1, -1, -1):
            c, b = int(self._option[behind + 1, a]), int(self._cut[behind + 1, a])
            edge = int(self._edges[c] == 2)
            time = s.times[behind, s.offset[c, a] + b - a - 1] + s.enter[c, edge, a] + s.leave[c, edge, b]
            chosen.append(StageChoice(c, int(s.cuts[a]), int(s.cuts[b]), behind, float(time)))
            a = b
        time_s = (self._family.count - 1) * max(stage.time for stage in chosen) + total_s
        if time_s < self._found.time_s and (placed := _placed(self._family, s, chosen)) is not None:
            self._found = PricedAnswer(0.0, tuple(placed), time_s)


def _placed(family: PlanFamily, space: StageSpace, stages: list[StageChoice]) -> list[StageChoice] | None:
    """Gives each stage devices of the first node that has enough left; None where nodes or pools are too small."""
    free = [[pool.per_node] * (pool.num_devices // pool.per_node) for pool in family.pools]
    placed = []
    for stage in stages:
        option = space.costs[stage.option].option
        nodes, per_node = free[option.pool], family.pools[option.pool].per_node
        whole = -(-option.num_devices // per_node)
        each = min(option.num_devices, per_node)
        node = next((n for n in range(len(nodes) - whole + 1) if min(nodes[n : n + whole]) >= each), None)
        if node is None:
            return None
        start = node * per_node + per_node - nodes[node]
        for n in range(node, node + whole):
            nodes[n] -= each
        placed.append(StageChoice(stage.option, stage.first, stage.last, stage.behind, stage.time, start, stage.hidden_fill_s))
    return placed
