"""Packed micro-batches of equal cost: samples dealt, the most expensive first, to the group that costs least so far.

A sample pays for its tokens and for the squares that attention takes. One that alone costs more than a share stands alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from penstock.batching.costs import Floats, PipelineCosts
from penstock.batching.ordering import Ints
from penstock.batching.split import FILL, BatchSplit

__all__ = ["equal_groups", "packed_splits", "sample_costs"]

_TRIED = 20
"""Numbers of groups that are tried."""
_KEPT = 8
"""Of those, how many are run."""
_MOST_TOKENS = 65536
"""Tokens of the largest groups that are tried."""


def packed_splits(costs: PipelineCosts, enc: Ints) -> list[BatchSplit]:
    """Splits into different numbers of equal groups, the most promising first."""
    weights, total, pipelined = sample_costs(costs, enc), int(enc.sum()), 2 * (costs.num_stages - 1) * costs.num_replicas
    fewest = max(1, min(len(enc), total // _MOST_TOKENS))
    counts = {round(count) for count in np.geomspace(fewest, len(enc), _TRIED)}
    found = [equal_groups(weights, count, min(pipelined, count // 2)) for count in sorted(counts)]
    splits = (BatchSplit(time_s, *groups) for time_s, groups in zip(_objectives_s(costs, enc, found), found, strict=True))
    return sorted(splits, key=lambda split: split.objective_s)[:_KEPT]


def sample_costs(costs: PipelineCosts, enc: Ints) -> Floats:
    """What each sample adds to a packed micro-batch on the slowest stage, in seconds: a · tokens + b · tokens²."""
    grid = costs.layouts["packed"]
    tokens = np.full(len(enc), 4096.0)
    found = grid.at(tokens, enc, 0.0)[..., :2].sum(axis=-1).min(axis=-1)  # [samples, classes]
    return np.asarray(found[:, np.unique(costs.stage_class)].max(axis=1) * enc / 4096)


def equal_groups(weights: Floats, count: int, small: int = 0) -> tuple[Ints, Ints]:
    """(order, cuts) of `count` groups of nearly equal weight, but for `small` ones of a fifth to all of it, which fill and drain
    a pipeline sooner."""
    groups: list[list[int]] = [[] for _ in range(count)]
    lacks = [0.8 * (small - group) / small if group < small else 0.0 for group in range(count)]
    share = float(weights.sum()) / max(count - sum(lacks), 1.0)
    heap = [(lack * share, group) for group, lack in enumerate(lacks)]
    heapq.heapify(heap)
    for sample in np.argsort(-weights, kind="stable").tolist():
        load, group = heap[0]
        groups[group].append(sample)
        heapq.heapreplace(heap, (load + float(weights[sample]), group))
    filled = [group for group in groups if group]
    order = np.array([sample for group in filled for sample in group], dtype=np.int64)
    return order, np.cumsum([0, *map(len, filled)]).astype(np.int64)


def _objectives_s(costs: PipelineCosts, enc: Ints, splits: Sequence[tuple[Ints, Ints]]) -> list[float]:
    """Of each split, (order, cuts), the fill of its largest group and the sum of all, as for padded splits; all are looked up at once."""
    tokens, squares = (
        np.concatenate([np.add.reduceat(values[order], cuts[:-1]) for order, cuts in splits]) for values in (enc.astype(float), enc * enc)
    )
    times = costs.layouts["packed"].at(tokens, squares / tokens, 0.0)[..., :2].sum(axis=-1).min(axis=-1)
    slowest = times[:, np.unique(costs.stage_class)].max(axis=1)
    parts = np.split(slowest, np.cumsum([len(cuts) - 1 for _, cuts in splits])[:-1])
    return [float(FILL * (costs.num_stages - 1) * part.max() + part.sum() / costs.num_replicas) for part in parts]
