"""The cheapest chain of stages that know their neighbours, with devices paid for or counted, against trying everything."""

from __future__ import annotations

import math
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.search.partition.chain_kernels import cheapest_stages
from penstock.search.partition.counting_kernels import counted_stages
from penstock.search.partition.neighbour_stages import Labels, NeighbourStages, NeighbourTables, StagePrices
from penstock.search.space.stage_costs import sums_before

Limits = tuple[float, float, tuple[int, int]]
"""The longest that a stage may take, the most after the last micro-batch, and the pools at the ends of a shared weight."""


def cheapest_by_trying(s: NeighbourStages, prices: StagePrices, limits: Limits, devices: np.ndarray | None = None) -> float:
    """Every way to cut the chain, every option of each stage, and every way to stay in a node or to leave it. Of [2, P] units of each pool
    and their prices no more may be taken, and what is left is paid for."""
    end, found = s.near_in.shape[1] - 1, math.inf
    for inner in (cuts for number in range(end) for cuts in combinations(range(1, end), number)):
        stages = list(pairwise((0, *inner, end)))
        for options in product(range(len(s.pool_of)), repeat=len(stages)):
            for stays in product((False, True), repeat=len(inner)):
                if _can_stay(s, options, stays) and _can_sum(s, limits[1], stages, options, stays):
                    found = min(found, _cost(s, prices, limits, stages, options, stays) + _left_over(s, options, devices))
    return found


def _left_over(s: NeighbourStages, options: tuple[int, ...], devices: np.ndarray | None) -> float:
    """What the units cost that stages of some options leave; infinite where they take too many."""
    if devices is None:
        return 0.0
    left = devices[0] - np.bincount(s.pool_of[list(options)], s.units[list(options)], minlength=devices.shape[1])
    return float(left @ devices[1]) if (left >= 0).all() else math.inf


def _can_sum(s: NeighbourStages, latest: float, stages: list[tuple[int, int]], options: tuple[int, ...], stays: tuple[bool, ...]) -> bool:
    """Whether all stages in a row that lie in one node can sum their gradients over one network in time."""
    runs: list[list[int]] = [[0]]
    for at, stay in enumerate(stays, start=1):
        runs = [*runs[:-1], [*runs[-1], at]] if stay else [*runs, [at]]
    for run in runs:
        together = sum(int(s.groups[options[at]]) for at in run)
        for at in run if len(run) > 1 else ():
            (a, b), c = stages[at], options[at]
            each = s.group_s[c, b] - s.group_s[c, a] + (s.tied_copy_s[c, 1] if 0 < a <= s.tied < b else 0.0)
            if each * min(together, s.max_groups) > latest and each * s.max_groups > latest:
                return False
    return True


def _can_stay(s: NeighbourStages, options: tuple[int, ...], stays: tuple[bool, ...]) -> bool:
    """Whether stages that stay in a node have one kind and fit into it."""
    taken = int(s.units[options[0]])
    for (a, b), stay in zip(pairwise(options), stays, strict=True):
        taken = int(s.units[b]) + (taken if stay else 0)
        if stay and (s.pool_of[a] != s.pool_of[b] or taken > s.node_units[s.pool_of[a]]):
            return False
    return True


def _cost(
    s: NeighbourStages, prices: StagePrices, limits: Limits, stages: list[tuple[int, int]], options: tuple[int, ...],
    stays: tuple[bool, ...],
) -> float:  # fmt: skip
    """Of stages with given options; infinite where one is beyond the limits or an end has the wrong pool."""
    total, (longest, latest, ends) = 0.0, limits
    for at, ((a, b), c) in enumerate(zip(stages, options, strict=True)):
        time, after, has_tied = s.times[s.offset[c, a] + b - a - 1], s.after_s[c, b] - s.after_s[c, a], a <= s.tied < b
        if at > 0:
            time += s.near_in[c, a] if stays[at - 1] else s.far_in[c, a, s.size_of[options[at - 1]]]
        if at < len(stays):
            time += s.near_out[c, b] if stays[at] else s.far_out[c, b, s.size_of[options[at + 1]]]
        if (a == 0 and ends[0] not in (-1, s.pool_of[c])) or (has_tied and ends[1] not in (-1, s.pool_of[c])):
            return math.inf
        if time > longest or after + (s.shared_s[c] + (s.tied_copy_s[c, 0] if a else 0.0) if (a == 0) != has_tied else 0.0) > latest:
            return math.inf
        total += prices.price[c] + prices.rate[c] * time + prices.after[c, b] - prices.after[c, a]
        total -= s.hidden[c, b] - s.hidden[c, a] if len(stages) > 1 else 0.0
    return float(total)


