"""The best cut of a chain into stages: exact for its stage times, with a bound.

A pipeline of m micro-batches takes (m - 1) × slowest stage + sum of stages. For a limit τ on the slowest stage the programme
finds the least sum, for all depths at once; an interval (a, z] of τ can hold nothing better than (m - 1) × a + sum at z, so
intervals are halved until none can beat the best plan by more than a tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.stages import StageChoice, StageSpace

__all__ = ["Partition", "best_partition", "rough_bound"]

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Partition:
    """Stages in pipeline order, the time they give, and what no partition of this space can be below."""

    stages: tuple[StageChoice, ...]
    time: float
    bound: float


class _Programme:
    """The tables of the dynamic programme over (stages behind, devices used, cut)."""

    def __init__(self, space: StageSpace) -> None:
        shape = (space.times.shape[0] + 1, space.machine.num_devices + 1, space.num_ops + 1)
        self.space = space
        self._best = np.zeros(shape)
        self._option, self._cut = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self._devices = np.array([c.option.num_devices for c in space.costs])

    def solve(self, tau: float, minimax: bool = False) -> Floats:
        """[K + 1] least sum (or maximum) for each number of stages."""
        from penstock.search.kernels import partition

        s = self.space
        partition(
            tau, minimax, s.machine.num_devices, s.machine.per_node, self._devices, s.offset, s.width, s.times, s.enter, s.leave,
            self._best, self._option, self._cut,
        )  # fmt: skip
        return np.asarray(self._best[:, s.machine.num_devices, 0])

    def stages(self, depth: int) -> tuple[StageChoice, ...]:
        """The stages behind the last answer for this depth."""
        s, used, first, found = self.space, self.space.machine.num_devices, 0, []
        for behind in range(depth - 1, -1, -1):
            option, last = int(self._option[behind + 1, used, first]), int(self._cut[behind + 1, used, first])
            rank = s.machine.num_devices - used
            end = rank + s.costs[option].option.num_devices
            arrives, departs = int(rank > 0 and rank % s.machine.per_node == 0), int(end % s.machine.per_node == 0)
            time = s.times[behind, s.offset[option, first] + last - first - 1]
            time += s.enter[option, arrives, first] + s.leave[option, departs, last]
            found.append(StageChoice(option, first, last, behind, float(time)))
            used, first = used - s.costs[option].option.num_devices, last
        return tuple(found)


def best_partition(space: StageSpace, num_micro_batches: int, known: float = np.inf) -> Partition:
    """The best stages; `known` is the time of a plan at hand, below which alone an answer is of use."""
    programme, more = _Programme(space), num_micro_batches - 1
    best = Partition((), known, np.inf)

    def improve(tau: float) -> float:
        nonlocal best
        sums = programme.solve(tau)
        for depth in np.flatnonzero(np.isfinite(sums)):
            stages = programme.stages(int(depth)) if depth else ()
            if stages:
                time = more * max(s.time for s in stages) + sum(s.time for s in stages)
                if time < best.time:
                    best = Partition(stages, time, np.inf)
        return float(sums.min())

    fastest = float(programme.solve(np.inf, minimax=True).min())
    if (more + 1) * fastest >= known:
        return Partition((), np.inf, (more + 1) * fastest)
    improve(fastest * (1 + 1e-9))
    bound, intervals = np.inf, [(fastest, max(best.time / max(more, 1), fastest))]
    while intervals:
        low, high = intervals.pop()
        least = more * low + improve(high)
        if least >= best.time * (1 - TOLERANCE) or high - low < 1e-6 * fastest:
            bound = min(bound, least)
        else:
            middle = (low + high) / 2
            intervals += [(middle, high), (low, middle)]
    if not best.stages:
        return Partition((), np.inf, bound)
    return Partition(best.stages, best.time, min(bound, best.time))


def rough_bound(space: StageSpace, num_micro_batches: int) -> float:
    """From a space of cuts between blocks, a time that no plan with cuts anywhere can be below."""
    return num_micro_batches * float(_Programme(space.inner()).solve(np.inf, minimax=True).min())
