"""How much slower each class of ops runs beside a foreign load, by what a profile measured beside loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.costs.profile import BesidePoint
from penstock.costs.speeds import OpClass

__all__ = ["usual_slowdowns"]


def usual_slowdowns(points: Sequence[BesidePoint], factor: float) -> dict[OpClass, float]:
    """The slow-down of each class beside a load that makes all ops together `factor` times as slow, interpolated between measured loads.

    Classes that were not measured are slowed as all together; so is, beyond the heaviest load, what it adds.

    >>> usual_slowdowns([], 1.5)[OpClass.MEMORY]
    1.5
    """
    rows: list[tuple[float, dict[str, float]]] = [(1.0, {})]
    for load in sorted({point.load for point in points}):
        own = [point for point in points if point.load == load]
        classes = {point.op_class for point in own}
        rows.append((_slower(own), {name: _slower([point for point in own if point.op_class == name]) for name in classes}))
    rows.sort(key=lambda row: row[0])
    together = [row[0] for row in rows]
    found = {}
    for one in OpClass:
        relative = [classes.get(one.value, overall) / overall for overall, classes in rows]
        found[one] = factor * float(np.interp(factor, together, relative))
    return found


def _slower(points: Sequence[BesidePoint]) -> float:
    return sum(point.beside_s for point in points) / sum(point.alone_s for point in points)
