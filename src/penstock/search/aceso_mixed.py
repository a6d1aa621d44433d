"""Search over Aceso's tables with degrees and splits of each op, as its Wide-ResNet plans need them.

The programme first runs on times that no stage can be below. The stages of its answer are then solved and their true times put in
place, until an answer consists of solved stages alone; the first answer is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.search.aceso_model import AcesoProblem, kept_mb, shares_storage, starts_segment
from penstock.search.partition import Partition, best_partition
from penstock.search.stages import Machine, OptionCosts, StageOption, StageSpace, stage_widths

__all__ = ["MixedAnswer", "OpChoice", "best_mixed"]

PRICES = 10
"""Prices of memory at which stages are bounded."""
BUCKETS = 1500
"""Steps of memory of which the fastest chain is kept."""


@dataclass(frozen=True, slots=True)
class OpChoice:
    """Degrees and split of one op."""

    tp: int
    dp: int
    algo: int


@dataclass(frozen=True)
class _Costs:
    """All configurations of every op on a number of devices: [Q, N] in microseconds and MB."""

    num_devices: int
    choices: tuple[OpChoice, ...]
    compute: Floats
    forward: Floats
    kept: Floats
    weights: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    entering: Floats
    enter: Floats
    """[2, Q, N] messages inside a node and across nodes."""
    leave: Floats
    reshard: Floats
    """[Q, Q, N]"""
    edge: NDArray[np.bool_]
    allowed: NDArray[np.bool_]

    def chain(self) -> tuple[Floats, ...]:
        """What both kernels take for the ops themselves."""
        return self.compute, self.forward, self.kept


@dataclass(frozen=True)
class SolvedStage:
    """A stage of the answer: its ops, devices, and what each op does."""

    first: int
    last: int
    num_devices: int
    ops: tuple[OpChoice, ...]
    flags: tuple[int, ...]
    time: float


@dataclass(frozen=True)
class MixedAnswer:
    """The best stages (none if nothing beats what was known), and a bound for this micro-batch size."""

    micro_batch: int
    stages: tuple[SolvedStage, ...]
    time: float
    bound: float


class _Lazy:
    """The programme for one micro-batch size, with the stages solved so far."""

    def __init__(self, problem: AcesoProblem, micro_batch: int, known: float) -> None:
        from penstock.search.mixed_kernels import bound_table

        self.problem, self.micro_batch = problem, micro_batch
        self.machine: Machine = problem.machine()
        self.pool = self.machine.pools[0]
        self.costs = [c for devices in (1, 2, 4, 8) if devices <= problem.per_node and (c := _costs(problem, micro_batch, devices))]
        self.solved: dict[tuple[int, ...], tuple[float, NDArray[np.int64]]] = {}
        if not self.costs:
            return
        fastest = [np.where(c.allowed, c.compute, np.inf).min(axis=0) for c in self.costs]
        offset, width = stage_widths(fastest, known / self.count)
        self.times = np.zeros((min(self.machine.num_devices, 16), int(width.sum())))
        prices = _prices(self.costs)
        for c, at, wide in zip(self.costs, offset, width, strict=True):
            bound_table(
                prices, self.pool.memory_limit, self.machine.state_factor, *c.chain(), c.weights, c.entering, c.enter[0], c.leave[0],
                c.reshard, c.edge, c.allowed, at, wide, self.times,
            )  # fmt: skip
        self.space = StageSpace(
            tuple(_only_devices(c) for c in self.costs), (), None, self.machine, np.arange(width.shape[1] + 1), offset, width, self.times,
            self._extra("enter"), self._extra("leave"), np.zeros((len(self.costs), width.shape[1] + 1)),
        )  # fmt: skip

    @property
    def count(self) -> int:
        """Number of micro-batches."""
        return self.problem.global_batch // self.micro_batch

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

    def solve(self, known: float) -> MixedAnswer:
        """Solves stages until the programme's answer is made of them."""
        while True:
            found = best_partition(self.space, self.count, known)
            if not found.stages or not self._solve_stages(found):
                return MixedAnswer(self.micro_batch, self._stages(found), found.time, self.bound)

    def _solve_stages(self, found: Partition) -> bool:
        """Solves the answer's new stages; false if there were none."""
        from penstock.search.mixed_kernels import best_chain

        new = False
        for key in self._keys(found):
            if key in self.solved:
                continue
            option, first, last, behind, arrives, departs = key
            c, states = self.costs[option], np.zeros(last - first, np.int64)
            time = best_chain(
                first, last, behind + 1.0, self.pool.memory_limit, BUCKETS, self.machine.state_factor, *c.chain(), c.forward_reserve,
                c.backward_reserve, c.weights, c.entering, c.enter[arrives], c.leave[departs], c.reshard, c.edge, c.allowed, states,
            )  # fmt: skip
            self.solved[key] = float(time), states
            extra = self.space.enter[option, arrives, first] + self.space.leave[option, departs, last]
            self.times[behind, self.space.pair(option, first, last)] = time - extra
            new = True
        return new

    def _keys(self, found: Partition) -> list[tuple[int, ...]]:
        """(option, first, last, stages behind, arrives across nodes, departs across nodes) of each stage."""
        keys: list[tuple[int, ...]] = []
        for stage in found.stages:
            end, node = stage.start + self.costs[stage.option].num_devices, self.pool.per_node
            arrives, departs = int(stage.start > 0 and stage.start % node == 0), int(end % node == 0)
            keys.append((stage.option, stage.first, stage.last, stage.behind, arrives, departs))
        return keys

    def _stages(self, found: Partition) -> tuple[SolvedStage, ...]:
        stages = []
        for key in self._keys(found):
            time, states = self.solved[key]
            costs = self.costs[key[0]]
            ops = tuple(costs.choices[int(state) // 2] for state in states)
            stages.append(SolvedStage(key[1], key[2], costs.num_devices, ops, tuple(int(state) % 2 for state in states), time))
        return tuple(stages)


def best_mixed(problem: AcesoProblem, known: float) -> tuple[MixedAnswer | None, float]:
    """The best plan faster than `known` microseconds, if there is one, and the bound over all micro-batch sizes."""
    sizes = [b for b in problem.micro_batches if problem.global_batch % b == 0]
    with ThreadPoolExecutor(2) as pool:
        lazies = list(pool.map(lambda b: _Lazy(problem, b, known), sizes))
        bounds = list(pool.map(lambda lazy: lazy.bound, lazies))
    best: MixedAnswer | None = None
    for lazy in sorted(lazies, key=lambda lazy: lazy.bound):
        if lazy.bound < known:
            answer = lazy.solve(known)
            if answer.stages and answer.time < known:
                best, known = answer, answer.time
    return best, min(bounds)


def _costs(problem: AcesoProblem, micro_batch: int, devices: int) -> _Costs | None:
    """The tables of every (tp, dp, algo) on this many devices; None where there are none."""
    choices, tables = [], []
    for tp in (1, 2, 4, 8):
        for algo in (0, 1):
            dp = devices // tp
            rows = problem.tables.op_rows(problem.model, micro_batch // dp, tp, algo, partial=True) if tp * dp == devices else None
            if rows is not None and micro_batch % dp == 0:
                choices.append(OpChoice(tp, dp, algo))
                tables.append(rows)
    if not tables:
        return None
    columns = np.stack(tables).transpose(2, 0, 1)
    forward, backward, entering, leaving, weights, activations, forward_reserve, backward_reserve = columns
    allowed = np.isfinite(forward) & np.isfinite(backward)
    stem = np.array([name == "conv1" for name in problem.names])
    allowed &= ~(stem[None] & np.array([choice.algo == 1 for choice in choices])[:, None])
    kept = np.stack([[kept_mb(name, size) for name, size in zip(problem.names, row, strict=True)] for row in activations])
    links = (problem.tables.p2p_intra, problem.tables.p2p_inter)
    enter, leave = (np.array([[[link.exact_us(v) for v in row] for row in sizes] for link in links]) for sizes in (entering, leaving))
    names = problem.names
    edge = np.array([i + 1 < len(names) and starts_segment(names[i + 1]) and not shares_storage(names[i]) for i in range(len(names))])
    compute, forward = (np.ascontiguousarray(np.where(allowed, x, 0.0)) for x in (forward + backward, forward))
    weights, forward_reserve, backward_reserve, entering = map(np.ascontiguousarray, (weights, forward_reserve, backward_reserve, entering))
    return _Costs(
        devices, tuple(choices), compute, forward, kept, weights, forward_reserve, backward_reserve, entering, enter, leave,
        _reshard(problem, choices, entering), edge, allowed,
    )  # fmt: skip


def _reshard(problem: AcesoProblem, choices: Sequence[OpChoice], entering: Floats) -> Floats:
    """What moving an op's input takes, in microseconds: samples are gathered when dp falls, their gradients when it rises."""
    table = np.zeros((len(choices), len(choices), entering.shape[1]))
    for a, have in enumerate(choices):
        for b, want in enumerate(choices):
            if have.tp == want.tp:
                continue
            group = max(have.tp, want.tp) // min(have.tp, want.tp)
            for op in range(1, entering.shape[1]):
                time_ms = problem.tables.exact_collective_ms("all_gather", group, float(entering[b, op]), problem.model)
                table[a, b, op] = 1e8 if time_ms is None else 1000 * time_ms
    return table


def _prices(costs: Sequence[_Costs]) -> Floats:
    """No price, and a range around what recomputation saves per microsecond."""
    ratios = np.concatenate([(c.forward[c.kept > 1] / c.kept[c.kept > 1]) for c in costs])
    return np.concatenate([[0.0], np.geomspace(0.3 * np.quantile(ratios, 0.05), 30 * np.quantile(ratios, 0.95), PRICES)])


def _only_devices(costs: _Costs) -> OptionCosts:
    """The programme asks an option for its devices alone; times come from the table."""
    nothing = np.zeros(0)
    option = StageOption(costs.num_devices, 0, 0)
    return OptionCosts(option, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
