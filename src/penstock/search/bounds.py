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
way and half at the changes. Memory is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.families import Family, Pass
from penstock.search.stages import StageOption

__all__ = ["Bound", "family_bound", "pass_bound"]

_STEPS = 40
"""Rounds in which the weights of several pools are improved."""


@dataclass(frozen=True)
class Bound:
    """A bound and how it came about."""

    time_s: float
    weights: tuple[float, ...] = ()
    """μ of each pool's devices, and of stages."""
    options: tuple[tuple[StageOption, int], ...] = ()
    """The options that were cheapest, with how many ops took each."""


def family_bound(family: Family, known_s: float = np.inf) -> Bound:
    """The bound of one family on plans faster than `known_s`; infinite where there can be none."""
    return min((pass_bound(family, part, known_s) for part in family.passes), key=lambda bound: bound.time_s, default=Bound(np.inf))


def pass_bound(family: Family, part: Pass, known_s: float = np.inf) -> Bound:
    """The same for plans of one pass: the better of two, since the slowest stage is all of the time if nothing counts as filling."""
    return max((_bound(family, part, known_s, filled) for filled in (1.0, 0.0)), key=lambda bound: bound.time_s)


def _bound(family: Family, part: Pass, known_s: float, filled: float) -> Bound:
    """(m - filled) · slowest stage + filled · sum of stages, at least."""
    from penstock.search.kernels import cheapest_path

    messages = np.stack([family.least_messages_s(option) for option in part.options])
    half = 0.5 if len(part.options) > 1 else 1.0
    left = 1 - half * messages.sum(axis=1) * family.count / known_s
    options = [option for option, share in zip(part.options, left, strict=True) if share > 0]
    if not options:
        return Bound(np.inf)
    messages, left = messages[left > 0], left[left > 0]
    time, filling, after = (
        np.stack([found(option) for option in options]) for found in (lambda o: family.times(o)[1], family.filling, family.after_s)
    )
    filling = filled * (filling + time * (1 / left[:, None] - 1))
    chain, first = family.chain  # layers repeat
    time, filling, after = (np.ascontiguousarray(values[:, first]) for values in (time / left[:, None], filling, after))
    taken = np.array([option.num_devices for option in options], float)
    devices = np.zeros((len(options), len(family.pools) + 1))
    devices[np.arange(len(options)), [option.pool for option in options]] = taken
    devices[:, -1] = 1
    sizes = np.array([*(pool.num_devices for pool in family.pools), part.max_stages], float)
    fixed = filling + taken[:, None] / family.num_devices * after
    counts = np.zeros(time.shape, np.int64)

    def value(weights: Floats) -> tuple[float, Floats]:
        """The bound at these weights, and how fast it grows with each of them."""
        factor = filled + devices @ weights
        costs, changes = fixed + time * (devices @ weights)[:, None], (1 - half) * messages * factor[:, None]
        found = cheapest_path(costs, chain, np.ascontiguousarray(changes[:, 0]), np.ascontiguousarray(changes[:, 1]), counts)
        # The first stage gets no message and the last sends none, though the shares above count them.
        ends = half * float(np.max(messages.sum(axis=1) * factor)) if np.isfinite(known_s) else 0.0
        return found - ends, (counts * time).sum(axis=1) @ devices

    weights = _best_weights(value, sizes, family.count - filled)
    bound, _ = value(weights)
    chosen = tuple((option, int(number)) for option, number in zip(options, counts.sum(axis=1), strict=True) if number)
    return Bound(bound, tuple(map(float, weights)), chosen)


def _best_weights(value: Callable[[Floats], tuple[float, Floats]], sizes: Floats, more: float) -> Floats:
    """Weights with Σ weight · size = more that make a concave value large: a pool that is given more work is made dearer."""
    present = sizes > 0
    shares = present / present.sum()

    def weights_of(shares: Floats) -> Floats:
        return np.asarray(np.divide(more * shares, sizes, out=np.zeros_like(sizes), where=present))

    best, found = shares, -np.inf
    for step in range(_STEPS if more > 0 else 1):
        now, worked = value(weights_of(shares))
        if now > found:
            best, found = shares, now
        load = np.divide(worked, sizes, out=np.zeros_like(sizes), where=present)
        shares = shares * np.exp(3.0 / (1 + step / 4) * (load / max(load.max(), 1e-300) - 1))
        shares = shares / shares.sum()
    return weights_of(best)
