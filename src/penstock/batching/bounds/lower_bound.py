"""What no plan of a batch can beat: busy time of the slowest stage over all replicas, plus the cheapest way to reach it and back.

    T ≥ Σ cheapest share of each sample on stage s / replicas + least fill before s + least drain after it        for every stage s
    T ≥ the way of each sample through all stages and back

Times are first lowered until they grow with length, which can only lower the bound. With one length per sample the exact programme over
sorted samples replaces the shares, since sorted neighbours are then the best partners. With two, no order is best, and a linear
programme over all micro-batches (`columns`) replaces them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.batching.bounds.columns import KNOTS, Prices, column_bound_s
from penstock.batching.bounds.shares import extended, lowered, shares, ways_s
from penstock.batching.costs import ChunkCosts, PipelineCosts
from penstock.batching.ordering import Ints, by_length
from penstock.batching.split import Windows
from penstock.models.shapes import Layout

__all__ = ["lower_bound_s"]

_EXACT = 8192
"""Most samples for the programmes; above, shares are as good."""


def lower_bound_s(costs: PipelineCosts, enc: Ints, dec: Ints, exact: bool = False, knots: Sequence[int] = KNOTS) -> float:
    """Seconds; `exact` spends a whole programme per kind of stage, or one for all of them, where the batch allows it; `knots` as
    `columns` has them."""
    pairs, same = np.unique(np.stack([enc, dec]), axis=1, return_inverse=True)
    most: dict[Layout, float] = {"padded": float(len(enc)), "packed": float(enc.sum())}
    whole = replace(costs, layouts={layout: extended(grid, most[layout]) for layout, grid in costs.layouts.items()})
    easy = replace(whole, layouts={layout: lowered(grid, (0, 1)) for layout, grid in whole.layouts.items()})
    room = (costs.limit_bytes - costs.state_bytes).max(axis=0)
    kinds = [(tuple(sorted(set(costs.stage_class[:, s].tolist()))), float(room[s])) for s in range(costs.num_stages)]
    exact = exact and set(costs.layouts) == {"padded"} and len(enc) <= _EXACT
    ways = ways_s(easy if costs.chunks is None else _of_chunks(easy, costs.chunks, most), pairs[0], pairs[1])
    reach = np.append(0.0, ways.min(axis=0)[: costs.num_stages - 1]).cumsum()
    share = {kind: shares(easy, *kind, pairs[0], pairs[1])[same.ravel()] / costs.num_replicas for kind in set(kinds)}
    busy = {kind: float(share[kind].sum()) for kind in share}
    if exact and not dec.any():
        for classes, free in (kind for kind in busy if len(kind[0]) == 1):
            stage = _one_stage(easy, classes[0], free)
            busy[classes, free] = Windows(stage, enc, dec, by_length(enc, dec), len(enc)).split(np.inf)[0] / costs.num_replicas
    best_s, slowest = max((busy[kind] + float(reach[s]), s) for s, kind in enumerate(kinds))
    if exact and dec.any() and costs.chunks is None:
        known = Prices(np.eye(costs.num_stages)[slowest], np.zeros(costs.num_stages), share[kinds[slowest]])
        best_s = max(best_s, column_bound_s(whole, enc, dec, reach, known, knots))
    return max(best_s, float(ways.sum(axis=1).max())) + costs.fixed_s


def _of_chunks(costs: PipelineCosts, chunks: ChunkCosts, most: dict[Layout, float]) -> PipelineCosts:
    """A pipeline whose stages are chunks: it is filled and drained through the first chunk of each group alone."""
    layouts = {layout: lowered(extended(grid, most[layout]), (0, 1)) for layout, grid in chunks.layouts.items()}
    return replace(costs, layouts=layouts, stage_class=chunks.stage_class, hops=chunks.hops, chunks=None)


def _one_stage(costs: PipelineCosts, stage_class: int, room: float) -> PipelineCosts:
    """A pipeline of this stage alone."""
    one = np.ones((1, 1))
    alone = np.full((1, 1), stage_class, dtype=np.int64)
    return replace(costs, stage_class=alone, state_bytes=0 * one, limit_bytes=room * one, hops=np.zeros((1, 2, 0, 3)), chunks=None)
