"""Limits of plans, and prices at which the cheapest of some chains is dear."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.search.partition.chain_prices import CutChain, PlanLimits, dearest

LIMITS = PlanLimits((0.1, 0.2), (1.0, 3.0), more=10)


def chain(cost_s: float, devices: float) -> CutChain:
    """With so much of the devices of one pool, on which it works 0.1 s and sums gradients for 2 s, in half of the stages."""
    return CutChain(cost_s, (np.array([devices, 0.5]), np.array([2.0]), np.array([0.1, 0.05])), 0.1, 2.0)


def test_limits_are_divided_where_they_are_wider() -> None:
    assert [half.after_s for half in LIMITS.halves()] == [(1.0, 2.0), (2.0, 3.0)]
    assert [half.stage_s for half in PlanLimits((0.0, 0.4), (1.0, 3.0), 10).halves()] == [(0.0, 0.2), (0.2, 0.4)]


@given(
    prices=st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1.5), st.floats(0, 8), st.floats(0, 8)),
    at=st.tuples(st.floats(0, 1), st.floats(0, 1)), over=st.floats(-1, 5),
)  # fmt: skip
@example(prices=(1.0, 0.0, 0.5, 5.0, 0.0), at=(0.0, 0.9), over=1.2)
def test_what_is_left_is_the_least_and_nothing_within_reach_is_cut_off(
    prices: tuple[float, ...], at: tuple[float, float], over: float
) -> None:
    tau, after = (low + share * (high - low) for share, (low, high) in zip(at, (LIMITS.stage_s, LIMITS.after_s), strict=True))
    left = 10 * tau + after - sum(prices[:2]) - prices[2] * after - sum(prices[3:]) * tau
    least = LIMITS.least(np.array(prices))
    assert least <= left + 1e-9
    below = LIMITS.below(least + over, np.array(prices))
    if left < least + over - 1e-6:
        assert below.stage_s[0] <= tau <= below.stage_s[1] + 1e-9 and below.after_s[0] <= after <= below.after_s[1] + 1e-9


def test_what_is_scarce_has_a_price() -> None:
    """Of the cheap chain devices are missing and of the other some are left: half of each would do, at the mean of both."""
    most_s, prices = dearest([chain(1.0, 1.5), chain(2.0, 0.5)], LIMITS, 9.0)
    assert prices[0] == pytest.approx(1.0) and most_s == pytest.approx(1.5 + 2.0 + 10 * 0.1)


def test_the_price_is_worth_what_the_cheapest_chain_costs_then() -> None:
    chains = [chain(1.0, 1.5), chain(2.0, 0.5), chain(1.2, 1.1)]
    most_s, prices = dearest(chains, LIMITS, 9.0)
    costs = [each.cost_s + float(prices @ np.concatenate(each.taken)) for each in chains]
    assert most_s == pytest.approx(min(costs) + LIMITS.least(prices))
