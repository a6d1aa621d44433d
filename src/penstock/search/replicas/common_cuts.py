"""The best cuts of a chain for replicas that lie on different kinds of devices: one set of cuts, unequal numbers of micro-batches.

With m micro-batches a replica takes (m - 1) × its slowest stage + the sum of its stages; then the stage with the most weights is the last
to reduce its gradients. The kernel keeps every (slowest, sum) of all classes, with what follows, that may be best; for each the shares
are then chosen exactly (`shares`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.partition.stages import Ints, StageSpace
from penstock.search.replicas.shares import best_shares, least_time_s

__all__ = ["Afterwards", "CommonCuts", "ReplicaClass", "best_common_cuts"]

LABELS = 128
"""Ways to run the end of a chain that are kept apart."""
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ReplicaClass:
    """Replicas that are alike."""

    options: tuple[int, ...]
    """Of each stage, in pipeline order, which of the space's options it has."""
    crosses: tuple[bool, ...]
    """Of each cut between two stages, whether it lies between nodes."""
    copies: int


@dataclass(frozen=True)
class Afterwards:
    """What follows the last micro-batch: gradients are reduced and weights updated, on all stages at once."""

    per_weight: Floats
    """[stages] time for one weight."""
    weights: Floats
    """[N] of each op, on one rank."""


@dataclass(frozen=True)
class CommonCuts:
    """Where stages begin, and the end; the shares of the replicas, class by class, the time they give, and what none can be below."""

    cuts: tuple[int, ...]
    shares: tuple[int, ...]
    time: float
    bound: float


def best_common_cuts(
    space: StageSpace, classes: tuple[ReplicaClass, ...], num_micro_batches: int, afterwards: Afterwards, known: float = np.inf,
    tolerance: float = TOLERANCE, scale: float = 0.0,
) -> CommonCuts:  # fmt: skip
    """The best cuts for all classes that give less than `known`; no cuts where there are none, and no bound where labels were lost.

    Nothing better than `scale` is to be expected: the tolerance is of that for what follows the last micro-batch.
    """
    from penstock.search.replicas.common_kernels import common_cuts

    depth, num_cuts = len(classes[0].options), len(space.cuts)
    option = np.array([own.options[::-1] for own in classes], np.int64)
    # From the last stage: the message before a stage with k behind crosses where the cut k from the end does.
    before = np.array([[*own.crosses[::-1], False] for own in classes], np.int64)
    behind = np.array([[False, *own.crosses[::-1]] for own in classes], np.int64)
    shape = (depth + 1, num_cuts, LABELS)
    number, most, total = np.zeros(shape[:2], np.int64), np.zeros((*shape, len(classes))), np.zeros((*shape, len(classes)))
    cut, label, score = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
    copies = np.array([float(own.copies) for own in classes])
    late, weights = np.zeros(shape), np.concatenate([[0.0], np.cumsum(afterwards.weights)])[space.cuts]
    lost = common_cuts(
        copies, float(num_micro_batches), known, tolerance / depth, tolerance * scale / depth, option, before, behind,
        _rest(space, classes), np.ascontiguousarray(afterwards.per_weight[::-1]), weights, space.offset, space.width, space.times,
        space.enter, space.leave, space.relief, number, most, total, late, cut, label, score,
    )  # fmt: skip
    best, best_end, paces = known, -1, []
    for end in range(number[depth, 0]):
        own_paces = [
            (max(float(total[depth, 0, end, c]), float(most[depth, 0, end, c])), float(most[depth, 0, end, c]))
            for c, own in enumerate(classes) for _ in range(own.copies)
        ]  # fmt: skip
        if (time := least_time_s(num_micro_batches, own_paces) + float(late[depth, 0, end])) < best:
            best, best_end, paces = time, end, own_paces
    bound = 0.0 if lost else (1 - 2 * tolerance) * best
    if best_end < 0:
        return CommonCuts((), (), np.inf, bound)
    return CommonCuts(_path(space.cuts, cut, label, depth, best_end), best_shares(num_micro_batches, paces), best, bound)


def _path(places: Ints, cut: Ints, label: Ints, depth: int, end: int) -> tuple[int, ...]:
    """The cuts behind a label."""
    at, found = 0, [int(places[0])]
    for k in range(depth, 0, -1):
        at, end = int(cut[k, at, end]), int(label[k, at, end])
        found.append(int(places[at]))
    return tuple(found)


def _rest(space: StageSpace, classes: tuple[ReplicaClass, ...]) -> Floats:
    """[C, cuts] the least time of all ops before each cut, on any device of a class; a stage of zero-bubble counts for less in the sum."""
    ops = np.stack([c.compute if c.relief is None else c.compute - c.relief for c in space.costs])
    least = np.stack([ops[list(own.options)].min(axis=0) for own in classes])
    before = np.concatenate([np.zeros((len(classes), 1)), np.cumsum(least, axis=1)], axis=1)
    return np.ascontiguousarray(before[:, space.cuts])