@given(
    seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 4), longest=st.floats(0.5, 3.0), latest=st.floats(0.5, 4.0), tied=st.booleans(),
    room=st.integers(0, 7),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_kernel_equals_trying_everything(seed: int, num_ops: int, longest: float, latest: float, tied: bool, room: int) -> None:
    stages, prices = drawn(np.random.default_rng(seed), num_ops, tied, room)
    tables, places = NeighbourTables.of(num_ops + 1, 4, 2, 3, max(room, 1), stages.max_groups), np.zeros((num_ops + 1, 5), np.int64)
    for ends in [*product((0, 1), repeat=2), (-1, -1)] if tied else [(-1, -1)]:
        value, length, _ = cheapest_stages(stages, prices, longest, latest, np.array(ends), tables, places)
        assert value == pytest.approx(cheapest_by_trying(stages, prices, (longest, latest, ends)))
        if length:
            assert _of_places(stages, prices, places[:length]) == pytest.approx(value)


def test_groups_that_count_as_many_hide_no_stage_of_few() -> None:
    """Of 16 devices in a node: behind a stage that leaves room for two groups, a cheaper one of three says nothing of one of one group."""
    stages, prices = drawn(np.random.default_rng(3129), 2, False, 7)
    tables, places = NeighbourTables.of(3, 4, 2, 3, 7, stages.max_groups), np.zeros((3, 5), np.int64)
    limits = (1.16, 1.5, (-1, -1))
    value, *_ = cheapest_stages(stages, prices, *limits[:2], np.array(limits[2]), tables, places)
    assert value == pytest.approx(cheapest_by_trying(stages, prices, limits))


@given(
    seed=st.integers(0, 2**32 - 1), num_ops=st.integers(1, 4), longest=st.floats(0.5, 3.0), latest=st.floats(0.5, 4.0), tied=st.booleans(),
    room=st.integers(0, 7), units=st.tuples(st.integers(0, 2), st.integers(0, 9)), budget=st.floats(1.0, 20.0),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_counting_devices_equals_trying_everything(
    seed: int, num_ops: int, longest: float, latest: float, tied: bool, room: int, units: tuple[int, int], budget: float
) -> None:
    """Up to a budget; beyond it there is nothing, and with too few labels or steps nothing is said."""
    stages, prices = drawn(np.random.default_rng(seed), num_ops, tied, room)
    tables, places = NeighbourTables.of(num_ops + 1, 4, 2, 3, max(room, 1), stages.max_groups), np.zeros((num_ops + 1, 5), np.int64)
    devices, ends = np.array([units, (0.3, 0.1)], float), np.array([-1, -1])
    cheapest_stages(stages, prices, longest, latest, ends, tables, places)
    given_ = (stages, prices, longest, latest, ends, tables, devices)
    found, steps = counted_stages(*given_, budget, 10**6, Labels.of(num_ops + 1, 1 << 12))
    tried = cheapest_by_trying(stages, prices, (longest, latest, (-1, -1)), devices)
    assert found == (pytest.approx(tried) if tried <= budget else math.inf)
    assert steps == 0 or counted_stages(*given_, budget, 0, Labels.of(num_ops + 1, 1 << 12))[0] == -math.inf


def drawn(numbers: np.random.Generator, num_ops: int, tied: bool, room: int) -> tuple[NeighbourStages, StagePrices]:
    """Stages of two pools, of one size and of two, and their prices."""
    pools, classes, taken = np.array([0, 1, 1, 1]), np.array([0, 1, 2, 2]), np.array([1, 2, 3, 3])
    width = np.tile(np.arange(num_ops, 0, -1), (4, 1))
    near, far = [0.1 * numbers.random((4, num_ops + 1)) for _ in range(2)], [numbers.random((4, num_ops + 1, 3)) for _ in range(2)]
    hidden, whole, after, each = (sums_before(list(numbers.random((4, num_ops)))) for _ in range(4))
    ops = np.concatenate([np.cumsum(numbers.random(int(count))) for count in width.ravel()])
    offset = (np.cumsum(width.ravel()) - width.ravel()).reshape(width.shape)
    groups, most_groups = np.array([1, 1, 3, 1]), int(numbers.integers(1, 7))
    stages = NeighbourStages(
        offset, width, ops, 0.1 * hidden, whole, numbers.random(4), *near, *far, *(np.argsort(times, axis=2) for times in far), pools,
        classes, taken, np.array([1, room]), num_ops - 1 if tied else -1, groups, each, np.ones(2, np.int64), most_groups,
        numbers.random((4, 2)),
    )  # fmt: skip
    return stages, StagePrices(numbers.random(4), 1 + numbers.random(4), after)


def _of_places(s: NeighbourStages, prices: StagePrices, places: np.ndarray) -> float:
    """What the stages cost that the kernel says it chose."""
    stages, options = [(int(a), int(b)) for a, b in places[:, :2]], tuple(int(c) for c in places[:, 2])
    stays = tuple(bool(size < 0) for size in places[:-1, 4])
    assert _can_stay(s, options, stays)
    return _cost(s, prices, (math.inf, math.inf, (-1, -1)), stages, options, stays)
