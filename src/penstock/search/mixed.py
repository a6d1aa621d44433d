"""Pipelines of stages whose ops have degrees and splits of their own, whatever their costs come from.

The programme first runs on times that no stage can be below. The stages of its answer are then solved and their true times put in
place, until an answer consists of solved stages alone; the first answer is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.search.partition import Partition, best_partition
from penstock.search.stages import Ints, Machine, OptionCosts, StageOption, StageSpace, stage_widths

__all__ = ["LazyStages", "MixedCosts", "OpChoice", "SolvedStage"]


@dataclass(frozen=True, slots=True)
class OpChoice:
    """Degrees and split of one op."""

    tp: int
    dp: int
    algo: int


@dataclass(frozen=True)
class MixedCosts:
    """All configurations of every op on a number of devices: [Q, N], in one unit of time and one of memory."""

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

    @property
    def changes(self) -> tuple[NDArray[Any], ...]:
        """What both kernels take for the way from op to op."""
        return self.reshard, self.moved, self.edge, self.allowed

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


class LazyStages:
    """The programme for one micro-batch size, with the stages solved so far."""

    def __init__(
        self, costs: Sequence[MixedCosts], machine: Machine, count: int, known: float, max_stages: int, prices: Floats, buckets: int
    ) -> None:
        """For `count` micro-batches; `prices` of memory at which stages are bounded, `buckets` of memory of which the fastest chain is
        kept when one is solved."""
        from penstock.search.mixed_kernels import bound_table

        self.costs, self.machine, self.count, self._buckets = list(costs), machine, count, buckets
        self.solved: dict[tuple[int, ...], tuple[float, Ints]] = {}
        self._most = np.inf
        if not self.costs:
            return
        fastest = [np.where(c.allowed, c.compute, np.inf).min(axis=0) for c in self.costs]
        offset, width = stage_widths(fastest, known / count)
        self.times = np.zeros((max_stages, int(width.sum())))
        for c, at, wide in zip(self.costs, offset, width, strict=True):
            bound_table(
                prices, machine.pools[c.pool].memory_limit, machine.state_factor, machine.least_reserve, c.compute, c.forward,
                c.ending, c.kept, c.weights, c.entering, c.enter[0], c.leave[0], *c.changes, at, wide, self.times,
            )  # fmt: skip
        self.space = StageSpace(
            tuple(c.option() for c in self.costs), (), None, machine, np.arange(width.shape[1] + 1), offset, width, self.times,
            self._extra("enter"), self._extra("leave"), np.zeros((len(self.costs), width.shape[1] + 1)),
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

    @cached_property
    def bound(self) -> float:
        """What no plan of this size can be below; asked for before any stage is solved."""
        if not self.costs:
            return np.inf
        found = best_partition(self.space, self.count)
        return min(found.bound, found.time)

    def solve(self, known: float) -> tuple[tuple[SolvedStage, ...], float]:
        """Solves stages until the programme's answer is made of them; no stages where nothing is faster than `known`."""
        self._most = known / self.count * (1 + 1e-9)  # a stage that takes longer makes every iteration longer than `known`
        while self.costs:
            found = best_partition(self.space, self.count, known)
            if not found.stages or not self._solve_stages(found):
                return self._stages(found), found.time
        return (), np.inf

    def _solve_stages(self, found: Partition) -> bool:
        """Solves the answer's new stages, as many at once as there are processors; false if there were none."""
        new = [key for key in dict.fromkeys(self._keys(found)) if key not in self.solved]
        with ThreadPoolExecutor() as pool:
            for key, (time, states) in zip(new, pool.map(self._solve_stage, new), strict=True):
                option, first, last, behind, arrives, departs = key
                self.solved[key] = time, states
                extra = self.space.enter[option, arrives, first] + self.space.leave[option, departs, last]
                self.times[behind, self.space.pair(option, first, last)] = time - extra
        return bool(new)

    def _solve_stage(self, key: tuple[int, ...]) -> tuple[float, Ints]:
        """Time and the state of each op of one stage."""
        from penstock.search.mixed_kernels import best_chain

        option, first, last, behind, arrives, departs = key
        c, states = self.costs[option], np.zeros(last - first, np.int64)
        time = best_chain(
            first, last, self._most, behind + 1.0, self.machine.pools[c.pool].memory_limit, self._buckets, self.machine.state_factor,
            self.machine.least_reserve, c.compute, c.forward, c.ending, c.kept, c.forward_reserve, c.backward_reserve, c.weights,
            c.entering, c.enter[arrives], c.leave[departs], *c.changes, states,
        )  # fmt: skip
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
