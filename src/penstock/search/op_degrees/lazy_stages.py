"""Pipelines of stages whose ops have degrees and splits of their own, whatever their costs come from.

The programme first runs on times that no stage can be below. The stages of its answer are then solved and their true times put in
place, until an answer consists of solved stages alone; the first answer is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.search.partition.programme import Partition, best_partition
from penstock.search.partition.stage_space import Machine, StageSpace, stage_widths
from penstock.search.space.stage_costs import Ints, OptionCosts, StageOption, sums_before

__all__ = ["ChainArrays", "LazyStages", "MixedCosts", "OpChoice", "SolvedStage"]

ROUNDS, FEW_ROUNDS = 40, 10
"""How often the stages of an answer are solved at most; where memory is short, most of them turn out not to fit. Fewer times where no plan
is known and none was met on the way: there may be none."""


TIGHTENED = 24
"""How often stages of the programme's answer are bounded more tightly at most,"""
PEAKS = 32
"""in so many ranges of the largest segment that is recomputed at once, each 15 % wide."""


@dataclass(frozen=True, slots=True)
class OpChoice:
    """Degrees and split of one op."""

    tp: int
    dp: int
    algo: int


class ChainArrays(NamedTuple):
    """`MixedCosts` as kernels take them, with the messages of a stage that begins and ends inside a node or at its edge: [Q, N]."""

    compute: Floats
    forward: Floats
    ending: Floats
    kept: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    weights: Floats
    entering: Floats
    enter: Floats
    leave: Floats
    reshard: Floats
    moved: Floats
    edge: NDArray[np.bool_]
    allowed: NDArray[np.bool_]


@dataclass(frozen=True)
class MixedCosts:
    """All configurations (degrees and split) of every op on a number of devices: [Q, N], in one unit of time and one of memory."""

    num_devices: int
    choices: tuple[OpChoice, ...]
    compute: Floats
    forward: Floats
    ending: Floats
    """Forward time of an op as the last one of a recomputed segment."""
    kept: Floats
    weights: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    entering: Floats
    enter: Floats
    """[2, Q, N] messages inside a node and across nodes."""
    leave: Floats
    reshard: Floats
    """[Q, Q, N] time to move an op's input from one configuration to another,"""
    moved: Floats
    """the memory that the moved input holds,"""
    edge: NDArray[np.bool_]
    """and whether a recomputed segment ends there."""
    allowed: NDArray[np.bool_]
    pool: int = 0

    def arrays(self, arrives: int = 0, departs: int = 0) -> ChainArrays:
        """What kernels take; 1 where the message before, or the one after, goes across nodes."""
        return ChainArrays(
            self.compute, self.forward, self.ending, self.kept, self.forward_reserve, self.backward_reserve, self.weights, self.entering,
            self.enter[arrives], self.leave[departs], self.reshard, self.moved, self.edge, self.allowed,
        )  # fmt: skip

    def option(self) -> OptionCosts:
        """The programme asks an option for its devices alone; times come from a table."""
        nothing = np.zeros(0)
        option = StageOption(self.num_devices, 0, 0, self.pool)
        return OptionCosts(option, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)


@dataclass(frozen=True)
class SolvedStage:
    """A stage of an answer: its ops, devices, and what each op does."""

    first: int
    last: int
    num_devices: int
    ops: tuple[OpChoice, ...]
    flags: tuple[int, ...]
    time: float
    pool: int = 0
    start: int = 0
    """Its first device, as a position in the pool."""


def _slowest(costs: MixedCosts) -> float:
    """A time that no chain takes which moves nothing that cannot be moved."""
    moving = np.where(np.isfinite(costs.reshard), costs.reshard, 0.0).max(axis=0)
    return float((costs.compute + costs.forward + moving).max(axis=0).sum() + costs.enter.max() + costs.leave.max())


def _largest_segment(costs: MixedCosts) -> float:
    """What a recomputed segment holds at most, in whatever configurations."""
    ends = np.append(np.flatnonzero(costs.edge.all(axis=(0, 1))), costs.kept.shape[1])
    return float(max(part.sum() for part in np.split(costs.kept.max(axis=0), ends[:-1])))


