"""Chains of many ops, coarsely first: against the exact search of the same chains, and stages of equal layers worked out once."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.search.partition import Blocks, DevicePool, Machine, OptionCosts, StageOption, best_partition, build_space
from penstock.systems.aceso import long_chains
from penstock.systems.aceso.long_chains import LongSearch


def chain(seed: int, layers: int, size: int = 4) -> tuple[Blocks, list[OptionCosts]]:
    """An op, equal layers, an op, on one or two devices."""
    numbers = np.random.default_rng(seed)
    start = np.array([0, *(1 + size * np.arange(layers + 1)), 2 + size * layers])
    blocks = Blocks(start, np.array([-1, *[0] * layers, -1]), np.full(layers + 2, True))

    def column(ends: int = 1) -> np.ndarray:
        return np.concatenate([numbers.random(1), np.tile(numbers.random(size), layers), numbers.random(ends)])

    costs = []
    for devices in (1, 2):
        forward = column() + 0.1
        costs.append(OptionCosts(
            StageOption(devices, 1, devices), forward, forward * 3 / devices, column(), *(column() * 0.1 for _ in range(4)),
            np.stack([column(2)] * 2) * 0.1, np.stack([column(2)] * 2) * 0.1,
        ))  # fmt: skip
    return blocks, costs


@pytest.mark.parametrize("tight", [0.35, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_coarse_cuts_come_near_and_the_bound_holds(seed: int, tight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_chains, "COARSE_CUTS", 10)
    monkeypatch.setattr(long_chains, "FINE_CUTS", 80)
    monkeypatch.setattr(long_chains, "BOUND_CUTS", (12, 50))
    blocks, costs = chain(seed, 24)
    limit = tight * max(float(c.kept.sum()) * 2 + 2.25 * float(c.weights.sum()) for c in costs)
    machine = Machine((DevicePool(4, 4, limit),), 8.0)
    found = LongSearch(blocks, machine, 32, 4, np.arange(blocks.start[-1] + 1)).best({1: costs}, {1: costs})
    exact = best_partition(build_space(costs, blocks, machine, max_stages=4), 32)
    assert found.bound <= exact.time * (1 + 1e-9) <= found.partition.time * (1 + 2e-3)
    if exact.stages:
        assert found.partition.time <= 1.01 * exact.time and found.bound >= 0.8 * exact.time


@pytest.mark.parametrize("cuts", [None, 1, 2, 3], ids=["ops", "layers", "halves", "thirds"])
def test_equal_stages_are_copied(cuts: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, costs = chain(7, 9, 5)
    machine = Machine((DevicePool(4, 4, 0.4 * float(costs[0].kept.sum())),), 1.0)
    places = None if cuts is None else blocks.within(cuts)
    copied = build_space(costs, blocks, machine, max_stages=4, cuts=places)
    twins = blocks.twin_cuts(copied.cuts)
    steps = len(copied.cuts) - 1
    assert (twins[1] > 0).sum() == 8 * (steps - 2) // 9  # all but those of the first layer, the first op and the last
    monkeypatch.setattr(Blocks, "twin_cuts", lambda self, cuts: np.zeros((2, len(cuts) - 1), np.int64))
    assert np.array_equal(copied.times, build_space(costs, blocks, machine, max_stages=4, cuts=places).times)


def test_irregular_cuts_have_few_twins() -> None:
    """Two stages are equal only as far as their cuts are equally far apart, and inside the run of equal layers."""
    blocks, _ = chain(1, 4, 5)
    twins = blocks.twin_cuts(np.array([0, 1, 6, 8, 11, 13, 16, 21, 22]))
    assert twins[1].tolist() == [0, 0, 0, 0, 2, 1, 0, 0] and twins[0, 4:6].tolist() == [2, 3]
    beyond = blocks.twin_cuts(np.array([0, 13, 17, 18, 22]))
    assert beyond[0, 3] == 1 and beyond[1].tolist() == [0, 0, 0, 0]
