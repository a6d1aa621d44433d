"""Shares of replicas of unequal speed, against all ways to divide the micro-batches."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import resolve_cluster
from penstock.costs.roofline import Roofline
from penstock.models.catalog import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.validity import check_plan
from penstock.search.replicas.shares import best_shares, least_time_s, rebalanced
from penstock.timing.estimate import Estimator

Paces = list[tuple[float, float]]


def ends_s(counts: tuple[int, ...], paces: Paces) -> float:
    """When the last replica is done."""
    return max(first + (count - 1) * more for count, (first, more) in zip(counts, paces, strict=True))


def by_trying(total: int, paces: Paces) -> float:
    ways = (counts for counts in itertools.product(range(1, total + 1), repeat=len(paces)) if sum(counts) == total)
    return min(ends_s(counts, paces) for counts in ways)


def test_shares_are_the_best_of_all() -> None:
    """Hundreds of random replicas, with ties, with bubbles, and with more replicas than a fast one leaves work for."""
    numbers = random.Random(0)
    for _ in range(400):
        count = numbers.randint(1, 4)
        total = numbers.randint(count, 9)
        more = [numbers.choice([1.0, 2.0, 3.0, numbers.uniform(0.1, 9)]) for _ in range(count)]
        paces = [(own * numbers.choice([1.0, 1.0, 2.0, numbers.uniform(1, 5)]), own) for own in more]
        found = best_shares(total, paces)
        assert sum(found) == total and min(found) >= 1
        assert ends_s(found, paces) == pytest.approx(by_trying(total, paces), rel=1e-12), (total, paces, found)
        assert least_time_s(total, paces) == ends_s(found, paces)


@given(
    total=st.integers(1, 10**7),
    paces=st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1, 50)).map(lambda p: (p[0] * p[1], p[0])), min_size=1, max_size=30),
)
@settings(max_examples=100, deadline=None)
def test_no_single_move_is_better(total: int, paces: Paces) -> None:
    """Large numbers: everything is given out at once, and nobody could take the last micro-batch of the last replica earlier."""
    if total < len(paces):
        with pytest.raises(ValueError, match="one each"):
            best_shares(total, paces)
        return
    counts = best_shares(total, paces)
    assert sum(counts) == total and min(counts) >= 1
    last = ends_s(counts, paces)
    slowest = max(range(len(paces)), key=lambda r: paces[r][0] + (counts[r] - 1) * paces[r][1])
    if counts[slowest] > 1:
        others = [first + count * more for r, (count, (first, more)) in enumerate(zip(counts, paces, strict=True)) if r != slowest]
        assert all(end >= last * (1 - 1e-9) for end in others)


def test_replicas_on_two_kinds_are_rebalanced() -> None:
    model, cluster = resolve_model("gpt-350m"), resolve_cluster("1xa100-40gb+1xv100-32gb")
    estimator = Estimator(model, cluster, Roofline())
    plan = uniform_plan("gpt-350m", "1xa100-40gb+1xv100-32gb", replicas=2, global_batch=64, micro_batch=2, recompute="full", zero=1)
    better = rebalanced(estimator, plan)
    fast, slow = better.micro_batching.per_replica
    assert fast > slow > 0 and fast + slow == 32 and check_plan(better, model, cluster) == []
    times = [estimator.estimate(one).time_s for one in (plan, better)]
    assert times[1] < 0.75 * times[0]
    for fewer in range(1, 32):
        shares = replace(plan.micro_batching, per_replica=(32 - fewer, fewer))
        assert estimator.estimate(replace(plan, micro_batching=shares)).time_s >= times[1] * (1 - 1e-12)


def test_what_cannot_be_shared_stays() -> None:
    model, cluster = resolve_model("gpt-tiny"), resolve_cluster("2xa100-40gb")
    estimator = Estimator(model, cluster, Roofline())
    alike = uniform_plan("gpt-tiny", "2xa100-40gb", replicas=2, global_batch=16, micro_batch=2)
    assert rebalanced(estimator, alike) == alike
    alone = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, global_batch=16, micro_batch=2)
    dynamic = replace(alike, micro_batching=MicroBatching("padded", "dynamic", 2))
    assert rebalanced(estimator, alone) == alone and rebalanced(estimator, dynamic) == dynamic
