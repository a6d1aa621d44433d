"""The least that each sample adds to a stage and takes on its way, whoever its partners are.

The cheapest share of a sample is the least, over all sizes of a micro-batch, of its time per row if all rows were as long as this sample.
"""

from __future__ import annotations

import numpy as np

from penstock.batching.costs import Floats, LayoutCosts, PipelineCosts
from penstock.batching.ordering import Ints

__all__ = ["extended", "lowered", "shares", "ways_s"]


def extended(grid: LayoutCosts, most: float) -> LayoutCosts:
    """The same grid with a last knot of rows or tokens at `most`: shares are looked for at knots, and micro-batches may be larger."""
    sizes, lengths, dec_lengths = grid.axes
    if most <= sizes[-1]:
        return grid
    last = grid.at(most, *np.meshgrid(lengths, dec_lengths, indexing="ij"))
    return LayoutCosts((np.append(sizes, most), lengths, dec_lengths), np.concatenate([grid.values, last[:, :, None]], axis=2))


def lowered(grid: LayoutCosts, axes: tuple[int, ...]) -> LayoutCosts:
    """The same grid, lowered so that no quantity falls along these axes."""
    values = grid.values
    for axis in axes:
        values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return LayoutCosts(grid.axes, values)


def shares(costs: PipelineCosts, classes: tuple[int, ...], room: float, enc: Ints, dec: Ints) -> Floats:
    """Cheapest share of a sample of each pair of lengths in a stage of any of these classes."""
    found = np.full(len(enc), np.inf)
    if "padded" in costs.layouts:
        found = _padded_shares(costs, classes, room, enc, dec)
    if "packed" in costs.layouts:
        found = np.minimum(found, _packed_shares(costs, classes, enc))
    return found


def _padded_shares(costs: PipelineCosts, classes: tuple[int, ...], room: float, enc: Ints, dec: Ints) -> Floats:
    """Between two knots of the number of rows time per row only falls or only rises, so that its least is at a knot, or at the
    last number of rows that fits."""
    grid, unit = costs.layouts["padded"], costs.round_to
    rows = grid.axes[0]
    row, row_dec = -(-enc // unit) * unit, -(-dec // unit) * unit
    cost = grid.at(rows[None, :], row[:, None], row_dec[:, None])[:, :, list(classes)]  # [samples, rows, classes, M, quantities]
    time, peaks = cost[..., 0] + cost[..., 1], cost[..., 3:6]
    fits = (peaks <= room).all(axis=-1) & np.isfinite(time)
    least = np.where(fits, time / rows[:, None, None], np.inf).min(axis=(1, 2, 3))
    with np.errstate(invalid="ignore", divide="ignore"):
        part = np.nan_to_num(((room - peaks[:, :-1]) / (peaks[:, 1:] - peaks[:, :-1])).clip(0, 1), nan=1.0).min(axis=-1)
        at = rows[:-1, None, None] + part * np.diff(rows)[:, None, None]
        edge = (time[:, :-1] + part * (time[:, 1:] - time[:, :-1])) / at
    edge = np.where(fits[:, :-1] & ~fits[:, 1:] & np.isfinite(edge), edge, np.inf)
    return np.asarray(np.minimum(least, edge.min(axis=(1, 2, 3), initial=np.inf)))


def _packed_shares(costs: PipelineCosts, classes: tuple[int, ...], enc: Ints) -> Floats:
    """Of a packed micro-batch each token pays its part of the time, which grows at least by the least slope with what it attends to."""
    grid = costs.layouts["packed"]
    tokens, attended, _ = grid.axes
    times = grid.values[:, 0, :, list(classes), :, :2].sum(axis=-1)  # [classes, attended, tokens, M]
    slope = np.zeros((len(classes), *times.shape[2:]))
    if len(attended) > 1:
        with np.errstate(invalid="ignore"):
            slopes = np.diff(times, axis=1) / np.diff(attended)[:, None, None]
        slope = np.nan_to_num(slopes, nan=1e30, posinf=1e30).min(axis=1)
    per_token = (times[:, 0] + slope * (enc[:, None, None, None] - attended[0])) / tokens[:, None]
    return np.asarray(enc * per_token.min(axis=(1, 2, 3)))


def ways_s(costs: PipelineCosts, enc: Ints, dec: Ints) -> Floats:
    """[samples, stages] least time of both passes of each stage for a micro-batch that holds the sample, with the hops after it."""
    unit, least = costs.round_to, np.full((len(enc), costs.num_stages), np.inf)
    for layout, grid in costs.layouts.items():
        rows = np.ones(len(enc)) if layout == "padded" else enc
        row, row_dec = (-(-enc // unit) * unit, -(-dec // unit) * unit) if layout == "padded" else (enc, 0 * enc)
        passes = lowered(grid, (2,)).at(rows, row, row_dec)[..., :2].min(axis=-2).sum(axis=-1)  # [samples, C]
        for classes in costs.stage_class:
            least = np.minimum(least, passes[:, classes])
    hops = costs.hops.sum(axis=1).min(axis=0)  # [S - 1, 3]
    least[:, :-1] += hops[:, 0] + enc[:, None] * hops[:, 1] + dec[:, None] * hops[:, 2]
    return least
