"""DynaPipe's interpolation: multilinear between profiled points, infeasible next to a missing one and above the largest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from penstock.costs.table import Floats

__all__ = ["CostGrid"]


@dataclass(frozen=True)
class CostGrid:
    """Values of Q quantities on the points of a grid; each axis ends in a virtual point at twice its largest that holds none."""

    axes: tuple[Floats, ...]
    values: Floats
    """[axis 0, axis 1, …, Q], zero where missing."""
    missing: np.ndarray[Any, np.dtype[np.bool_]]
    """The same shape."""

    @classmethod
    def of(cls, points: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> CostGrid:
        """A grid from scattered points; NaN is a missing value, and of two at one point the larger counts."""
        where = np.array(points)
        axes = [np.unique(column) for column in where.T]
        index = tuple(np.searchsorted(axis, column) for axis, column in zip(axes, where.T, strict=True))
        grid = np.full((*(len(axis) + 1 for axis in axes), len(values[0])), np.nan)
        np.fmax.at(grid, index, np.array(values))
        extended = tuple(np.append(axis, 2 * axis[-1]) for axis in axes)
        return cls(extended, np.nan_to_num(grid), np.isnan(grid))

    def at(self, point: Sequence[Floats]) -> Floats:
        """[…, Q] for arrays of coordinates of one shape; below the smallest point the first cell is extended.

        Corners are summed in a fixed order, so that the result does not depend on how many points are asked for at once.
        """
        lower, upper_weight = [], []
        for axis, x in zip(self.axes, point, strict=True):
            i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
            lower.append(i)
            upper_weight.append((x - axis[i]) / (axis[i + 1] - axis[i]))
        total = np.zeros((*np.shape(point[0]), self.values.shape[-1]))
        infeasible = np.zeros(total.shape, dtype=bool)
        for corner in product((0, 1), repeat=len(self.axes)):
            weight = np.ones(np.shape(point[0]))
            for up, w in zip(corner, upper_weight, strict=True):
                weight = weight * (w if up else 1.0 - w)
            index = tuple(i + up for i, up in zip(lower, corner, strict=True))
            total += weight[..., None] * self.values[index]
            infeasible |= (weight != 0)[..., None] & self.missing[index]
        return np.where(infeasible, np.inf, total)
