"""The exact search against trying everything, on hundreds of small random instances."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.partition import best_by_trying, least_recompute_by_trying, recompute_time, stage_memory

from penstock.search.partition import (
    Blocks,
    DevicePool,
    Machine,
    OptionCosts,
    StageChoice,
    StageOption,
    StageSpace,
    build_space,
)
from penstock.search.partition.flags import recompute_flags
from penstock.search.partition.programme import TOLERANCE, best_cuts, best_partition, rough_bound


def random_blocks(numbers: np.random.Generator, num_blocks: int, size: int) -> Blocks:
    """A single op, equal blocks, a single op."""
    start = np.array([0, *(1 + size * np.arange(num_blocks)), 1 + size * num_blocks, 2 + size * num_blocks])
    kind = np.array([-1, *[0] * num_blocks, -1])
    return Blocks(start, kind, np.full(len(kind), bool(numbers.integers(2))))


def random_space(seed: int, num_blocks: int, size: int, devices: int, per_node: int, tight: float, max_stages: int) -> StageSpace:
    """Random costs, equal in equal blocks; `tight` sets the memory limit between what little and what everything takes."""
    numbers = np.random.default_rng(seed)
    blocks = random_blocks(numbers, num_blocks, size)
    num_ops = int(blocks.start[-1])

    def column() -> np.ndarray:
        return np.concatenate([numbers.random(1), np.tile(numbers.random(size), num_blocks), numbers.random(1)])

    costs = []
    for count in (1, 2, 4):
        if count <= min(devices, per_node):
            forward = column() + 0.01
            costs.append(OptionCosts(
                StageOption(count, 1, count), forward, forward * 3 / count, column(), *(column() * 0.1 for _ in range(4)),
                numbers.random((2, num_ops + 1)) * 0.1, numbers.random((2, num_ops + 1)) * 0.1, light=column() < 0.3,
            ))  # fmt: skip
    everything = max(float(c.kept.sum()) * max_stages + 8 * float(c.weights.sum()) for c in costs)
    machine = Machine((DevicePool(devices, per_node, tight * everything),), 8.0)
    return build_space(costs, blocks, machine, max_stages=max_stages)


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 4), tight=st.floats(0.2, 1.2), m=st.integers(1, 20))
@settings(max_examples=150, deadline=None)
def test_equals_trying_everything(seed: int, devices: int, tight: float, m: int) -> None:
    space = random_space(seed, 2, 3, devices, 2 if devices == 4 else devices, tight, min(devices, 3))
    expected = best_by_trying(space, m)
    found = best_partition(space, m)
    assert found.time == pytest.approx(expected, rel=1.01 * TOLERANCE)
    assert found.bound <= found.time * (1 + 1e-12)
    if np.isfinite(expected):
        assert found.bound <= expected * (1 + 1e-12)
        assert found.stages[0].first == 0 and found.stages[-1].last == space.cuts[-1]


@given(seed=st.integers(0, 2**32 - 1), devices=st.integers(1, 4), tight=st.floats(0.2, 1.2), m=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_a_time_at_hand_loses_nothing_that_is_faster(seed: int, devices: int, tight: float, m: int) -> None:
    """Neither in the programme, which leaves out what cannot be finished, nor in the table of stages."""
    space = random_space(seed, 2, 3, devices, 2 if devices == 4 else devices, tight, min(devices, 3))
    expected = best_by_trying(space, m)
    if np.isinf(expected):
        return
    for known in (expected * (1 + 1e-6), 1.3 * expected):
        fewer = build_space(space.costs, space.repeats, space.machine, max_stages=min(devices, 3), longest=known / m, count=m)
        assert fewer.times.size <= space.times.size
        for table in (space, fewer):
            found = best_partition(table, m, known)
            assert found.time == pytest.approx(expected, rel=1.01 * TOLERANCE)
            assert found.bound <= expected * (1 + 1e-12)
    below = best_partition(space, m, expected * (1 - 1e-6))
    assert not below.stages and below.bound <= expected * (1 + 1e-12)


def mixed_space(seed: int, pools: tuple[DevicePool, ...], idle: bool, cuts: np.ndarray | None = None) -> StageSpace:
    """Random costs on several kinds of devices, each kind with a memory of its own."""
    numbers = np.random.default_rng(seed)
    blocks = random_blocks(numbers, 2, 3)
    num_ops, costs = int(blocks.start[-1]), []
    for number, pool in enumerate(pools):
        for count in (1, 2, 4):
            if count <= pool.num_devices:
                forward, *rest = (numbers.random(num_ops) for _ in range(6))
                costs.append(OptionCosts(
                    StageOption(count, 1, count, number), forward, (forward + 0.1) * 3 / count, *(column * 0.1 for column in rest),
                    numbers.random((2, num_ops + 1)) * 0.1, numbers.random((2, num_ops + 1)) * 0.1,
                ))  # fmt: skip
    return build_space(costs, blocks, Machine(pools, 8.0, idle=idle), max_stages=3, cuts=cuts)


@given(
    seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(1, 4), min_size=2, max_size=3), per_node=st.integers(1, 4),
    limits=st.lists(st.floats(2.0, 8.0), min_size=3, max_size=3), idle=st.booleans(), m=st.integers(1, 12),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_mixed_devices_equal_trying_everything(
    seed: int, counts: list[int], per_node: int, limits: list[float], idle: bool, m: int
) -> None:
    pools = tuple(DevicePool(count, min(per_node, count), limit) for count, limit in zip(counts, limits, strict=False))
    space = mixed_space(seed, pools, idle, np.array([0, 1, 3, 5, 7, 8]))
    expected, found = best_by_trying(space, m), best_partition(space, m)
    assert found.time == pytest.approx(expected, rel=1.01 * TOLERANCE)
    assert found.bound <= found.time * (1 + 1e-12)
    if found.stages:
        again = best_cuts(space, found.stages, m)
        assert again.time <= found.time * (1 + TOLERANCE) and again.time >= expected * (1 - 1e-12)
        finer = mixed_space(seed, pools, idle)
        assert best_cuts(finer, found.stages, m).time <= found.time * (1 + TOLERANCE)


@given(seed=st.integers(0, 2**32 - 1), behind=st.integers(0, 3), tight=st.floats(0.05, 0.6))
@example(seed=14448, behind=1, tight=0.525390625)
@settings(max_examples=10, deadline=None)
def test_recomputation_fits_and_is_bounded(seed: int, behind: int, tight: float) -> None:
    """The time reckoned is never below the best flags', the relaxed one never above, and its flags fit by the plain rule; both but for an
    allowance for the largest segment that is brought back at once."""
    space = random_space(seed, 3, 3, 1, 1, tight, behind + 1)
    relaxed = build_space(space.costs, space.blocks, space.machine, max_stages=behind + 1, recompute="bounded")
    peaks = build_space(space.costs, space.blocks, space.machine, max_stages=behind + 1, recompute="bounded", peaks=4)
    assert (peaks.times >= relaxed.times - 1e-9).all()
    for first, last in ((0, space.cuts[-1]), (1, space.cuts[-1] - 1), (2, 9)):
        pair = space.pair(0, first, last)
        compute = float(space.costs[0].compute[first:last].sum())
        best = compute + least_recompute_by_trying(space, first, last, behind)
        found, below = float(space.times[behind, pair]), float(relaxed.times[behind, pair])
        assert below <= best + 1e-9 and float(peaks.times[behind, pair]) <= best + 1e-9
        peak_allowance = 0.2 * float(space.costs[0].kept[1:4].sum())
        assert found >= compute + least_recompute_by_trying(space, first, last, behind, peak_allowance) - 1e-9
        if np.isfinite(found):
            stage = StageChoice(0, first, last, behind, found)
            flags = recompute_flags(space, stage)
            assert compute + recompute_time(space, first, last, tuple(int(f) for f in flags)) == pytest.approx(found)
            over = stage_memory(space, first, last, behind, tuple(int(f) for f in flags)) - space.machine.pools[0].memory_limit
            assert over <= peak_allowance


@given(seed=st.integers(0, 2**32 - 1), behind=st.integers(0, 3), tight=st.floats(0.05, 0.6))
@settings(max_examples=15, deadline=None)
def test_ops_that_are_recomputed_together(seed: int, behind: int, tight: float) -> None:
    """Blocks of four ops, the first two and the last two of which go together: beside all flags that keep to it, in each op's own time."""
    plain = random_space(seed, 2, 4, 1, 1, tight, behind + 1)
    own, blocks = replace(plain.costs[0], light=None), replace(plain.repeats, first_free=np.ones(4, bool))
    together = np.array([False, *[True, False] * 4, False])
    forward = np.where(together, 0.0, own.forward + np.where(np.roll(together, 1), np.roll(own.forward, 1), 0.0))
    joined = replace(own, forward=forward, open_end=together)
    found = build_space([joined], blocks, plain.machine, max_stages=behind + 1)
    relaxed = build_space([joined], blocks, plain.machine, max_stages=behind + 1, recompute="bounded")
    every, allowance = found.times[behind, found.pair(0, 0, 10)], 0.2 * float(own.kept[1:5].sum())
    best, best_with_allowance = np.inf, np.inf
    for chosen in product((0, 1), repeat=4):
        flags = (0, *(flag for flag in chosen for _ in range(2)), 0)
        held = stage_memory(replace(plain, blocks=blocks), 0, 10, behind, flags) - plain.machine.pools[0].memory_limit
        time = float(own.compute.sum() + own.forward @ flags)
        best = min(best, time) if held <= 1e-9 else best
        best_with_allowance = min(best_with_allowance, time) if held <= allowance else best_with_allowance
    assert relaxed.times[behind, relaxed.pair(0, 0, 10)] <= best + 1e-9 and every >= best_with_allowance - 1e-9
    if np.isfinite(every):
        flags = recompute_flags(found, StageChoice(0, 0, 10, behind, float(every)))
        assert all(flags[op] == flags[op + 1] for op in np.flatnonzero(together))
        assert float(own.compute.sum() + own.forward @ flags) == pytest.approx(every)


@given(seed=st.integers(0, 2**32 - 1), tight=st.floats(0.3, 1.2), m=st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_cuts_between_blocks_bound_all_cuts(seed: int, tight: float, m: int) -> None:
    space = random_space(seed, 3, 3, 2, 2, tight, 2)
    coarse = build_space(space.costs, space.blocks, space.machine, max_stages=2, cuts=space.blocks.start)
    assert rough_bound(coarse, m) <= best_by_trying(space, m) * (1 + 1e-9)
    assert best_partition(coarse, m).time >= best_partition(space, m).time * (1 - TOLERANCE)


def test_the_same_input_gives_the_same_plan() -> None:
    first, second = (best_partition(random_space(7, 3, 3, 4, 4, 0.5, 4), 8) for _ in range(2))
    assert first == second


def test_nothing_fits_is_said() -> None:
    found = best_partition(random_space(1, 2, 3, 2, 2, 1e-6, 2), 4)
    assert not found.stages and found.time == np.inf
