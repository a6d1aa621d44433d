"""Cuts common to replicas of several kinds, against trying all cuts and all shares."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.search.partition.stage_space import Machine, StageSpace, build_space
from penstock.search.replicas.common_cuts import Afterwards, ReplicaClass, best_common_cuts
from penstock.search.space.blocks import Blocks
from penstock.search.space.stage_costs import DevicePool, OptionCosts, StageOption


def options_of(numbers: random.Random, kinds: int, ops: int) -> list[OptionCosts]:
    """Random costs of a chain on some kinds of devices, the kinds alike or not alike at all."""
    generator = np.random.default_rng(numbers.randrange(2**32))
    likeness = numbers.choice([0.0, 0.5, 1.0])
    common, found = generator.random(ops), []
    for kind in range(kinds):
        own = (likeness * common + (1 - likeness) * generator.random(ops)) * numbers.choice([1.0, 2.0, 3.7])
        messages = np.zeros((2, 2, ops + 1))
        messages[:, :, 1:-1] = np.sort(generator.random((2, 2, ops - 1)), axis=1) * numbers.choice([0.0, 0.3])
        kept, weights = generator.random(ops), 0.2 * generator.random(ops)
        found.append(OptionCosts(StageOption(1, 1, 1, kind), own / 3, own, kept, weights, kept / 5, kept / 5, kept / 3, *messages))
    return found


def space_of(costs: list[OptionCosts], depth: int, limit: float) -> StageSpace:
    """Memory decides which stages are possible; nothing is recomputed."""
    ops = len(costs[0].compute)
    blocks = Blocks(np.arange(ops + 1), np.full(ops, -1), np.ones(ops, np.bool_))
    machine = Machine(tuple(DevicePool(depth, depth, limit) for _ in costs), 1.0, 0.0)
    return build_space(costs, blocks, machine, max_stages=depth, recompute="never")


def stage_time(space: StageSpace, own: ReplicaClass, cuts: tuple[int, ...], stage: int) -> float:
    """The rules in plain words."""
    option, depth = own.options[stage], len(own.options)
    a, b, costs = cuts[stage], cuts[stage + 1], space.costs[option]
    time = float(space.times[depth - 1 - stage, space.pair(option, a, b)])
    time += float(costs.enter[int(own.crosses[stage - 1]), a]) if stage else 0.0
    return time + (float(costs.leave[int(own.crosses[stage]), b]) if stage < depth - 1 else 0.0)


def afterwards_of(numbers: random.Random, ops: int, depth: int) -> Afterwards:
    """What follows the last micro-batch: nothing, little or most of the time."""
    generator, scale = np.random.default_rng(numbers.randrange(2**32)), numbers.choice([0.0, 0.1, 5.0])
    return Afterwards(scale * (0.1 + generator.random(depth)), generator.random(ops))


def shares_of(total: int, replicas: int) -> Iterator[tuple[int, ...]]:
    if replicas == 1:
        yield (total,)
        return
    for first in range(1, total - replicas + 2):
        yield from ((first, *rest) for rest in shares_of(total - first, replicas - 1))


def time_of(
    space: StageSpace, classes: tuple[ReplicaClass, ...], afterwards: Afterwards, cuts: tuple[int, ...], shares: tuple[int, ...]
) -> float:
    paces = []
    for own in classes:
        times = [stage_time(space, own, cuts, stage) for stage in range(len(own.options))]
        if max(times) == math.inf:
            return math.inf
        paces += [(sum(times), max(times))] * own.copies
    late = max(
        float(pace * afterwards.weights[a:b].sum()) for pace, (a, b) in zip(afterwards.per_weight, itertools.pairwise(cuts), strict=True)
    )
    return max(first + (share - 1) * more for share, (first, more) in zip(shares, paces, strict=True)) + late


def by_trying(space: StageSpace, classes: tuple[ReplicaClass, ...], afterwards: Afterwards, total: int) -> float:
    depth, ops = len(classes[0].options), len(space.costs[0].compute)
    replicas, best = sum(own.copies for own in classes), math.inf
    for inner in itertools.combinations(range(1, ops), depth - 1):
        best = min([best, *(time_of(space, classes, afterwards, (0, *inner, ops), shares) for shares in shares_of(total, replicas))])
    return best


def random_classes(numbers: random.Random, kinds: int, depth: int) -> tuple[ReplicaClass, ...]:
    """Classes of one kind each, or with kinds mixed along the pipeline."""
    count = numbers.randint(1, 3)
    found = []
    for _ in range(count):
        mixed = numbers.random() < 0.3
        first = numbers.randrange(kinds)
        options = tuple(numbers.randrange(kinds) if mixed else first for _ in range(depth))
        found.append(ReplicaClass(options, tuple(numbers.random() < 0.4 for _ in range(depth - 1)), numbers.randint(1, 2)))
    return tuple(found)


def test_small_instances_equal_trying_everything() -> None:
    """Six hundred chains on one to three kinds, alike and unalike, with memory that forbids some stages, and some that nothing fits."""
    numbers, impossible = random.Random(1), 0
    for _ in range(600):
        kinds, depth = numbers.randint(1, 3), numbers.randint(1, 4)
        ops = numbers.randint(depth, 7)
        classes = random_classes(numbers, kinds, depth)
        replicas = sum(own.copies for own in classes)
        total = numbers.randint(replicas, replicas + 5)
        space = space_of(options_of(numbers, kinds, ops), depth, numbers.choice([99.0, 99.0, 4.0, 2.5, 0.3]))
        afterwards = afterwards_of(numbers, ops, depth)
        expected = by_trying(space, classes, afterwards, total)
        found = best_common_cuts(space, classes, total, afterwards, tolerance=0.0)
        if expected == math.inf:
            impossible += 1
            assert found.cuts == () and found.time == math.inf and found.bound == math.inf
            continue
        assert found.time == pytest.approx(expected, rel=1e-9)
        assert time_of(space, classes, afterwards, found.cuts, found.shares) == pytest.approx(found.time, rel=1e-9)
        assert sum(found.shares) == total and found.bound <= expected * (1 + 1e-9)
        again = best_common_cuts(space, classes, total, afterwards, known=expected * 1.0001, tolerance=0.0)
        assert again.time == pytest.approx(expected, rel=1e-9)
        assert best_common_cuts(space, classes, total, afterwards, known=expected * 0.9999, tolerance=0.0).cuts == ()
    assert 20 < impossible < 300


def test_a_tolerance_costs_no_more_than_it_says() -> None:
    numbers = random.Random(2)
    for _ in range(60):
        kinds, depth = numbers.randint(2, 3), numbers.randint(2, 5)
        space = space_of(options_of(numbers, kinds, 12), depth, 99.0)
        classes = random_classes(numbers, kinds, depth)
        total = sum(own.copies for own in classes) * numbers.randint(1, 9)
        afterwards = afterwards_of(numbers, 12, depth)
        exact = best_common_cuts(space, classes, total, afterwards, tolerance=0.0)
        rough = best_common_cuts(space, classes, total, afterwards, tolerance=0.02, scale=exact.time)
        assert exact.time <= rough.time <= exact.time * 1.04
        assert rough.bound <= exact.time and exact.bound <= exact.time


def test_long_chains_keep_within_their_labels() -> None:
    """Hundreds of ops on unlike kinds: a plan near the bound is found even where labels are lost, and then no bound is claimed."""
    numbers = random.Random(3)
    space = space_of(options_of(numbers, 2, 120), 8, 999.0)
    classes = (ReplicaClass((0,) * 8, (False,) * 7, 2), ReplicaClass((1,) * 8, (False,) * 7, 1))
    afterwards = afterwards_of(numbers, 120, 8)
    found = best_common_cuts(space, classes, 64, afterwards)
    assert found.cuts[0] == 0 and found.cuts[-1] == 120 and len(found.cuts) == 9 and list(found.cuts) == sorted(set(found.cuts))
    assert found.bound <= found.time
    assert found == best_common_cuts(space, classes, 64, afterwards)