class LazyStages:
    """The programme for one micro-batch size, with the stages solved so far."""

    def __init__(
        self, costs: Sequence[MixedCosts], machine: Machine, count: int, known: float, max_stages: int, prices: Floats, buckets: int
    ) -> None:
        """For `count` micro-batches and plans faster than `known`; `prices` of memory at which stages are bounded, `buckets` of memory of
        which the fastest chain is kept when one is solved."""
        self.costs, self.machine, self.count, self._known, self._prices, self._buckets = list(costs), machine, count, known, prices, buckets
        self.solved: dict[tuple[int, ...], tuple[float, Ints]] = {}
        self._is_bounded = False
        if not self.costs:
            return
        self._fastest = np.stack([np.where(c.allowed, c.compute, np.inf).min(axis=0) for c in self.costs])
        self._slowest = max(_slowest(c) for c in self.costs)
        offset, width = stage_widths(self._fastest, known / count, count)
        self.times, self.reached = (np.full((max_stages, int(width.sum())), np.inf) for _ in range(2))
        self.space = StageSpace(
            tuple(c.option() for c in self.costs), (), None, machine, np.arange(width.shape[1] + 1), offset, width, self.times,
            self._extra("enter"), self._extra("leave"), np.zeros((len(self.costs), width.shape[1] + 1)), sums_before(list(self._fastest)),
        )  # fmt: skip

    def _extra(self, name: str) -> Floats:
        """[C, 2, N + 1] how much longer a message takes across nodes, at least; the kernels count it as inside a node."""
        num_ops = self.costs[0].compute.shape[1]
        extra = np.zeros((len(self.costs), 2, num_ops + 1))
        for c, costs in enumerate(self.costs):
            inside, across = getattr(costs, name)
            extra[c, 1, :num_ops] = (across - inside).min(axis=0)
            if name == "leave":
                extra[c, 1] = np.roll(extra[c, 1], 1)
        return extra

    def bound(self, known: float) -> float:
        """What no plan of this size that is faster than `known` can be below; asked for before any stage is solved."""
        from penstock.search.op_degrees.mixed_kernels import bound_table

        if not self.costs:
            return np.inf
        self._known, self._is_bounded = min(self._known, known), True
        _, width = stage_widths(self._fastest, self._known / self.count, self.count)
        for c, at, wide in zip(self.costs, self.space.offset, width, strict=True):
            bound_table(self._prices, self.machine.memory(c.pool), c.arrays(), at, wide, self.times)
        self.times[self.times > self._slowest] = np.inf  # only the price of memory that is not there makes a stage as slow
        self._low = self.times.copy()
        found = best_partition(self.space, self.count, self._known)
        for key, (time, _) in self.solved.items():
            self._put(key, time)
        return min(found.bound, found.time)

    def proven(self, known: float, good: float) -> float:
        """A better bound on plans faster than `known`, where `bound` was asked for before; `good` is enough.

        Stages that begin as those of the programme's answer are bounded again, with the peaks of their recomputation, until its
        answer is made of such stages or so many times.
        """
        from penstock.search.op_degrees.mixed_kernels import peak_bounds

        if not self.costs:
            return np.inf
        space, done = replace(self.space, times=self._low), set[tuple[int, int, int]]()
        prices = np.sort(np.concatenate([self._prices, np.sqrt(self._prices[1:-2] * self._prices[2:-1])]))
        peaks = [np.append(0.0, _largest_segment(c) / 1.15 ** np.arange(PEAKS)[::-1]) for c in self.costs]

        def tighten(row: tuple[int, int, int]) -> None:
            option, first, behind = row
            c, at = self.costs[option], int(self.space.offset[option, first])
            low = self._low[behind, at : at + int(self.space.width[option, first])]
            peak_bounds(first, behind + 1.0, prices, peaks[option], self.machine.memory(c.pool), c.arrays(), low)
            low[low > self._slowest] = np.inf

        with ThreadPoolExecutor() as pool:
            for _ in range(TIGHTENED):
                found = best_partition(space, self.count, known)
                least = min(found.bound, found.time)
                rows = {(stage.option, stage.first, stage.behind) for stage in found.stages} - done
                if least >= good or not rows:
                    break
                list(pool.map(tighten, sorted(rows)))
                done |= rows
        return least

    def promise(self, everywhere: bool = False) -> float:
        """About what the best plan takes with cuts where recomputed segments end, or everywhere; infinite where no such plan was met."""
        from penstock.search.op_degrees.mixed_kernels import reached_table

        for c, at, wide in zip(self.costs, self.space.offset, self.space.width, strict=True) if self.costs else ():
            is_cut = np.append(c.edge[0, 0] | everywhere, True)
            is_cut[0] = True
            reached_table(self._prices, self.machine.memory(c.pool), c.arrays(), is_cut, at, wide, self.reached)
        return best_partition(replace(self.space, times=self.reached), self.count, self._known).time if self.costs else np.inf

    def reach(self, known: float) -> tuple[tuple[SolvedStage, ...], float]:
        """The best plan of stages that are solved or were met on the way; no stages where none is faster than `known`."""
        return self._solve(replace(self.space, times=self.reached), known) if self.costs else ((), np.inf)

    def solve(self, known: float) -> tuple[tuple[SolvedStage, ...], float]:
        """The best plan; no stages where nothing is faster than `known`."""
        if not self.costs:
            return (), np.inf
        if not self._is_bounded:
            self.bound(known)
        stages, time = self._solve(self.space, known, ROUNDS if known < np.inf else FEW_ROUNDS)
        return (stages, time) if time < np.inf else self.reach(known)

    def _solve(self, space: StageSpace, known: float, rounds: int = 0) -> tuple[tuple[SolvedStage, ...], float]:
        """Solves stages until the programme's answer is made of them, or so many times."""
        self._known = min(self._known, known)
        while self.costs:
            found = best_partition(space, self.count, known)
            if not self._solve_stages(found):
                return self._stages(found), found.time
            rounds -= 1
            if not rounds:
                break
        return (), np.inf

    def _solve_stages(self, found: Partition) -> bool:
        """Solves the answer's new stages, as many at once as there are processors; false if there were none."""
        new = [key for key in dict.fromkeys(self._keys(found)) if key not in self.solved]
        with ThreadPoolExecutor() as pool:
            for key, (time, states) in zip(new, pool.map(self._solve_stage, new), strict=True):
                self.solved[key] = time, states
                self._put(key, time)
        return bool(new)

    def _put(self, key: tuple[int, ...], time: float) -> None:
        """The true time of a stage in place of what is promised and of what it cannot be below."""
        option, first, last, behind, arrives, departs = key
        extra = self.space.enter[option, arrives, first] + self.space.leave[option, departs, last]
        pair = self.space.pair(option, first, last)
        self.times[behind, pair] = self.reached[behind, pair] = time - extra

    def _solve_stage(self, key: tuple[int, ...]) -> tuple[float, Ints]:
        """Time and the state of each op of one stage."""
        from penstock.search.op_degrees.mixed_kernels import best_chain

        option, first, last, behind, arrives, departs = key
        c, states = self.costs[option], np.zeros(last - first, np.int64)
        most, memory = self._known / self.count * (1 + 1e-9), self.machine.memory(c.pool)
        time = best_chain(first, last, most, behind + 1.0, memory, self._buckets, c.arrays(arrives, departs), states)
        return float(time), states

    def _keys(self, found: Partition) -> list[tuple[int, ...]]:
        """(option, first, last, stages behind, arrives across nodes, departs across nodes) of each stage."""
        keys: list[tuple[int, ...]] = []
        for stage in found.stages:
            costs = self.costs[stage.option]
            end, node = stage.start + costs.num_devices, self.machine.pools[costs.pool].per_node
            arrives, departs = int(stage.first > 0 and stage.start % node == 0), int(end % node == 0)
            keys.append((stage.option, stage.first, stage.last, stage.behind, arrives, departs))
        return keys

    def _stages(self, found: Partition) -> tuple[SolvedStage, ...]:
        stages = []
        for key, stage in zip(self._keys(found), found.stages, strict=True):
            time, states = self.solved[key]
            costs = self.costs[key[0]]
            ops = tuple(costs.choices[int(state) // 2] for state in states)
            flags = tuple(int(state) % 2 for state in states)
            stages.append(SolvedStage(key[1], key[2], costs.num_devices, ops, flags, time, costs.pool, stage.start))
        return tuple(stages)
