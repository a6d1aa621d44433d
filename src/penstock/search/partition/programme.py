"""The best cut of a chain into stages: exact for its stage times, with a bound.

A pipeline of m micro-batches takes (m - 1) × slowest stage + sum of stages. For a limit τ on the slowest stage a programme
finds the least sum, for all depths at once; an interval (a, z] of τ can hold nothing better than (m - 1) × a + sum at z, so
intervals are halved until none can beat the best plan by more than a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from penstock.costs.table import Floats
from penstock.search.partition.stage_space import StageChoice, StageSpace, StageTable
from penstock.search.space.stage_costs import Ints, sums_before

__all__ = ["TOLERANCE", "Messages", "Partition", "PoolArrays", "best_cuts", "best_partition", "crossing", "rough_bound"]

TOLERANCE = 1e-4

Messages = tuple[Floats, Floats]
"""[cuts] what a stage waits for if it begins at a cut, and if it ends there."""


@dataclass(frozen=True)
class Partition:
    """Stages in pipeline order, the time they give, and what no partition of this space can be below."""

    stages: tuple[StageChoice, ...]
    time: float
    bound: float


class PoolArrays(NamedTuple):
    """Pools and options as the kernel takes them, in units of devices."""

    counts: Ints
    """[pools]"""
    per_node: Ints
    """[pools]"""
    pool_of: Ints
    """[options]"""
    devices_of: Ints
    """[options]"""


class _Programme(Protocol):
    """Finds the least sum of stage times under a limit on each."""

    def solve(self, tau: float, most: float = np.inf, minimax: bool = False) -> Floats:
        """[K + 1] least sum (or maximum) for each number of stages; sums of `most` and more need not be found."""

    def stages(self, depth: int) -> tuple[StageChoice, ...]:
        """The stages behind the last answer for this depth."""


class _FreeStages:
    """The programme over (stages behind, devices taken of each pool, cut)."""

    def __init__(self, space: StageSpace) -> None:
        machine, options = space.machine, [c.option for c in space.costs]
        unit = [math.gcd(*(o.num_devices for o in options if o.pool == pool)) or 1 for pool in range(len(machine.pools))]
        self.space, self._unit = space, unit
        self._counts = np.array([pool.num_devices // size for pool, size in zip(machine.pools, unit, strict=True)])
        self._nodes = np.array([max(1, pool.per_node // size) for pool, size in zip(machine.pools, unit, strict=True)])
        self._pool = np.array([o.pool for o in options])
        self._devices = np.array([o.num_devices // unit[o.pool] for o in options])
        self._stride = np.concatenate([[1], np.cumprod(self._counts + 1)])
        shape = (space.times.shape[0] + 1, int(self._stride[-1]), len(space.cuts))
        self._best = np.zeros(shape)
        self._option, self._cut = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        states, sizes = np.arange(self._stride[-1]), zip(self._stride, self._counts, unit, strict=False)
        self._left = np.sum([(count - states // stride % (count + 1)) * size for stride, count, size in sizes], axis=0).astype(float)
        nothing = np.zeros((len(options), len(space.cuts) - 1))
        work = nothing if space.work is None else np.diff(space.work)
        hidden = nothing if space.work is None else np.diff(space.hidden_fill_s)
        devices = np.array([[o.num_devices] for o in options])
        self._need, self._ahead = (sums_before([part.min(axis=0) * (1 - 1e-9)])[0] for part in (devices * work, work - hidden))

    def solve(self, tau: float, most: float = np.inf, minimax: bool = False) -> Floats:
        from penstock.search.partition.partition_kernels import partition

        pools, tables = PoolArrays(self._counts, self._nodes, self._pool, self._devices), (self._best, self._option, self._cut)
        partition(tau, most, minimax, pools, self._left, self._need, self._ahead, self.space.table, *tables)
        return np.asarray(self._best[:, :, 0].min(axis=1) if self.space.machine.idle else self._best[:, -1, 0])

    def stages(self, depth: int) -> tuple[StageChoice, ...]:
        s, a, found = self.space, 0, []
        used = int(self._best[depth, :, 0].argmin()) if s.machine.idle else self._best.shape[1] - 1
        for behind in range(depth - 1, -1, -1):
            c, b = int(self._option[behind + 1, used, a]), int(self._cut[behind + 1, used, a])
            pool = int(self._pool[c])
            taken = used // self._stride[pool] % (self._counts[pool] + 1)
            first, end = int(self._counts[pool] - taken), int(self._counts[pool] - taken + self._devices[c])
            node = self._nodes[pool]
            arrives, departs = int(first % node == 0 and a > 0), int(end % node == 0)
            time = s.times[behind, s.offset[c, a] + b - a - 1] + s.enter[c, arrives, a] + s.leave[c, departs, b]
            shift = s.machine.pools[pool].num_devices % self._unit[pool]
            start = shift + first * self._unit[pool]
            hidden_fill_s = float(s.hidden_fill_s[c, b] - s.hidden_fill_s[c, a])
            found.append(StageChoice(c, int(s.cuts[a]), int(s.cuts[b]), behind, float(time), start, hidden_fill_s))
            used, a = used - int(self._devices[c] * self._stride[pool]), b
        return tuple(found)


class _FreeCuts:
    """The programme where each stage's option and devices are given, and only the cuts are free."""

    def __init__(self, space: StageSpace, given: Sequence[StageChoice], messages: Sequence[Messages]) -> None:
        self.space, self._given = space, given
        own = np.array([stage.option for stage in reversed(given)])
        # The kernel takes every stage for an option of its own.
        enter, leave = (np.ascontiguousarray(np.repeat(np.stack(side)[::-1, None], 2, axis=1)) for side in zip(*messages, strict=True))
        hidden = np.ascontiguousarray(space.hidden_fill_s[own])
        self._table = StageTable(space.offset[own], space.width[own], space.times, enter, leave, hidden)
        shape = (len(given) + 1, len(space.cuts))
        self._best, self._cut = np.zeros(shape), np.zeros(shape, np.int32)

    def solve(self, tau: float, most: float = np.inf, minimax: bool = False) -> Floats:
        from penstock.search.partition.partition_kernels import sequence

        stages, inside = np.arange(len(self._given)), np.zeros(len(self._given), np.int64)
        sequence(tau, minimax, stages, inside, inside, self._table, self._best, self._cut)
        return np.append(np.full(len(self._given), np.inf), self._best[-1, 0])

    def stages(self, depth: int) -> tuple[StageChoice, ...]:
        s, a, found = self.space, 0, []
        for behind in range(depth - 1, -1, -1):
            given, b = self._given[depth - 1 - behind], int(self._cut[behind + 1, a])
            c, messages = given.option, self._table.enter[behind, 0, a] + self._table.leave[behind, 0, b]
            time = s.times[behind, s.offset[c, a] + b - a - 1] + messages
            hidden_fill_s = float(s.hidden_fill_s[c, b] - s.hidden_fill_s[c, a])
            found.append(StageChoice(c, int(s.cuts[a]), int(s.cuts[b]), behind, float(time), given.start, hidden_fill_s))
            a = b
        return tuple(found)


