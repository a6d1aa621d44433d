"""Chains of ops with degrees of their own, against trying every state of every op."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.search.op_degrees.lazy_stages import ChainArrays, LazyStages
from penstock.search.op_degrees.mixed_kernels import best_chain, bound_table, peak_bounds, reached_table
from penstock.search.partition.stage_space import Machine, MemoryRule
from penstock.search.space.stage_costs import DevicePool

STATE, FLOOR = 4.0, 0.7
PRICES = np.array([0.0, 0.1, 0.5, 2.0, 10.0])


class Costs:
    """Random costs of Q configurations of N ops."""

    def __init__(self, seed: int, configurations: int, ops: int) -> None:
        numbers = np.random.default_rng(seed)
        names = ("compute", "forward", "ending", "kept", "forward_reserve", "backward_reserve", "weights", "entering", "enter", "leave")
        for name in names:
            setattr(self, name, numbers.random((configurations, ops)))
        self.weights *= 0.1
        self.ending *= self.forward
        self.reshard, self.moved = numbers.random((2, configurations, configurations, ops))
        self.edge = numbers.random((configurations, configurations, ops)) < 0.3
        self.allowed = numbers.random((configurations, ops)) < 0.9
        self.allowed[0] = True

    def time_and_memory(self, states: tuple[int, ...], held: float) -> tuple[float, float]:
        """The rules in plain words."""
        time = saved = segment = peak = moved = 0.0
        for op, s in enumerate(states):
            q, again = s // 2, s % 2
            if not self.allowed[q, op]:
                return np.inf, np.inf
            time += self.compute[q, op] + again * self.ending[q, op]
            if op:
                before, was = states[op - 1] // 2, states[op - 1] % 2
                time += self.reshard[before, q, op]
                moved += self.moved[before, q, op]
                if again and was:
                    segment += self.kept[before, op - 1]
                    peak = max(peak, segment)
                    if self.edge[before, q, op]:
                        segment = 0.0
                    else:
                        saved += self.kept[before, op - 1]
                        time += self.forward[before, op - 1] - self.ending[before, op - 1]
                else:
                    segment = 0.0
        rows = [s // 2 for s in states]
        time += self.enter[rows[0], 0] + self.leave[rows[-1], len(rows) - 1]

        def each(table: np.ndarray) -> list[float]:
            return [table[q, op] for op, q in enumerate(rows)]

        weights = sum(each(self.weights))
        reserve = max(
            max(each(self.forward_reserve)[:-1], default=0.0) + max(each(self.backward_reserve)[:-1], default=0.0), FLOOR * weights
        )
        mine = self.entering[rows[0], 0] + sum(each(self.kept)) + moved - saved
        return time, STATE * weights + held * mine + peak + reserve

    @property
    def arrays(self) -> ChainArrays:
        return ChainArrays(*(getattr(self, name) for name in ChainArrays._fields))

    def best_by_trying(self, held: float, limit: float) -> float:
        configurations, ops = self.compute.shape
        tried = (self.time_and_memory(states, held) for states in itertools.product(range(2 * configurations), repeat=ops))
        return min((time for time, memory in tried if memory <= limit), default=np.inf)


def chain_is_the_fastest(seed: int, ops: int, behind: int, limit: float, most: float = np.inf) -> bool:
    """Whether the chain found is the best; that it fits and takes what it says holds in any case."""
    costs, held, chosen = Costs(seed, 2, ops), behind + 1.0, np.zeros(ops, np.int64)
    expected = costs.best_by_trying(held, limit)
    found = best_chain(0, ops, most, held, MemoryRule(limit, STATE, FLOOR), 3000, costs.arrays, chosen)
    assert found >= expected - 1e-9
    if np.isfinite(found):
        time, memory = costs.time_and_memory(tuple(int(s) for s in chosen), held)
        assert time == pytest.approx(found) and memory <= limit
    return found <= expected + 1e-9


def test_chain_fits_and_is_nearly_always_the_fastest() -> None:
    """Of two labels in a bucket the faster one stays, also where the other would have had the smaller peak in the end."""
    cases = [(seed, 2 + seed % 4, seed % 3, 2.0 + seed % 9) for seed in range(300)]
    assert sum(chain_is_the_fastest(*case) for case in cases) >= 0.95 * len(cases)


def test_a_limit_on_time_loses_no_chain_that_keeps_it() -> None:
    for seed in range(100):
        costs, ops = Costs(seed, 2, 4), 4
        expected = costs.best_by_trying(2.0, 8.0)
        if np.isfinite(expected) and chain_is_the_fastest(seed, ops, 1, 8.0):
            assert chain_is_the_fastest(seed, ops, 1, 8.0, most=expected * (1 + 1e-9))
            assert not chain_is_the_fastest(seed, ops, 1, 8.0, most=expected * 0.5)


@given(seed=st.integers(0, 2**32 - 1), ops=st.integers(1, 5), behind=st.integers(0, 3), limit=st.floats(1.0, 12.0))
@settings(max_examples=150, deadline=None)
def test_bound_is_below_the_fastest(seed: int, ops: int, behind: int, limit: float) -> None:
    costs = Costs(seed, 2, ops)
    width = np.arange(ops, 0, -1)
    offset = np.cumsum(width) - width
    low = np.zeros((behind + 1, int(width.sum())))
    bound_table(PRICES, MemoryRule(limit, STATE, FLOOR), costs.arrays, offset, width, low)
    peak_bounds(0, behind + 1.0, PRICES, np.array([0.0, 0.3, 0.8, 1.5]), MemoryRule(limit, STATE, FLOOR), costs.arrays, low[behind, :ops])
    assert low[behind, ops - 1] <= costs.best_by_trying(behind + 1.0, limit) + 1e-9


def test_bounds_that_know_the_peak_are_higher() -> None:
    """With one micro-batch, what is recomputed first saves no more than it takes when it is brought back."""
    higher, prices, peaks = 0, np.append(0.0, np.geomspace(0.05, 20, 30)), np.arange(0.0, 3.0, 0.1)
    for seed, (held, limit) in itertools.product(range(40), ((1, 6.0), (2, 10.0))):
        costs, rule, low = Costs(seed, 2, 4), MemoryRule(limit, STATE, FLOOR), np.zeros((3, 4))
        bound_table(prices, rule, costs.arrays, np.array([0] * 4), np.array([4, 0, 0, 0]), low[:held])
        peak_bounds(0, float(held), prices, peaks, rule, costs.arrays, low[2])
        assert low[2, 3] <= costs.best_by_trying(float(held), limit) + 1e-9
        higher += low[2, 3] > low[held - 1, 3] * 1.001
    assert higher >= 20


def test_chains_that_are_reached_fit_and_are_not_too_fast() -> None:
    found = 0
    for seed in range(200):
        costs, ops, behind, limit = Costs(seed, 2, 4), 4, seed % 3, 3.0 + seed % 9
        width = np.arange(ops, 0, -1)
        offset = np.cumsum(width) - width
        high = np.full((behind + 1, int(width.sum())), np.inf)
        is_cut = np.array([True, seed % 2 == 0, seed % 2 == 0, True, True])
        reached_table(np.array([0.0, 0.1, 0.5, 2.0, 1e6]), MemoryRule(limit, STATE, FLOOR), costs.arrays, is_cut, offset, width, high)
        assert high[behind, ops - 1] >= costs.best_by_trying(behind + 1.0, limit) - 1e-9
        assert np.isinf(high[:, offset[1] : offset[2]]).all() or is_cut[1]
        found += np.isfinite(high[behind, ops - 1])
    assert found > 80


def test_a_size_without_tables_has_no_plan() -> None:
    lazy = LazyStages([], Machine((DevicePool(2, 2, 8.0),), STATE), 4, np.inf, 2, PRICES, 16)
    assert lazy.promise() == lazy.bound(np.inf) == lazy.proven(np.inf, 1.0) == np.inf
    assert lazy.reach(np.inf) == lazy.solve(np.inf) == ((), np.inf)
