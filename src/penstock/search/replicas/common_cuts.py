"""The best cuts of a chain for replicas that lie on different kinds of devices: one set of cuts, unequal numbers of micro-batches.

With m micro-batches a replica takes (m - 1) × its slowest stage + the sum of its stages; then the stage with the most weights is the last
to reduce its gradients. The kernel keeps every (slowest, sum) of all classes, with what follows, that may be best; for each the shares
are then chosen exactly (`shares`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.partition.stage_space import StageSpace
from penstock.search.replicas.shares import best_shares, least_time_s
from penstock.search.space.stage_costs import Ints, sums_before

__all__ = ["TOLERANCE", "Afterwards", "ClassArrays", "CommonCuts", "CutLabels", "ReplicaClass", "best_common_cuts"]

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


class ClassArrays(NamedTuple):
    """Classes of replicas as the kernel takes them; stages are counted from the last, K of them."""

    copies: Floats
    """[C] replicas of each class."""
    option: Ints
    """[C, K] how a class runs the stage with k behind it."""
    arrives: Ints
    """[C, K] whether the message before that stage crosses nodes,"""
    departs: Ints
    """[C, K] and the one after it."""
    rest: Floats
    """[C, cuts] the least time of all ops before a cut."""


class CutLabels(NamedTuple):
    """Ways to run the end of a chain, for each number of stages and cut, that may be part of the best one."""

    number: Ints
    """[K + 1, cuts] of labels in use."""
    most: Floats
    """[K + 1, cuts, L, C] the slowest stage of each class,"""
    total: Floats
    """[K + 1, cuts, L, C] the sum of its stages,"""
    late: Floats
    """[K + 1, cuts, L] what follows the last micro-batch,"""
    score: Floats
    """[K + 1, cuts, L] and what the whole takes at least."""
    cut: Ints
    """[K + 1, cuts, L] the next cut,"""
    label: Ints
    """[K + 1, cuts, L] and the label there."""

    @classmethod
    def empty(cls, depth: int, num_cuts: int, classes: int) -> CutLabels:
        """Room for LABELS each."""
        shape = (depth + 1, num_cuts, LABELS)
        amounts = np.zeros((*shape, classes)), np.zeros((*shape, classes)), np.zeros(shape), np.zeros(shape)
        return cls(np.zeros(shape[:2], np.int64), *amounts, np.zeros(shape, np.int64), np.zeros(shape, np.int64))


def best_common_cuts(
    space: StageSpace, classes: tuple[ReplicaClass, ...], num_micro_batches: int, afterwards: Afterwards, known: float = np.inf,
    tolerance: float = TOLERANCE, scale: float = 0.0,
) -> CommonCuts:  # fmt: skip
    """The best cuts for all classes that give less than `known`; no cuts where there are none, and no bound where labels were lost.

    Nothing better than `scale` is to be expected: the tolerance is of that for what follows the last micro-batch.
    """
    from penstock.search.replicas.common_kernels import common_cuts

    depth = len(classes[0].options)
    # From the last stage: the message before a stage with k behind crosses where the cut k from the end does.
    arrays = ClassArrays(
        np.array([float(own.copies) for own in classes]), np.array([own.options[::-1] for own in classes], np.int64),
        np.array([[*own.crosses[::-1], False] for own in classes], np.int64),
        np.array([[False, *own.crosses[::-1]] for own in classes], np.int64), _rest(space, classes),
    )  # fmt: skip
    labels, weights = CutLabels.empty(depth, len(space.cuts), len(classes)), sums_before([afterwards.weights])[0][space.cuts]
    after, grain = np.ascontiguousarray(afterwards.per_weight[::-1]), tolerance * scale / depth
    lost = common_cuts(float(num_micro_batches), known, tolerance / depth, grain, arrays, after, weights, space.table, labels)
    most, total, late = (found[depth, 0] for found in (labels.most, labels.total, labels.late))
    best, best_end, paces = known, -1, []
    for end in range(labels.number[depth, 0]):
        own_paces = [
            (max(float(total[end, c]), float(most[end, c])), float(most[end, c]))
            for c, own in enumerate(classes) for _ in range(own.copies)
        ]  # fmt: skip
        if (time := least_time_s(num_micro_batches, own_paces) + float(late[end])) < best:
            best, best_end, paces = time, end, own_paces
    bound = 0.0 if lost else (1 - 2 * tolerance) * best
    if best_end < 0:
        return CommonCuts((), (), np.inf, bound)
    return CommonCuts(_path(space.cuts, labels, depth, best_end), best_shares(num_micro_batches, paces), best, bound)


def _path(places: Ints, labels: CutLabels, depth: int, end: int) -> tuple[int, ...]:
    """The cuts behind a label."""
    at, found = 0, [int(places[0])]
    for k in range(depth, 0, -1):
        at, end = int(labels.cut[k, at, end]), int(labels.label[k, at, end])
        found.append(int(places[at]))
    return tuple(found)


def _rest(space: StageSpace, classes: tuple[ReplicaClass, ...]) -> Floats:
    """[C, cuts] the least time of all ops before each cut, on any device of a class; a stage of zero-bubble counts for less in the sum."""
    ops = np.stack([c.compute - c.hidden for c in space.costs])
    before = sums_before([ops[list(own.options)].min(axis=0) for own in classes])
    return np.ascontiguousarray(before[:, space.cuts])
