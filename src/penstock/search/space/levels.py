"""Lagrangian sweep over recomputation: at each of some multipliers (time per byte), which ops of a block are worth recomputing.

A stage is the end of one block, whole blocks, and the beginning of another. Blocks repeat, so each piece of each distinct block is solved
once per multiplier; what a stage saves is then a sum of a few table entries.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.space.blocks import Blocks
from penstock.search.space.stage_costs import OptionCosts

__all__ = ["NO_LEVELS", "UNITS", "Levels", "levels_of", "limited_levels", "segment_ranges"]

PRICES = 60
"""Multipliers at which recomputation is solved; those that change nothing are dropped."""
UNITS = 4096
"""Steps of memory in which one block's recomputation is solved exactly."""


class Levels(NamedTuple):
    """Lagrangian sweep over recomputation: (bytes saved, time, peak) per multiplier, [L, …, 3], for the pieces of one option's chain."""

    prices: Floats
    """[L] the multipliers, from 0 to one at which only memory counts."""
    head: Floats
    """[L, N, 3] of the piece from an op to the end of its block."""
    tail: Floats
    """[L, N + 1, 3] of the piece from the start of a block up to an op."""
    full: Floats
    """[L, T, 3] of whole blocks of each type."""
    least: Floats
    """[T, UNITS] least time to save a number of units in one block: between two multipliers only single blocks make up the rest."""
    unit: Floats
    """[T] memory of one unit."""


NO_LEVELS = Levels(np.zeros(1), np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.zeros((1, 1)), np.ones(1))
"""Where nothing is recomputed."""


def levels_of(costs: OptionCosts, blocks: Blocks) -> Levels:
    """Solves recomputation of every piece of every distinct block."""
    from penstock.search.space.recompute_kernels import least_times, piece_levels

    num_ops, num_types = len(costs.compute), max(blocks.num_types, 1)
    counted = (costs.kept > 1e-3 * costs.kept.max()) & (costs.forward > 0)
    ratios = costs.forward[counted] / costs.kept[counted] if counted.any() else np.ones(1)  # where nothing is kept any price will do
    prices = np.concatenate([[0.0], np.geomspace(0.3 * ratios.min(), 4 * ratios.max(), PRICES), [1e6 * ratios.max()]])
    head, tail = np.zeros((len(prices), num_ops, 3)), np.zeros((len(prices), num_ops + 1, 3))
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        edges, free = np.array([start, stop]), np.array([blocks.first_free[blocks.of_op[start]]])
        piece_levels(costs.forward, costs.ending, costs.kept, edges, free, prices, head, tail)
    # Equal blocks have equal pieces, so that those of one stand for the others, of which a long chain has thousands.
    (own, of_op), (ends, of_end) = (np.unique(at, return_inverse=True) for at in (blocks.alike, np.append(blocks.alike, num_ops)))
    head, tail = head[:, own], tail[:, ends]
    changed = [(head[level] != head[level - 1]).any() or (tail[level] != tail[level - 1]).any() for level in range(1, len(prices))]
    new = np.flatnonzero([True, *changed])
    prices, head, tail = prices[new], np.take(head[new], of_op, axis=1), np.take(tail[new], of_end, axis=1)
    full = np.zeros((len(prices), num_types, 3))
    least, unit = np.full((num_types, UNITS), np.inf), np.ones(num_types)
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        full[:, kind] = head[:, start]
        unit[kind] = max(float(costs.kept[start:stop].sum()), 1e-9) / (UNITS - 1)
        first_free, parents = bool(blocks.first_free[blocks.of_op[start]]), np.zeros((stop - start, 2, UNITS), np.int8)
        least_times(costs.forward, costs.ending, costs.kept, start, stop, first_free, unit[kind], least[kind], parents)
    return Levels(prices, head, tail, full, least, unit)


_LEAST_SEGMENT = 0.13
"""Of the largest block: what is smaller makes little difference."""


def segment_ranges(costs: OptionCosts, blocks: Blocks, number: int) -> list[tuple[float, float]]:
    """Ranges of what the largest recomputed segment holds, up to all of the largest block."""
    whole = max((float(costs.kept[slice(*blocks.example(kind))].sum()) for kind in range(blocks.num_types)), default=0.0)
    ratio = max(0.75, _LEAST_SEGMENT ** (1 / (number - 1))) if number > 1 else 0.0
    edges = [0.0, *(whole * ratio ** np.arange(number - 1, 0, -1)), np.inf]
    return list(pairwise(edges))


def limited_levels(costs: OptionCosts, blocks: Blocks, levels: Levels, most: float) -> Levels:
    """The levels if no segment may hold more than `most`, without peaks: only what a bound asks for."""
    from penstock.search.space.recompute_kernels import limited_levels as limit

    head, tail, full = (np.zeros_like(x) for x in (levels.head, levels.tail, levels.full))
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        free = bool(blocks.first_free[blocks.of_op[start]])
        limit(costs.forward, costs.ending, costs.kept, start, stop, free, most, levels.prices, head, tail)
        full[:, kind] = head[:, start]
    alike = blocks.alike
    return levels._replace(head=np.take(head, alike, axis=1), tail=np.take(tail, np.append(alike, len(alike)), axis=1), full=full)
