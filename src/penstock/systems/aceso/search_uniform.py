"""Aceso's chains with one (tp, dp) for each stage: the best cuts for every micro-batch size, and a bound for each.

    cuts between blocks     all sizes: a plan at hand, and a bound
    all cuts                the most promising size, then those whose bounds are below what is known
    tighter bounds          of sizes that are still in doubt, with the peaks of recomputation counted
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from penstock.errors import InputError
from penstock.search.partition import (
    TOLERANCE,
    Blocks,
    OptionCosts,
    Partition,
    StageOption,
    StageSpace,
    best_partition,
    build_space,
    rough_bound,
)  # fmt: skip
from penstock.search.space.stage_costs import Ints
from penstock.systems.aceso.rules import AcesoProblem, starts_segment

__all__ = ["MAX_STAGES", "UniformSearch"]

MAX_STAGES = 16
GOOD_GAP = 0.028
"""Bounds further away count the peak of recomputation as well, which takes longer,"""
PEAKS = (8, 48)
"""in so many ranges, and where that is not enough in more of them,"""
MOST_PEAKS = 4.8e8
"""where ranges × ops² × stages × options are no more than this."""
_SLACK = 1 + 1e-9
"""What is as good as known is found, too."""

Result = TypeVar("Result")


@dataclass
class UniformSearch:
    """What is known of the micro-batch sizes of a problem, in microseconds and MB."""

    problem: AcesoProblem
    late: Callable[[], bool]
    """Whether the time is spent: nothing more is begun then."""
    blocks: Blocks
    costs: dict[int, list[OptionCosts]]
    """By micro-batch size those of every (devices, tp, dp)."""
    places: Ints
    """Ops at which a stage may begin, and the end."""
    bounds: dict[int, float] = field(default_factory=dict)
    """By micro-batch size."""
    _rough: dict[int, tuple[StageSpace, Partition]] = field(default_factory=dict)
    """With cuts between blocks alone."""
    _solved: dict[int, tuple[StageSpace, Partition]] = field(default_factory=dict)
    """With all cuts."""

    @classmethod
    def of(cls, problem: AcesoProblem, late: Callable[[], bool]) -> UniformSearch:
        """With the costs of all sizes that have tables and divide the global batch."""
        blocks = Blocks.of(problem.model, [starts_segment(name) for name in problem.names])
        costs = {b: found for b in problem.micro_batches if problem.global_batch % b == 0 and (found := _option_costs(problem, b))}
        places = blocks.start if problem.cuts == "blocks" else np.append(np.flatnonzero(problem.begins), len(problem.names))
        if not costs:
            sizes = ", ".join(map(str, problem.micro_batches))
            raise InputError(f"none of the micro-batch sizes {sizes} has tables and divides the global batch {problem.global_batch}.")
        return cls(problem, late, blocks, costs, places)

    def run(self, progress: Callable[[str], None]) -> None:
        """Cuts between blocks only, for a plan at hand; then all cuts, for the sizes in order of promise."""
        with ThreadPoolExecutor(2) as pool:
            self._rough = _each(pool, lambda b: self._solve(b, np.inf, self.blocks.start), self.costs)
            progress(f"cuts between blocks: {self.known / 1e6:.3f} s")
            self.bounds = _each(pool, lambda b: self._bound(b, np.inf, self.blocks.start), self.costs)
            order = sorted(self.costs, key=lambda b: self._rough[b][1].time)
            self._improve(order[0])
            progress(f"micro-batch {order[0]}: {self.known / 1e6:.3f} s")
            self._tighten(pool, [b for b in order if self.bounds[b] < self.known])
            for b in order[1:]:
                if self.bounds[b] < self.known * (1 - TOLERANCE):
                    self._improve(b)
            size = len(self.problem.names) ** 2 * self._max_stages
            for peaks in PEAKS if self.problem.family != "resnet" else ():
                loose = [b for b, own in self.costs.items() if peaks * size * len(own) <= MOST_PEAKS]
                self._tighten(pool, [b for b in loose if self.bounds[b] < self.known * (1 - GOOD_GAP)], peaks)

    @property
    def known(self) -> float:
        """The time of the best plan so far."""
        return min([partition.time * _SLACK for _, partition in self._rough.values()] + [own.time for _, own in self._solved.values()])

    @property
    def bound(self) -> float:
        """The bound of all micro-batch sizes."""
        return min(self.bounds.values())

    def best(self, b: int) -> tuple[StageSpace, Partition]:
        """The best cuts of a size that were looked for."""
        return self._solved.get(b, self._rough[b])

    def ranked(self) -> list[int]:
        """All sizes, the fastest first."""
        return sorted(self.costs, key=lambda b: (self.best(b)[1].time, b not in self._solved, b))

    def loose(self, b: int) -> list[OptionCosts]:
        """The costs of a size for bounds."""
        return [_loose(self.problem, self.blocks, own) for own in self.costs[b]]

    @property
    def _max_stages(self) -> int:
        return min(self.problem.machine().num_devices, MAX_STAGES)

    def _improve(self, b: int) -> None:
        self._solved[b] = self._rough[b] if self.late() else self._solve(b, self.known)

    def _tighten(self, pool: ThreadPoolExecutor, sizes: list[int], peaks: int = 0) -> None:
        if not self.late():
            for b, least in _each(pool, partial(self._bound, known=self.known * _SLACK, peaks=peaks), sizes).items():
                self.bounds[b] = max(self.bounds[b], least)

    def _solve(self, b: int, known: float, cuts: Ints | None = None) -> tuple[StageSpace, Partition]:
        count = self.problem.global_batch // b
        space = build_space(
            self.costs[b], self.blocks, self.problem.machine(), max_stages=self._max_stages, longest=known / count, count=count,
            cuts=self.places if cuts is None else cuts,
        )  # fmt: skip
        return space, best_partition(space, count, known)

    def _bound(self, b: int, known: float, cuts: Ints | None = None, peaks: int = 0) -> float:
        count = self.problem.global_batch // b
        space = build_space(
            self.loose(b), self.blocks, self.problem.machine(), max_stages=self._max_stages, longest=known / count, count=count,
            cuts=self.places if cuts is None else cuts, recompute="bounded", peaks=peaks,
        )  # fmt: skip
        return rough_bound(space, count) if cuts is not None else best_partition(space, count, known).bound


def _each(pool: ThreadPoolExecutor, work: Callable[[int], Result], sizes: Iterable[int]) -> dict[int, Result]:
    sizes = list(sizes)
    return dict(zip(sizes, pool.map(work, sizes), strict=True))


def _option_costs(problem: AcesoProblem, micro_batch: int) -> list[OptionCosts]:
    """Every uniform (devices, tp, dp) whose tables exist, in microseconds and MB."""
    found = []
    for devices in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            dp = devices // tp
            if devices <= problem.per_node and tp * dp == devices and micro_batch % dp == 0:
                rows, algos = _rows(problem, micro_batch // dp, tp)
                if rows is not None:
                    found.append(_costs(problem, StageOption(devices, tp, dp), rows, algos))
    return found


def _rows(problem: AcesoProblem, micro_batch: int, tp: int) -> tuple[np.ndarray | None, tuple[int, ...]]:
    """The table of split 0, and at tp 1 of each op the faster of both."""
    first = problem.tables.op_rows(problem.model, micro_batch, tp, 0)
    second = problem.tables.op_rows(problem.model, micro_batch, tp, 1) if tp == 1 else None
    if first is None or second is None:
        return first, ()
    faster = (second[:, 0] + second[:, 1] < first[:, 0] + first[:, 1]) & np.array([name != "conv1" for name in problem.names])
    return np.where(faster[:, None], second, first), tuple(int(swap) for swap in faster)


def _costs(problem: AcesoProblem, option: StageOption, rows: np.ndarray, algos: tuple[int, ...]) -> OptionCosts:
    links = (problem.tables.p2p_intra, problem.tables.p2p_inter)
    columns = [np.ascontiguousarray(column) for column in rows.T]
    enter = np.stack([np.append(link.each_us(columns[2]), 0.0) for link in links])
    leave = np.stack([np.append(0.0, link.each_us(columns[3])) for link in links])
    forward, compute, kept = columns[0], columns[0] + columns[1], problem.kept_share * columns[5]
    begins, open_end = np.flatnonzero(problem.begins), None
    if len(begins) < len(forward):  # what is recomputed as a whole takes its time at its end
        open_end = ~np.append(problem.begins[1:], True)
        forward = np.zeros_like(forward)
        forward[~open_end] = np.add.reduceat(columns[0], begins)
    return OptionCosts(
        option, forward, compute, kept, columns[4], columns[6], columns[7], columns[2], enter, leave, algos, open_end=open_end
    )  # fmt: skip


def _loose(problem: AcesoProblem, blocks: Blocks, costs: OptionCosts) -> OptionCosts:
    """Costs for bounds: what only flags that are not looked for would save, at the ends of some blocks, is not held at all."""
    first = np.zeros(len(problem.names), bool)
    first[blocks.start[:-1]] = True
    looked_for = (blocks.kind >= 0)[blocks.of_op] & ~np.append(first[1:], True) & (~first | blocks.first_free[blocks.of_op])
    return replace(costs, kept=np.where(looked_for | problem.stays, costs.kept, 0.0))
