"""A step time below which no plan is, under FASOP's costs.

Placement is relaxed: GPUs of each kind are counted, and stages that send each other messages inside nodes must be able to stand on the
same ones (`forms`). What is left is a dynamic programme over (stages behind, layers, GPUs used, form of the stage), which is run for
boxes: an interval of the time of the longest path beside the sum, and some last stages. The box with the least bound is split until
it is narrow.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.systems.fasop.forms import RelaxedCase, relax
from penstock.systems.fasop.rules import Case, FasopProblem, Option

__all__ = ["lower_bound_s"]

MOST_STATES = 400
"""Counts of GPUs by kind are told apart up to here; beyond, kinds are added up by their speed."""
MOST_WORK = 19_000_000
"""Steps of the programme, over all boxes, after which the bound is taken as it is: the same everywhere, unlike seconds."""
_ANY_WORK = 2**62
_NEARLY_PROVEN = 0.99
"""Where the bound is at least this share of the known time, half of `MOST_WORK` is enough."""
_WORK_OF_A_BOX = 4_000
"""What it takes to set up a box, in the same steps."""
_FLOORS = (0.3, 0.5, 0.7)
"""Shares of the known time that are tried as a bound first: little work, and certain even where `MOST_WORK` does not suffice for more."""
_START, _LEAP = 0.88, 0.4
"""Boxes are bounded only up to a limit, since less work is needed the lower it is: at first this share of the known time, then the bound so
far and this share of what is missing."""
_RESOLUTION = 0.003
"""Share of the known time by which the limit rises at least."""
_LABELS = 2
"""Ways to a form and a state that are told apart; more of them make the bound hardly larger."""
_THETA_RESOLUTION = 0.006
_TIED_RESOLUTION = 0.002
"""Shares of the known time: a box is not divided where its longest paths, or the tied embeddings of its last stages, differ by less."""


@dataclass(frozen=True, eq=False)
class _Box:
    """Plans of one micro-batch size by the longest path beside their sum, and by their last stage."""

    relaxed: RelaxedCase
    low_s: float
    high_s: float
    last: np.ndarray
    """Last stages, those with a cheap tied embedding first."""
    space: tuple[np.ndarray, np.ndarray, np.ndarray]
    """For the programme to work in, shared by all boxes of the size: new memory for each would take longer than the work in it."""

    @classmethod
    def of(cls, relaxed: RelaxedCase, known_s: float) -> _Box:
        """All plans below a known time."""
        rows = 2 * len(relaxed.case.gradient_bits) * relaxed.steps.room.shape[1] * len(relaxed.steps.base)
        space = np.empty((rows, _LABELS)), np.empty((rows, _LABELS)), np.empty(rows, np.int64)
        return cls(relaxed, 0.0, known_s, np.argsort(relaxed.tied_s.mean(axis=0), kind="stable"), space)

    def least_s(self, known_s: float, most_work: int) -> tuple[float, int]:
        """A time that no plan of the box is below, at most `known_s`, or zero if it would be too much work; and the work it took."""
        from penstock.systems.fasop import bound_kernels as kernels

        relaxed, allowed = self.relaxed, np.zeros(len(self.relaxed.steps.option), np.bool_)
        allowed[self.last] = True
        after, tied = relaxed.after_s(self.last), float(relaxed.tied_s[:, self.last].min())
        least_s, work = kernels.bound(
            relaxed.case, relaxed.steps, allowed, after, tied, self.high_s, self.low_s, known_s, most_work, *self.space
        )
        return float(least_s), int(work) + _WORK_OF_A_BOX

    def halves(self, known_s: float) -> list[_Box]:
        """Two boxes that cover this one, or none if it is narrow."""
        if self.high_s - self.low_s > _THETA_RESOLUTION * known_s:
            middle = (self.low_s + self.high_s) / 2
            return [replace(self, high_s=middle), replace(self, low_s=middle)]
        tied = np.minimum(self.relaxed.tied_s[:, self.last], known_s)
        if len(self.last) > 1 and (tied.max(axis=1) - tied.min(axis=1)).max() > _TIED_RESOLUTION * known_s:
            middle = len(self.last) // 2
            return [replace(self, last=self.last[:middle]), replace(self, last=self.last[middle:])]
        return []


def lower_bound_s(problem: FasopProblem, sizes: Sequence[tuple[list[Option], Case]], known_s: float) -> float:
    """The bound over all micro-batch sizes; at most `known_s`, the time of a plan at hand, above which nothing is looked at."""
    parts = [_Box.of(relax(problem, options, case, *_budget(problem, options, case)), known_s) for options, case in sizes]
    heap: list[tuple[float, int, bool, _Box]] = []
    number, work, narrow = 0, 0, False
    floor_s, limit_s, step_s = 0.0, _START * known_s, _RESOLUTION * known_s
    for share in _FLOORS:
        found = [part.least_s(share * known_s, MOST_WORK if floor_s else _ANY_WORK) for part in parts]
        work += sum(done for _, done in found)
        floor_s = max(floor_s, min(found_s for found_s, _ in found))
        if floor_s < share * known_s:
            limit_s = share * known_s
            break
    while True:
        for part in parts:
            found_s, done = part.least_s(limit_s, MOST_WORK)
            number, work = number + 1, work + done
            heapq.heappush(heap, (max(found_s, floor_s), number, narrow and found_s < floor_s + step_s / 2, part))
        floor_s, _, final, box = heapq.heappop(heap)
        if final or floor_s >= known_s or work > (MOST_WORK // 2 if floor_s >= _NEARLY_PROVEN * known_s else MOST_WORK):
            return min(floor_s, known_s)
        parts = box.halves(known_s)
        narrow = not parts
        limit_s = min(known_s, floor_s + max(step_s, 0.0 if narrow else (known_s - floor_s) * _LEAP))
        parts = parts or [box]


def _budget(problem: FasopProblem, options: list[Option], case: Case) -> tuple[np.ndarray, np.ndarray]:
    """What each option takes of each limit: GPUs by kind, or, where there are too many counts, GPUs weighed by speed."""
    limit = [kind.gpus_per_node * count for kind, count in zip(problem.kinds.values(), problem.counts, strict=True)]
    if math.prod(n + 1 for n in limit) <= MOST_STATES:
        units = np.zeros((len(options), len(limit)), np.int64)
        for c, option in enumerate(options):
            for k in option.kinds:
                units[c, k] = max(0, option.num_devices - sum(limit[other] for other in option.kinds if other != k))
        return units, np.array(limit, np.int64)
    work = [math.inf] * len(limit)
    for c, option in enumerate(options):
        for k in option.kinds:
            work[k] = min(work[k], option.num_devices * case.times[c, -1])
    weight = [max(1, round(2 * max(w for w in work if w < math.inf) / w)) if w < math.inf else 1 for w in work]
    total = sum(w * n for w, n in zip(weight, limit, strict=True))
    grain = -(-total // MOST_STATES)  # counts are rounded down, which only lets more plans through
    weighed = [[option.num_devices * min(weight[k] for k in option.kinds) // grain] for option in options]
    return np.array(weighed, np.int64), np.array([total // grain], np.int64)
