"""A step time below which no plan is, under FASOP's costs.

Placement is relaxed: each hop takes the best link that its two stages could share, each stage's gradients the best ring. What is left is
a dynamic programme over (stages behind, layers, GPUs used) that keeps every plan whose longest known paths through 1F1B are below a
time in question; the largest time for which none is left is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.search.fasop_model import INTER_OVERHEAD, INTRA_OVERHEAD, Case, FasopProblem, Option

__all__ = ["lower_bound_s"]

MOST_STATES = 400
"""Counts of GPUs by kind are told apart up to here; beyond, kinds are added up by their speed."""
_RESOLUTION = 0.004
_THETA_RESOLUTION = 0.012


@dataclass(frozen=True, eq=False)
class _Relaxed:
    """The arrays of one micro-batch size."""

    case: Case
    shift: np.ndarray
    room: np.ndarray
    half: np.ndarray
    first: np.ndarray
    ring: np.ndarray
    tied_s: float
    best: np.ndarray

    def may_beat(self, time_s: float) -> bool:
        """Whether some plan of the relaxation is below a time."""
        from penstock.search import fasop_kernels as kernels

        intervals = [(0.0, time_s)]
        while intervals:
            low, high = intervals.pop()
            least = kernels.bound(
                self.case, self.shift, self.room, self.half, self.first, self.ring, self.tied_s, high, low, time_s, self.best
            )
            if least + low >= time_s:
                continue
            if high - low < _THETA_RESOLUTION * time_s:
                return True
            middle = (low + high) / 2
            intervals += [(low, middle), (middle, high)]
        return False


def lower_bound_s(problem: FasopProblem, sizes: Sequence[tuple[list[Option], Case]], known_s: float) -> float:
    """The bound over all micro-batch sizes; at most `known_s`, the time of a plan at hand."""
    least = known_s
    for options, case in sizes:
        relaxed = _relaxed(problem, options, case)
        if not relaxed.may_beat(least):
            continue
        low, high = 0.0, least
        step = 0.02 * known_s
        while high - step > 0 and relaxed.may_beat(high - step):
            high -= step
            step *= 2
        low = max(0.0, high - step)
        while high - low > _RESOLUTION * known_s:
            middle = (low + high) / 2
            low, high = (low, middle) if relaxed.may_beat(middle) else (middle, high)
        least = low
    return least


def _relaxed(problem: FasopProblem, options: list[Option], case: Case) -> _Relaxed:
    kinds, num_layers = list(problem.kinds.values()), len(case.gradient_bits) - 1
    units, limit = _budget(problem, options, case)
    stride = np.concatenate([[1], np.cumprod(limit + 1)[:-1]]).astype(np.int64)
    num_states = int(np.prod(limit + 1))
    digits = np.arange(num_states)[:, None] // stride % (limit + 1)
    room = np.array([(digits + units[c] <= limit).all(axis=1) for c in range(len(options))])
    half = np.array([min(_hop_s(problem, case, a, b) for b in options) for a in options])
    intra = np.array([max(kinds[k].intra_bits_per_s for k in option.kinds) for option in options])
    inter = np.array([max(kinds[k].inter_bits_per_s for k in option.kinds) for option in options])
    in_node = np.array([option.num_devices <= max(kinds[k].gpus_per_node for k in option.kinds) for option in options])
    ring = np.where(in_node, np.maximum(intra, inter), inter)
    dp, tp = case.dp.astype(float), case.tp.astype(float)
    tied = case.tied_bits / tp * np.minimum(dp, case.per_node) / np.maximum(intra, inter)
    first = (2 * (dp - 1) / dp / ring)[:, None] * case.gradient_bits
    first[:, :num_layers] += tied[:, None]
    depth = min(problem.num_devices, num_layers)
    best = np.empty((depth + 1, num_layers + 1, num_states))
    return _Relaxed(case, units @ stride, room, half, first, ring, float(tied.min()), best)


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


def _hop_s(problem: FasopProblem, case: Case, a: Option, b: Option) -> float:
    """The least that a hop between two stages can take: over the network, or inside nodes that have room for both."""
    kinds, shares = list(problem.kinds.values()), (case.samples // a.dp, case.samples // b.dp)
    network = min(max(kinds[k].inter_bits_per_s for k in option.kinds) for option in (a, b))
    flows = max(a.dp, b.dp) * max(a.tp, b.tp)
    least = math.gcd(*shares) * flows * case.sample_bits * INTER_OVERHEAD / network
    for k in set(a.kinds) & set(b.kinds):
        nodes = min(a.dp, b.dp, sum(problem.counts))
        if a.num_devices + b.num_devices <= max(kind.gpus_per_node for kind in kinds) * nodes:
            least = min(least, min(shares) * case.sample_bits * INTRA_OVERHEAD / kinds[k].intra_bits_per_s)
    return least
