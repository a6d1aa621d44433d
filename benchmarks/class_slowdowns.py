"""How much slower each class of ops runs on a rank beside a foreign load, with an interval, from the rank's own passes.

    measured / predicted of a pass  =  Σ over classes  (share of the pass that is predicted for the class) × (slow-down of the class)

Passes of different shapes, forward and backward, mix classes differently (attention grows with the square of a length), which tells them
apart: non-negative least squares. Where passes are alike, as with fixed shapes, the classes cannot be told apart; the estimate then is the
same slow-down for all of them, and the interval says how far classes usually are from each other. Runs make no such fit: they do not keep
the passes that it needs, and use what a profile measured beside loads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from penstock.costs.speeds import OpClass

__all__ = ["ClassSlowdown", "Slowdowns", "fit_slowdowns"]

Floats = NDArray[np.float64]

SPREAD = 0.3
"""How far classes usually are from the slow-down of all together, as a share of it (beside burners on CPUs and GPUs)."""
OWN_SPREAD = 0.03
"""How far a stage of several ops is from what their classes say, since no op is quite like its class."""
HUBER = 1.5
"""Residuals beyond so many times the usual noise, such as hiccups, count less."""
ROBUST = 1.2
"""Variance of an estimate that does not rely on all rows, over one that does."""
ROUNDS = 4
NORMAL_90 = 1.6449
"""A normal variable is within so many standard deviations in 90 % of cases."""


@dataclass(frozen=True, slots=True)
class ClassSlowdown:
    """A slow-down and its 90 % interval."""

    factor: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Slowdowns:
    """Slow-downs of all classes, and how uncertain they are together."""

    classes: tuple[OpClass, ...]
    factors: Floats
    covariance: Floats

    def of(self, op_class: OpClass) -> ClassSlowdown:
        """The slow-down of one class."""
        return self.of_stage({op_class: 1.0}, spread=0.0)

    def of_stage(self, predicted_s: Mapping[OpClass, float], spread: float = OWN_SPREAD) -> ClassSlowdown:
        """The slow-down of a pass, or of a whole stage, from the seconds that are predicted for it in each class; the rank need not have
        that stage."""
        total = sum(predicted_s.values())
        shares = np.array([predicted_s.get(op_class, 0.0) / total for op_class in self.classes])
        factor = float(shares @ self.factors)
        width = NORMAL_90 * math.hypot(math.sqrt(float(shares @ self.covariance @ shares)), spread * factor)
        return ClassSlowdown(factor, max(0.0, factor - width), factor + width)


def fit_slowdowns(predicted_s: Mapping[OpClass, Floats], measured_s: Floats) -> Slowdowns:
    """From the passes of a rank: what was predicted for each class in each of them, and what each took.

    A class of which there is nothing gets the slow-down of all together.
    """
    classes = tuple(predicted_s)
    table = np.stack([np.asarray(predicted_s[one], dtype=np.float64) for one in classes], axis=1)
    known = table.sum(axis=1) > 0  # ops for which nothing is predicted say nothing about ratios
    table, total = table[known], table.sum(axis=1)[known]
    shares, ratios = table / total[:, None], np.asarray(measured_s, dtype=np.float64)[known] / total
    scalar = float(np.median(ratios))
    weights = np.ones(len(ratios))
    factors = np.full(len(classes), scalar)
    noise = prior = SPREAD * scalar
    for _ in range(ROUNDS):
        rest = ratios - shares @ factors
        noise = max(1.4826 * float(np.median(np.abs(rest))), 1e-4 * scalar)
        weights = 1.0 / np.maximum(1.0, np.abs(rest) / (HUBER * noise))
        root = np.sqrt(weights) / noise
        rows = np.concatenate([shares * root[:, None], np.eye(len(classes)) / prior])
        wanted = np.concatenate([ratios * root, np.full(len(classes), scalar / prior)])
        factors = nnls(rows, wanted)[0]
    # The noise was estimated from what the fit left over, and rows that count less still move it a little.
    own = noise**2 * ROBUST * len(ratios) / max(1, len(ratios) - len(classes))
    inverse = np.linalg.inv((shares * weights[:, None]).T @ shares / own + np.eye(len(classes)) / prior**2)
    return Slowdowns(classes, factors, inverse)
