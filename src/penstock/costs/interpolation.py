"""Times and bytes between measured points: rates over log sizes, linear in the mean key length of attention.

Along the size axis time is interpolated on log-log axes, which is exact both where a launch costs the same whatever the
size and where work grows with it. Along the length axis the rate per token is linear, so that a packed micro-batch of mixed
lengths costs what its tokens and its sum of squares say. Beyond the longest length it rises as between the last two, or as over all of
them if that is more: it never falls there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.costs.profile import HOST_COLUMNS, Series
from penstock.costs.table import Floats

__all__ = ["MeasuredCurves", "fit_optimizer"]


def _along_size(sizes: Floats, values: Floats, at: Floats, log: bool) -> Floats:
    """Piecewise interpolation with the end pieces continued; on log-log axes their slope stays between 0 and 1."""
    if len(sizes) == 1:
        ratio = at / sizes[0]
        return np.asarray(values[0] * (np.maximum(ratio, 1.0) if log else ratio))
    x, y, q = (np.log(sizes), np.log(values), np.log(at)) if log else (sizes, values, at)
    piece = np.clip(np.searchsorted(x, q, side="right") - 1, 0, len(x) - 2)
    slope = (y[piece + 1] - y[piece]) / (x[piece + 1] - x[piece])
    if log:
        slope = np.where((q < x[0]) | (q > x[-1]), np.clip(slope, 0.0, 1.0), slope)
    nearest = np.where(q > x[-1], piece + 1, piece)  # Beyond the end from the last point on, so that nothing jumps there.
    result = y[nearest] + slope * (q - x[nearest])
    return np.exp(result) if log else result


HOST_TOKENS = 4096
"""Sizes above are not asked for a host's time: devices are busy longer than hosts take to issue them."""


@dataclass(frozen=True)
class _Curve:
    """Points of one length, sorted by size; repeated sizes hold the median of their steady measurements."""

    sizes: Floats
    columns: dict[str, Floats]


class MeasuredCurves:
    """Answers for one series at any (size, length)."""

    def __init__(self, series: Series) -> None:
        size, length = (np.array(series.columns[name]) for name in ("size", "length"))
        self._lengths = np.unique(length)
        self._curves = [_curve(series, size, length == own) for own in self._lengths]
        self._host_sizes = np.unique(size[size <= HOST_TOKENS]) if (size <= HOST_TOKENS).any() else np.unique(size)
        self._host = {
            name: np.array([np.median(np.array(series.columns[name])[size == own]) for own in self._host_sizes])
            for name in HOST_COLUMNS
        }

    def __call__(self, column: str, size: Floats, length: Floats, log: bool) -> Floats:
        """`column` at each (size, length), never below zero; `log` for times, plain lines for bytes. No work takes nothing."""
        known, size = size, np.maximum(size, 1e-9)
        by_length = np.stack([_along_size(c.sizes, c.columns[column], size, log) / size for c in self._curves])
        if len(self._lengths) == 1:
            return np.where(known > 0, np.maximum(by_length[0], 0.0) * size, 0.0)
        piece = np.clip(np.searchsorted(self._lengths, length, side="right") - 1, 0, len(self._lengths) - 2)
        low, high = self._lengths[piece], self._lengths[piece + 1]
        share, beyond = np.clip((length - low) / (high - low), 0.0, 1.0), np.maximum(length - high, 0.0)
        which = np.arange(len(size))
        first, second = by_length[piece, which], by_length[piece + 1, which]
        # One piece alone may fall, where a longer length runs other kernels, and would reach zero.
        overall = (by_length[-1] - by_length[0]) / (self._lengths[-1] - self._lengths[0])
        rising = np.maximum(np.maximum((second - first) / (high - low), overall), 0.0)
        return np.where(known > 0, np.maximum(first + share * (second - first) + beyond * rising, 0.0) * size, 0.0)

    def host_s(self, column: str, size: Floats) -> Floats:
        """Time to issue the op at each size, since other sizes run other kernels; outside the known ones the nearest counts."""
        return np.asarray(np.interp(np.log(np.maximum(size, 1e-9)), np.log(self._host_sizes), self._host[column]))


def _curve(series: Series, size: Floats, chosen: NDArray[np.bool_]) -> _Curve:
    names = [name for name in series.columns if name not in ("size", "length", "spread")]
    sizes = np.unique(size[chosen])
    spread = np.array(series.columns["spread"])
    steady = [_steady(spread, chosen & (size == one)) for one in sizes]
    columns = {}
    for name in names:
        values = np.array(series.columns[name])
        columns[name] = np.array([np.median(values[which]) for which in steady])
        if name.endswith("_s"):
            columns[name] = np.maximum(columns[name], 1e-9)
    return _Curve(sizes, columns)


def _steady(spread: Floats, repeats: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of repeated measurements those that spread little: one that was disturbed must not weigh as much as one that was not."""
    return repeats & (spread <= max(0.005, 3 * float(spread[repeats].min())))


def fit_optimizer(parameters: Floats, tensors: Floats, times: Floats) -> tuple[float, float]:
    """(seconds per weight, seconds per tensor) that fit measured optimizer steps with the least relative error."""
    from scipy.optimize import nnls

    system = np.stack([parameters, tensors], axis=1) / times[:, None]
    solution, _ = nnls(system, np.ones(len(times)))
    return float(solution[0]), float(solution[1])
