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
    from scipy.optimize import linprog

    sizes = [len(group) for group in chains[0].taken]
    of_chains = np.array([np.concatenate(chain.taken) for chain in chains])
    # The cheapest chain, and the least of A and of τ at what is left of their prices, are variables besides the prices.
    rows = np.zeros((len(chains) + 4, sum(sizes) + 3))
    rows[:-4, : sum(sizes)], rows[:-4, -3] = -of_chains, 1
    rows[-4:-2, sizes[0] : -3 - sizes[2]], rows[-4:-2, -2] = np.array(limits.after_s)[:, None], 1
    rows[-2:, sizes[0] + sizes[1] : -3], rows[-2:, -1] = np.array(limits.stage_s)[:, None], 1
    right = [*(chain.cost_s for chain in chains), *limits.after_s, *(limits.more * s for s in limits.stage_s)]
    most = _MOST * good_s
    bounds = [(0, most)] * sizes[0] + [(0, _MOST * 10)] * sizes[1] + [(0, _MOST * limits.more)] * sizes[2] + [(None, None)] * 3
    goal = np.concatenate([np.ones(sizes[0]), np.zeros(sizes[1] + sizes[2]), -np.ones(3)])
    found = linprog(goal, rows, right, bounds=bounds, method="highs")
    return float(-found.fun), np.asarray(found.x[:-3])
