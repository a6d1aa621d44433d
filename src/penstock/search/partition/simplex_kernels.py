"""The compiled loop behind prices of chains: linear programmes so small that a solver would spend its time on being called."""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["largest", "warm"]

_ZERO = 1e-11
"""What counts as nothing beside 1."""


@njit(cache=True, nogil=True)
def largest(goal, rows, right, most):  # type: ignore[no-untyped-def]
    """x ≥ 0 with rows · x ≤ right, none of which is negative, for which goal · x is the largest, or of the best corner after `most` steps.

    The simplex method on a table of all coefficients: the last row is what the goal would gain, the last column what is left.
    """
    num_rows, num = rows.shape
    table = np.zeros((num_rows + 1, num + 1))
    table[:-1, :-1], table[:-1, -1], table[-1, :-1] = rows, right, goal
    inside, outside = np.arange(num, num + num_rows), np.arange(num)
    for step in range(most):
        enter = -1
        for j in range(num):
            if table[-1, j] > _ZERO:
                # The steepest; after a while the first of all, with which nothing goes round in a circle.
                better = enter < 0 or (table[-1, j] > table[-1, enter] if 2 * step < most else outside[j] < outside[enter])
                enter = j if better else enter
        leave, least = -1, np.inf
        for i in range(num_rows) if enter >= 0 else range(0):
            if table[i, enter] > _ZERO:
                ratio = table[i, -1] / table[i, enter]
                if ratio < least or (ratio == least and inside[i] < inside[leave]):
                    leave, least = i, ratio
        if leave < 0:
            break
        _exchange(table, leave, enter)
        inside[leave], outside[enter] = outside[enter], inside[leave]
    found = np.zeros(num)
    for i in range(num_rows):
        if inside[i] < num:
            found[inside[i]] = max(table[i, -1], 0.0)
    return found


@njit(cache=True, nogil=True)
def _exchange(table, leave, enter):  # type: ignore[no-untyped-def]
    """Solves row `leave` for what column `enter` stands for, and puts that into all others."""
    pivot = table[leave, enter]
    table[leave] /= pivot
    table[leave, enter] = 1 / pivot
    for i in range(table.shape[0]):
        factor = table[i, enter]
        if i != leave and factor != 0.0:
            for j in range(table.shape[1]):
                table[i, j] -= factor * table[leave, j]
            table[i, enter] = -factor / pivot


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    largest(np.ones(2), np.ones((3, 2)), np.ones(3), 9)
