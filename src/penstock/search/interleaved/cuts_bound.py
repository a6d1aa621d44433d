"""What no cuts of an interleaved pipeline can be faster than, with the messages and weights of every place where a cut may be.

With weights w of groups, Σ w = m - 1 / v, and u, Σ u = 1, a plan takes at least

    Σ (w + 1 / v) · group's time  +  Σ u · what the group does after the last micro-batch

and all of that is a sum over cuts: each moves work, messages and gradients between the groups on its sides. The least of every cut on its
own is therefore a bound whatever the weights are. A linear programme, in which a cut may be in parts at several places, gives the best.
"""

from __future__ import annotations

import numpy as np

from penstock.costs.table import Floats
from penstock.search.interleaved.group_links import GroupLinks
from penstock.search.space.stage_costs import Ints

__all__ = ["cuts_bound_s"]


def cuts_bound_s(before: Floats, links: GroupLinks, low: Ints, high: Ints, count: int, chunks: int) -> float:
    """A bound on all cuts from `low` to `high` [chunks + 1]; `before` [N + 1] are prefix sums of op times."""
    if (low > high).any():
        return np.inf
    groups = len(links.enter)
    cut = np.repeat(np.arange(1, len(low) - 1), (high - low + 1)[1:-1])
    place = np.concatenate([np.arange(a, b + 1) for a, b in zip(low[1:-1], high[1:-1], strict=True)])
    left, right, each = (cut - 1) % groups, cut % groups, np.arange(len(cut))
    time_s, after_s = np.zeros((groups, len(cut))), np.zeros((groups, len(cut)))
    time_s[left, each] += before[place] + links.leave[left, place]
    time_s[right, each] += links.enter[right, place] - before[place]
    after_s[left, each] += links.after_s[left] * links.weights[place]
    after_s[right, each] -= links.after_s[right] * links.weights[place]
    rest_s, rest_after_s = np.zeros(groups), links.tied_s.copy()  # what no cut changes
    rest_s[-1] += before[-1]
    rest_after_s[-1] += links.after_s[-1] * links.weights[-1]

    more, share = count - 1 / chunks, 1 / chunks
    busy, last = _best_shares(cut, time_s, after_s, rest_s, rest_after_s, more, share)
    costs = (more * busy + share) @ time_s + last @ after_s
    least = np.minimum.reduceat(costs, np.flatnonzero(np.diff(cut, prepend=0)))
    return float((more * busy + share) @ rest_s + last @ rest_after_s + least.sum())


def _best_shares(
    cut: Ints, time_s: Floats, after_s: Floats, rest_s: Floats, rest_after_s: Floats, more: float, share: float
) -> tuple[Floats, Floats]:
    """[G] w / Σ w and [G] u: the prices of the constraints that no group is slower than the slowest, nor ends after the last."""
    from scipy.optimize import linprog

    groups, places = time_s.shape
    goal = np.concatenate([share * time_s.sum(axis=0), [more, 1.0]])
    rows = np.hstack([np.vstack([time_s, after_s]), np.kron(np.eye(2), -np.ones((groups, 1)))])
    once = np.zeros((int(cut.max()), places + 2))
    once[cut - 1, np.arange(places)] = 1
    found = linprog(goal, rows, -np.concatenate([rest_s, rest_after_s]), once, np.ones(len(once)))
    prices = np.maximum(-found.ineqlin.marginals, 0.0) if found.status == 0 else np.ones(2 * groups)
    busy, last = (part / part.sum() if part.sum() > 0 else np.full(groups, 1 / groups) for part in (prices[:groups], prices[groups:]))
    return busy, last