def crossing(space: StageSpace, given: Sequence[StageChoice]) -> list[bool]:
    """Whether the message between each two neighbours goes across nodes: kinds of devices are in different ones."""
    return [
        space.costs[a.option].option.pool != space.costs[b.option].option.pool or departs or arrives
        for (a, (_, departs)), (b, (arrives, _)) in pairwise(zip(given, _edges(space, given), strict=True))
    ]


def _edges(space: StageSpace, given: Sequence[StageChoice]) -> list[tuple[bool, bool]]:
    """For each stage whether it begins, and whether it ends, where a node does."""
    options = [space.costs[stage.option].option for stage in given]
    nodes = [space.machine.pools[option.pool].per_node for option in options]
    return [
        (stage.start % node == 0, (stage.start + option.num_devices) % node == 0)
        for stage, option, node in zip(given, options, nodes, strict=True)
    ]


def _own_messages(space: StageSpace, given: Sequence[StageChoice]) -> list[Messages]:
    """Messages as `partition` has them, which knows where a stage lies but not its neighbours."""
    return [
        (space.enter[stage.option, int(begins and index > 0)], space.leave[stage.option, int(ends)])
        for index, (stage, (begins, ends)) in enumerate(zip(given, _edges(space, given), strict=True))
    ]


def best_partition(space: StageSpace, num_micro_batches: int, known: float = np.inf, tolerance: float = TOLERANCE) -> Partition:
    """The best stages, to a share of `tolerance`; `known` is the time of a plan at hand, below which alone an answer is of use."""
    return _sweep(_FreeStages(space), num_micro_batches, known, tolerance)


def best_cuts(
    space: StageSpace, given: Sequence[StageChoice], num_micro_batches: int, messages: Sequence[Messages] | None = None
) -> Partition:
    """The best cuts for stages whose options and devices stay as given; with `messages`, those of each stage at each cut."""
    return _sweep(_FreeCuts(space, given, messages or _own_messages(space, given)), num_micro_batches, np.inf, TOLERANCE)


def _sweep(programme: _Programme, num_micro_batches: int, known: float, tolerance: float) -> Partition:
    more = num_micro_batches - 1
    best = Partition((), known, np.inf)

    def improve(low: float, high: float) -> float:
        """The least sum of plans whose slowest stage is in an interval, as far as they can be better than the best."""
        nonlocal best
        most = best.time - more * low
        sums = programme.solve(high, most)
        for depth in np.flatnonzero(more * fastest + sums < best.time):
            stages = programme.stages(int(depth)) if depth else ()
            if stages:
                time = more * max(s.time for s in stages) + sum(s.time - s.hidden_fill_s for s in stages)
                if time < best.time:
                    best = Partition(stages, time, np.inf)
        return min(float(sums.min()), most)

    fastest = float(programme.solve(known / (more + 1), minimax=True).min())
    if (more + 1) * fastest >= known:
        return Partition((), np.inf, (more + 1) * fastest if fastest < np.inf else known)
    improve(fastest, fastest * (1 + 1e-9))
    bound, intervals = np.inf, [(fastest, max(best.time / (more + 1), fastest))]
    while intervals:
        low, high = intervals.pop()
        least = more * low + improve(low, high)
        if least >= best.time * (1 - tolerance) or high - low < 1e-6 * fastest:
            bound = min(bound, least)
        else:
            middle = (low + high) / 2
            intervals += [(middle, high), (low, middle)]
    if not best.stages:
        return Partition((), np.inf, bound)
    return Partition(best.stages, best.time, min(bound, best.time))


def rough_bound(space: StageSpace, num_micro_batches: int) -> float:
    """From a space of cuts between blocks, a time that no plan with cuts anywhere can be below."""
    return num_micro_batches * float(_FreeStages(space.inner()).solve(np.inf, minimax=True).min())
