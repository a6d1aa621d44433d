"""The programmes against a constraint solver, which is given the rules and nothing of how they are solved."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.search.op_degrees.lazy_stages import LazyStages, MixedCosts, OpChoice
from penstock.search.op_degrees.mixed_kernels import best_chain
from penstock.search.partition.programme import TOLERANCE, best_partition
from penstock.search.partition.stage_space import Machine, StageSpace, stage_widths
from penstock.search.space.stage_costs import DevicePool, OptionCosts, StageOption

pytest.importorskip("ortools", reason="ortools is in the extra 'oracles'")

INSTANCES = 30


def machine_of(numbers: np.random.Generator, limit: float) -> Machine:
    """Up to four devices of one or two kinds, each kind in one node, some of them perhaps idle."""
    counts = [(1,), (2,), (4,), (1, 1), (2, 1), (2, 2), (3, 1)][numbers.integers(7)]
    return Machine(tuple(DevicePool(count, count, limit) for count in counts), 2.0, 0.0, idle=len(counts) > 1)


def random_space(seed: int) -> StageSpace:
    """Whole-number times of all stages of a chain of up to eight ops; some stages do not fit."""
    numbers = np.random.default_rng(seed)
    machine, num_ops = machine_of(numbers, 1.0), int(numbers.integers(2, 9))
    nothing, costs = np.zeros(0), []
    for number, pool in enumerate(machine.pools):
        for count in (1, 2):
            if count <= pool.num_devices:
                costs.append(OptionCosts(StageOption(count, 1, count, number), *[nothing] * 9))
    offset, width = stage_widths(numbers.integers(1, 30, (len(costs), num_ops)).astype(float), np.inf)
    times = numbers.integers(1, 300, (min(machine.num_devices, 3), int(width.sum()))).astype(float)
    times[numbers.random(times.shape) < 0.1] = np.inf
    messages = [np.repeat(numbers.integers(0, 20, (len(costs), 1, num_ops + 1)), 2, axis=1).astype(float) for _ in range(2)]
    hidden_fill_s = np.zeros((len(costs), num_ops + 1))
    return StageSpace(tuple(costs), (), None, machine, np.arange(num_ops + 1), offset, width, times, *messages, hidden_fill_s)


def test_cuts_and_devices() -> None:
    from oracles.cp_sat import best_partition_time

    finite = 0
    for seed in range(INSTANCES):
        space, count = random_space(seed), 1 + seed % 9
        expected, found = best_partition_time(space, count), best_partition(space, count)
        assert found.time == pytest.approx(expected, rel=1.01 * TOLERANCE), seed
        assert found.bound <= expected * (1 + 1e-12)
        finite += np.isfinite(expected)
    assert finite > INSTANCES / 2


def random_costs(numbers: np.random.Generator, num_devices: int, pool: int, num_ops: int) -> MixedCosts:
    """Whole-number costs of a few configurations of every op."""
    choices = tuple(OpChoice(tp, num_devices // tp, 0) for tp in (1, 2) if num_devices % tp == 0)
    shape = (len(choices), num_ops)

    def table(most: int, *more: int) -> np.ndarray:
        return numbers.integers(0, most, (*more, *shape)).astype(float)

    forward = table(12)
    enter, leave = (np.repeat(table(6)[None], 2, axis=0) for _ in range(2))
    enter[:, :, 0], leave[:, :, -1] = 0.0, 0.0
    reshard, moved, edge = table(6, len(choices)), table(4, len(choices)), numbers.random((len(choices), *shape)) < 0.3
    allowed = numbers.random(shape) < 0.9
    allowed[0] = True
    return MixedCosts(
        num_devices, choices, table(40) + 2 * forward, forward, np.where(numbers.random(shape) < 0.3, 0.0, forward), table(20), table(8),
        np.zeros(shape), np.zeros(shape), table(8), enter, leave, reshard, moved, edge, allowed, pool,
    )  # fmt: skip


def test_degrees_and_recomputation_of_a_chain() -> None:
    """Of two labels in a bucket of memory the slower one is lost, also where it would have had the smaller peak in the end."""
    from oracles.cp_sat import best_mixed_time

    equal = finite = 0
    for seed in range(INSTANCES):
        numbers = np.random.default_rng(seed)
        num_ops, limit = int(numbers.integers(2, 9)), float(numbers.integers(60, 160))
        costs, machine = random_costs(numbers, 2, 0, num_ops), Machine((DevicePool(2, 2, limit),), 2.0, 0.0)
        expected = best_mixed_time([costs], machine, 1, 1)
        states = np.zeros(num_ops, np.int64)
        found = best_chain(0, num_ops, np.inf, 1.0, machine.memory(0), 2 * int(limit) + 2, costs.arrays(), states)
        assert found >= expected - 1e-9, seed
        equal += found <= expected + 1e-9
        finite += np.isfinite(expected)
    assert equal >= 0.95 * INSTANCES and finite > INSTANCES / 2


def test_pipelines_of_mixed_stages() -> None:
    """Cuts, devices of two kinds, degrees and recomputation of each op at once."""
    from oracles.cp_sat import best_mixed_time

    equal = finite = 0
    for seed in range(INSTANCES):
        numbers = np.random.default_rng(1000 + seed)
        machine, num_ops, count = (
            machine_of(numbers, float(numbers.integers(60, 220))),
            int(numbers.integers(2, 7)),
            int(numbers.integers(1, 9)),
        )
        costs = [
            random_costs(numbers, size, number, num_ops)
            for number, pool in enumerate(machine.pools) for size in (1, 2) if size <= pool.num_devices
        ]  # fmt: skip
        depth = min(machine.num_devices, num_ops, 3)
        expected = best_mixed_time(costs, machine, count, depth)
        prices, buckets = np.array([0.0, 0.05, 0.2, 0.5, 1.0, 3.0]), 2 * int(machine.pools[0].memory_limit) + 2
        lazy = LazyStages(costs, machine, count, np.inf, depth, prices, buckets)
        promise = lazy.promise(everywhere=True)
        _, reached = lazy.reach(np.inf)
        assert min(reached, promise) >= expected * (1 - 1e-9), seed
        assert lazy.bound(np.inf) <= expected * (1 + 1e-9), seed
        _, found = lazy.solve(np.inf)
        assert found >= expected * (1 - 1e-9), seed
        equal += found <= expected * (1 + 1.01 * TOLERANCE)
        finite += np.isfinite(expected)
    assert equal >= 0.95 * INSTANCES and finite > INSTANCES / 2
