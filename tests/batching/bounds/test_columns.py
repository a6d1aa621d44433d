"""The bound by columns: prices against all subsets, the bound against all partitions, and how close it comes on batches of two lengths."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from batching.test_kernels import SEEDS, random_costs, random_lengths
from hypothesis import given, settings
from oracles import batching as plain

from penstock.batching.bounds import columns
from penstock.batching.bounds.columns import Prices
from penstock.batching.bounds.lower_bound import lower_bound_s
from penstock.batching.bounds.shares import lowered
from penstock.batching.example import small_costs
from penstock.batching.fitting import positions
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import plan_batch


@given(SEEDS)
@settings(max_examples=60)
def test_the_best_column_is_the_subset_worth_most_of_its_price(seed: int) -> None:
    """By costs that grow with the lengths; by others a column pays at most what any of its subsets does."""
    numbers = np.random.default_rng(seed)
    noisy = random_costs(numbers, two_sided=True)
    costs = replace(noisy, layouts={"padded": lowered(noisy.layouts["padded"], (0, 1))})
    enc, dec = random_lengths(numbers, int(numbers.integers(1, 7)), two_sided=True)
    shares = numbers.dirichlet(np.ones(2 * costs.num_stages))
    prices = Prices(shares[: costs.num_stages], shares[costs.num_stages :], numbers.uniform(0, 200, len(enc)))
    least = 0.0
    for size in range(1, len(enc) + 1):
        for chosen in itertools.combinations(range(len(enc)), size):
            pairs = [(int(enc[i]), int(dec[i])) for i in chosen]
            price = plain.column_price(costs, pairs, prices.time, prices.room) / costs.num_replicas
            least = max(least, float(prices.worth[list(chosen)].sum()) / price)
    _, most = columns._Columns(costs, enc, dec).worth_most(prices)
    assert most == pytest.approx(max(least, columns._LEAST))


@pytest.mark.parametrize("lines", [256, 1])
@pytest.mark.parametrize("seed", range(4))
def test_no_partition_is_below_the_bound(seed: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage, where a plan takes the sum of its micro-batches; with few lines lengths share one, and the bound only gets lower."""
    monkeypatch.setattr(columns, "MOST_LINES", lines)
    source = random.Random(seed)
    costs = small_costs(1, limit_bytes=source.choice([900.0, 1e6]))
    samples = [SampleLengths(i, source.randint(1, 40), source.randint(1, 40)) for i in range(7)]
    pairs = [(int(e), int(d)) for e, d in zip(*positions(samples, costs), strict=True)]
    prices = {
        group: plain.column_price(costs, [pairs[i] for i in group], [1.0], [0.0])
        for size in range(1, 8) for group in itertools.combinations(range(7), size)
    }  # fmt: skip
    best = min(sum(prices[tuple(sorted(group))] for group in groups) for groups in plain.partitions(range(7)))
    bound = lower_bound_s(costs, *positions(samples, costs), exact=True)
    assert bound <= best * (1 + 1e-9)
    assert lines < 256 or bound >= 0.9 * best


def test_batches_of_two_lengths_are_proven_near_their_best() -> None:
    numbers = np.random.default_rng(5)
    samples = [SampleLengths(i, int(n), int(m)) for i, (n, m) in enumerate(numbers.integers(1, 60, (60, 2)))]
    costs = replace(small_costs(3, limit_bytes=3000.0), round_to=4)
    plan = plan_batch(samples, costs, steps=4000, bound=True)
    assert plan.bound_s <= plan.predicted_s <= 1.15 * plan.bound_s
    assert lower_bound_s(costs, *positions(samples, costs)) < 0.93 * plan.bound_s, "shares alone prove as much"
