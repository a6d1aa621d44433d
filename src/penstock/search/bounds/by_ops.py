"""What no plan of a family can be faster than, from its ops alone.

A pipeline of m micro-batches takes (m - 1) · slowest stage + sum of stages; zero-bubble schedules fill and drain with less than whole
passes, and there only that much of each stage is in the sum. The sum is at least that of its ops, each under the option
of its stage; the slowest stage takes at least as long as a pool's devices need on average for the work given to them; and what
follows the last micro-batch takes at least the average over devices. With a weight μ for each pool's devices, Σ μ · devices = m - 1,
an op then costs at least

    filling + time · μ · devices of the option  +  devices of the option / all devices · sync and step

under its option, and a change of option between two ops, which is a cut, at least its messages. The cheapest way through the chain is a
bound whatever the weights are; the best weights give the best bound. Stages number at most K, so the sum is also at most K
times the slowest: that is one more pool, of K devices, of which every option takes one.

Where a plan is known, the slowest stage of a better one takes at most its time / m, and a stage that must spend c of that on messages
works only the rest of it: its ops count 1 / (1 - c · m / time) times. Where options may change, half of the messages are counted this
way and half at the changes.

Memory has a price as well. All devices together hold at least the state of every op and what it keeps of one micro-batch, unless
that is made again, which takes time:

    price · devices of the option · state  +  the lesser of price · devices of the option · kept  and  (1 + μ · devices) · making it again

less price · all devices, with memory counted in what one device has. A family that cannot fit has no finite bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from penstock.costs.table import Floats
from penstock.schedules.rules import SCHEDULES
from penstock.search.space.families import PlanFamily, Subspace
from penstock.search.space.stage_costs import StageOption

__all__ = ["Bound", "family_bound", "promise_s", "subspace_bound"]

_PRICES, _GOOD_PRICE = 24, 2e-3
"""Rounds in which the price of memory is improved, and how near it needs to come; it grows fourfold until memory is too dear for what does
not fit."""


@dataclass(frozen=True)
class Bound:
    """A bound and how it came about."""

    time_s: float
    weights: tuple[float, ...] = ()
    """μ of each pool's devices, and of stages."""
    options: tuple[tuple[StageOption, int], ...] = ()
    """The options that were cheapest, with how many ops took each."""
    tight: bool = False
    """Whether memory makes it larger."""


def family_bound(family: PlanFamily) -> Bound:
    """The bound of one family; infinite where it has no plan."""
    found = Bound(np.inf, tight=True)
    for subspace in family.subspaces:
        if found.tight or not subspace.divided:  # dividing weights helps memory alone
            found = min(found, subspace_bound(family, subspace), key=lambda bound: bound.time_s)
    return found


def subspace_bound(
    family: PlanFamily, subspace: Subspace, known_s: float = np.inf, schedule: str = "", in_flight: int = 1, extra: Floats | None = None
) -> Bound:
    """The bound on plans of one subspace: the better of two, since the slowest stage is all of the time if nothing counts as filling.

    With `schedule`, only plans under that one count; zero-bubble makes nothing again, and all its stages hold `in_flight` micro-batches at
    least. `extra` is work of a micro-batch besides its ops: device-seconds in each pool, and seconds in the sum of stages.
    """
    found = Bound(-np.inf)
    for filled in (1.0, 0.0):
        found = max(found, _bound(family, subspace, known_s, filled, schedule, in_flight, extra), key=lambda bound: bound.time_s)
        if found.time_s >= known_s:
            break
    return found


def _bound(
    family: PlanFamily, subspace: Subspace, known_s: float, filled: float, schedule: str, in_flight: int, extra: Floats | None
) -> Bound:
    """(m - filled) · slowest stage + filled · sum of stages, at least."""
    from penstock.search.bounds.path_kernels import WeighedOps, best_weights, cheapest_path

    known = _arrays(family, subspace.options)
    # A change of option is a cut between two stages: half of its messages count there, so that neither half counts twice.
    half = 0.5 if len(subspace.options) > 1 else 1.0
    left = 1 - half * known.messages.sum(axis=1) * family.count / known_s
    able = left > 0
    if not able.any():
        return Bound(np.inf)
    options = [option for option, is_able in zip(subspace.options, able, strict=True) if is_able]
    if not able.all():
        known = _arrays(family, tuple(options))
    messages, left, time, filling, after = known.messages, left[able], known.time, known.filling, known.after
    filling = time if schedule and not SCHEDULES[schedule].fill_relief else filling
    filling = filled * (filling + time * (1 / left[:, None] - 1))
    time, chain = time / left[:, None], family.prices.tables.chain[0]
    taken, devices = known.taken, known.devices
    sizes = np.array([*(pool.num_devices for pool in family.pools), subspace.max_stages], float)
    besides = np.zeros_like(sizes) if extra is None else extra
    fixed = filling + taken[:, None] / family.num_devices * after
    counts = np.zeros(time.shape, np.int64)
    memory = known.memory.under(1 / left, in_flight)
    if schedule and not SCHEDULES[schedule].recomputes:
        memory = replace(memory, again_s=np.full_like(memory.again_s, np.inf))

    # The first stage gets no message and the last sends none, though the shares above count them.
    ends = half * messages.sum(axis=1) if np.isfinite(known_s) else np.zeros(len(options))
    ops = WeighedOps(chain, fixed, time, (1 - half) * messages, ends, devices, besides, filled)
    weights = best_weights(ops, sizes, family.count - filled, known_s)
    busy = devices @ weights
    factor = filled + busy
    least = fixed + time * busy[:, None]
    arriving, leaving = (ops.changes * factor[:, None]).T.copy()
    outside = filled * float(besides[-1]) + float(besides @ weights) - float((ends * factor).max())

    def value(price: float) -> tuple[float, float]:
        """The bound at these weights and this price of memory, and how fast it grows with it."""
        costs = least + memory.costs(price, factor) if price else least
        found = cheapest_path(costs, chain, arriving, leaving, counts) + outside
        over = float((counts * memory.held(price, factor)).sum()) - family.num_devices
        return found - price * family.num_devices, over

    free, over = value(0.0)
    chosen = tuple((option, int(number)) for option, number in zip(options, counts.sum(axis=1), strict=True) if number)
    bound = _dearest(value, free, over, known_s)
    return Bound(bound, tuple(map(float, weights)), chosen, tight=over > 0)


