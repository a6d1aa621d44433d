"""Prices of what the stages of a pipeline take together, and the limits of the plans for which they are.

What is taken comes in three groups: shares of devices and of stages, of which there is 1; seconds after the last micro-batch, of which
there is A; and seconds of work for each micro-batch, of which there is τ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats

__all__ = ["CutChain", "PlanLimits", "dearest"]

_MOST = 3.0
"""Times the time that is good enough, which all of something may cost."""

_STEPS = 200
"""Of the simplex method; a few dozen are enough for a few chains."""


class CutChain(NamedTuple):
    """A way to cut the chain of ops into stages."""

    cost_s: float
    """The sum of stages, nothing paid."""
    taken: tuple[Floats, Floats, Floats]
    """Of the three groups: [P + 1], [P], [P + 1]."""
    slowest_s: float
    latest_s: float
    """Of the slowest stage, and of that which does most after the last micro-batch."""


@dataclass(frozen=True)
class PlanLimits:
    """Plans whose slowest stage takes τ, and what follows the last micro-batch A, within two intervals."""

    stage_s: tuple[float, float]
    after_s: tuple[float, float]
    more: int
    """Micro-batches besides the first: how often the slowest stage counts."""

    @property
    def width_s(self) -> float:
        """How far the times of such plans are apart by these alone."""
        return self.more * (self.stage_s[1] - self.stage_s[0]) + self.after_s[1] - self.after_s[0]

    def halves(self) -> tuple[PlanLimits, PlanLimits]:
        """Divided where they are wider."""
        (fastest, slowest), (soonest, latest) = self.stage_s, self.after_s
        if self.more * (slowest - fastest) >= latest - soonest:
            middle = (fastest + slowest) / 2
            return replace(self, stage_s=(fastest, middle)), replace(self, stage_s=(middle, slowest))
        middle = (soonest + latest) / 2
        return replace(self, after_s=(soonest, middle)), replace(self, after_s=(middle, latest))

    def least(self, prices: Floats) -> float:
        """The least over all τ and A of (m - 1) · τ + A less what all that there is would cost."""
        fixed, after, busy = self._paid(prices)
        return min((1 - after) * s for s in self.after_s) + min((self.more - busy) * s for s in self.stage_s) - fixed

    def below(self, most_s: float, prices: Floats) -> PlanLimits:
        """Without the τ and A for which this, at any A or τ, is above `most_s`."""
        fixed, after, busy = self._paid(prices)
        (fastest, slowest), (soonest, latest) = self.stage_s, self.after_s
        if busy < self.more:
            slowest = min(slowest, (most_s + fixed - min((1 - after) * s for s in self.after_s)) / (self.more - busy))
        if after < 1:
            latest = min(latest, (most_s + fixed - min((self.more - busy) * s for s in self.stage_s)) / (1 - after))
        return replace(self, stage_s=(fastest, max(fastest, slowest)), after_s=(soonest, max(soonest, latest)))

    def _paid(self, prices: Floats) -> tuple[float, float, float]:
        """What all of each group costs, of which there is 1, A and τ."""
        pools = (len(prices) - 2) // 3
        return float(prices[: pools + 1].sum()), float(prices[pools + 1 : 2 * pools + 1].sum()), float(prices[2 * pools + 1 :].sum())


def dearest(chains: Sequence[CutChain], limits: PlanLimits, good_s: float) -> tuple[float, Floats]:
    """The prices at which the cheapest of some chains, and so a bound, is the most, and what it is there."""
    from penstock.search.partition.simplex_kernels import largest

    of_chains, (fixed, after, busy) = np.array([np.concatenate(chain.taken) for chain in chains]), map(len, chains[0].taken)
    num, most = fixed + after + busy, np.repeat([_MOST * good_s, _MOST * 10, _MOST * limits.more], [fixed, after, busy])
    # The cheapest chain, and the least of A and of τ at what is left of their prices, are variables besides the prices; as none may be
    # negative, the last two are told from the least that they can be.
    lowest = np.array([limits.after_s[1] * most[fixed : fixed + after].sum(), limits.stage_s[1] * most[fixed + after :].sum()])
    rows, right = np.zeros((len(chains) + 4 + num, num + 3)), np.zeros(len(chains) + 4 + num)
    rows[: -4 - num, :num], rows[: -4 - num, num], right[: -4 - num] = -of_chains, 1, [chain.cost_s for chain in chains]
    times_s, left = np.array([*limits.after_s, *limits.stage_s]), np.array([1, 1, limits.more, limits.more])
    rows[-4 - num : -2 - num, fixed : fixed + after], rows[-4 - num : -2 - num, -2] = times_s[:2, None], 1
    rows[-2 - num : -num, fixed + after : num], rows[-2 - num : -num, -1] = times_s[2:, None], 1
    right[-4 - num : -num] = times_s * left + lowest[[0, 0, 1, 1]]
    rows[-num:, :num], right[-num:] = np.eye(num), most
    goal = np.concatenate([-np.ones(fixed), np.zeros(after + busy), np.ones(3)])
    found = largest(goal, rows, right, _STEPS)
    return float(goal @ found - lowest.sum()), found[:num]
