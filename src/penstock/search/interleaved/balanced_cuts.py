"""Cuts of an interleaved pipeline near equal chunks, moved until the groups' sums are nearly equal.

The formula for interleaved pipelines holds for chunks of about equal time alone, so each cut stays within a tenth of a chunk, or an op, of
where equal ones would be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.interleaved.group_links import GroupLinks
from penstock.search.space.stage_costs import Ints

__all__ = ["CutPlaces", "balanced_cuts", "cut_windows", "near_equal"]

_MOVES, _LEAST_MOVES = 20_000, 60_000
"""That are tried for each cut, and for all of them."""
_WINDOW = 0.1
"""Of a chunk, by which a cut may be off."""


class CutPlaces(NamedTuple):
    """The places of cuts as the kernel takes them: what lies before each, and the messages of a cut there."""

    before: Floats
    """[places] prefix sums of op times."""
    enter: Floats
    """[groups, places] messages at the beginning of a group's chunk,"""
    leave: Floats
    """[groups, places] and at its end."""
    weights: Floats
    """[places] prefix sums of weights."""
    after: Floats
    """[groups] what follows the last micro-batch for each weight,"""
    tied: Floats
    """[groups] and at all."""


def balanced_cuts(
    time: Floats, links: GroupLinks, starts: Ints, count: int, chunks: int, draw: int = 0, even: float = 0.0
) -> tuple[Ints, float]:
    """[v · G + 1] cuts near equal chunks, moved so that the pipeline of the groups' sums and what follows it are short, and their time.

    They begin between any two ops, and between blocks (`starts`), whose messages are often smaller, where there are enough of them. Each
    `draw` moves other cuts. With `even`, chunks are kept more equal, and have a price if they are not, as part of the time.
    """
    from penstock.search.interleaved.balance_kernels import balance

    num_chunks = len(links.enter) * chunks
    before, every = np.concatenate([[0.0], np.cumsum(time)]), np.arange(len(time) + 1)
    windows = cut_windows(before, num_chunks)
    steps = max(_MOVES * num_chunks, _LEAST_MOVES)

    def moved(places: Ints, low: Ints, high: Ints, cuts: Ints) -> tuple[Ints, float]:
        found = cuts.copy()
        messages = links.enter.take(places, axis=1), links.leave.take(places, axis=1)  # in the order that the kernel is compiled for
        tables = CutPlaces(before[places], *messages, links.weights[places], links.after_s, links.tied_s)
        time_s = balance(tables, low, high, count - 1 / chunks, 1 / chunks, steps, draw, even, found)
        return places[found], float(time_s)

    tried: list[tuple[Ints, float]] = []
    for places in (every, starts):
        low, high = np.searchsorted(places, windows[0]), np.searchsorted(places, windows[1], side="right") - 1
        cuts = near_equal(before[places], low, high)
        if cuts is not None:
            tried.append(moved(places, low, high, cuts))
    if len(tried) > 1:
        tried.append(moved(every, *windows, tried[1][0]))
    return min(tried, key=lambda found: found[1])


def cut_windows(before: Floats, num_chunks: int) -> tuple[Ints, Ints]:
    """[chunks + 1] the first and the last op at which each cut may be; the nearest ops on both sides always."""
    share = float(before[-1]) / num_chunks
    wanted, least = share * np.arange(num_chunks + 1), np.arange(num_chunks + 1)
    low = np.searchsorted(before, wanted - _WINDOW * share, side="right") - 1
    high = np.searchsorted(before, wanted + _WINDOW * share, side="left")
    low, high = np.clip(low, least, len(before) - 1 - least[::-1]), np.clip(high, least, len(before) - 1 - least[::-1])
    low[0] = high[0] = 0
    low[-1] = high[-1] = len(before) - 1
    return np.asarray(low), np.asarray(high)


def near_equal(before: Floats, low: Ints, high: Ints) -> Ints | None:
    """Cuts nearest to equal chunks within their windows, each with a place at least; None where there are too few places."""
    if len(low) > len(before) or (low > high).any():
        return None
    wanted = before[-1] * np.arange(len(low)) / (len(low) - 1)
    after = np.clip(np.searchsorted(before, wanted), 1, len(before) - 1)
    nearest = np.clip(after - (wanted - before[after - 1] < before[after] - wanted), low, high)
    cuts = np.maximum.accumulate(nearest - np.arange(len(low))) + np.arange(len(low))
    return np.asarray(cuts) if (cuts <= high).all() else None