def promise_s(family: PlanFamily) -> float:
    """About what the best pipeline of equal stages takes, recomputation included; infinite where none fits. Never less than the bound."""
    prices, found = family.prices, np.inf
    copies = prices.tables.copies
    for subspace in family.subspaces:
        for option in subspace.options:
            depth = min(subspace.max_stages, max(family.pools[option.pool].num_devices // option.num_devices, 1))
            state, kept, again_s = prices.memory.op_shares(option)
            held = min(depth, family.count)
            missing = float(copies @ (state + held * kept.sum(axis=1)) - depth) / held
            extra_s = _made_again_s(copies[:, None] * kept, copies[:, None] * again_s, missing)
            work_s = float(copies @ prices.passes.op_times(option)[1]) + extra_s
            found = min(found, (family.count - 1 + depth) * work_s / depth + float(copies @ prices.updates.op_after_s(option)) / depth)
    return found


def _made_again_s(kept: Floats, again_s: Floats, missing: float) -> float:
    """Time to make again as much of what is kept as is missing, the cheapest first; infinite where that is too little."""
    if missing <= 0:
        return 0.0
    able = np.isfinite(again_s) & (kept > 0)
    order = np.argsort(again_s[able] / kept[able])
    saved = np.cumsum(kept[able][order])
    return float(np.interp(missing, np.append(0.0, saved), np.append(0.0, np.cumsum(again_s[able][order])), right=np.inf))


@dataclass(frozen=True)
class _OptionArrays:
    """What the distinct ops cost under each of some options."""

    time: Floats
    filling: Floats
    after: Floats
    """[C, O]"""
    messages: Floats
    """[C, 2]"""
    taken: Floats
    """[C] devices"""
    devices: Floats
    """[C, P + 1] of each pool, and stages."""
    memory: _Memory


def _arrays(family: PlanFamily, options: tuple[StageOption, ...]) -> _OptionArrays:
    """Prices of a family's options as arrays, made once: a search bounds the family many times."""
    prices = family.prices
    if options in prices.bounded:
        return cast(_OptionArrays, prices.bounded[options])
    each = (prices.passes.least_times, prices.passes.least_filling, prices.updates.op_after_s, prices.messages.least_s)
    time, filling, after, messages = (np.stack([price(option) for option in options]) for price in each)
    taken = np.array([option.num_devices for option in options], float)
    devices = np.zeros((len(options), len(family.pools) + 1))
    devices[np.arange(len(options)), [option.pool for option in options]] = taken
    devices[:, -1] = 1
    held = [prices.memory.op_shares(prices.tables.leanest(option)) for option in options]
    state, kept, again_s = (np.stack(column) for column in zip(*held, strict=True))
    memory = _Memory(taken[:, None] * state, taken[:, None, None] * kept, again_s)
    found = prices.bounded[options] = _OptionArrays(time, filling, after, messages, taken, devices, memory)
    return found


@dataclass(frozen=True)
class _Memory:
    """What ops hold under each option, over all devices of a stage, in what one device has."""

    state: Floats
    """[C, O]"""
    kept: Floats
    """[C, O, parts]"""
    again_s: Floats
    """[C, O, parts]"""

    def under(self, slower: Floats, in_flight: int) -> _Memory:
        """Where the work of each option counts so many times slower, and so many micro-batches are held."""
        return _Memory(self.state, in_flight * self.kept, self.again_s * slower[:, None, None])

    def costs(self, price: float, factor: Floats) -> Floats:
        """[C, O] what ops cost at a price of memory, where time costs `factor` [C]."""
        return np.asarray(price * self.state + np.minimum(price * self.kept, factor[:, None, None] * self.again_s).sum(axis=2))

    def held(self, price: float, factor: Floats) -> Floats:
        """[C, O] what they hold then."""
        return np.asarray(self.state + np.where(price * self.kept <= factor[:, None, None] * self.again_s, self.kept, 0.0).sum(axis=2))


def _dearest(value: Callable[[float], tuple[float, float]], found: float, slope: float, known_s: float) -> float:
    """The most of a value that is concave in a price from 0 on, where it is `found` and rises by `slope`, or more than `known_s`, or nearly
    the most."""
    if slope <= 0 or found >= known_s:
        return found
    low, high, price = (0.0, found, slope), None, abs(found) / 4
    for _ in range(_PRICES):
        now, slope = value(price)
        found = max(found, now)
        if slope > 0:
            low = (price, now, slope)
        else:
            high = (price, now, slope)
        if found >= known_s or slope == 0:
            return found
        if high is None:
            price *= 4
            continue
        price = (high[1] - low[1] + low[2] * low[0] - high[2] * high[0]) / (low[2] - high[2])
        if low[1] + low[2] * (price - low[0]) <= found * (1 + _GOOD_PRICE):  # where both tangents meet
            return found
    return found if high is not None else np.inf

