"""Links as they were measured: the latency and bandwidth that fit a profile's collectives and transfers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.clusters import Link
from penstock.costs.collectives import COLLECTIVES, Group, Line
from penstock.costs.interpolation import fit_optimizer
from penstock.costs.profile import DeviceProfile, LinkPoint

__all__ = ["measured_links"]

_UNIT = Link("unit", 1.0, 1.0)


def measured_links(profile: DeviceProfile, device: str) -> dict[str, Link]:
    """Measured links of a device of the catalogue, as `clusters.with_measured_links` takes them.

    >>> with_measured_links(cluster, measured_links(profile.devices["h200-141gb"], "h200-141gb"))

    Points inside one node make `intra:<device>`, points across nodes `inter`; a key without points is left out.
    """
    points = [point for point in profile.links if not point.modelled and point.num_ranks > 1]
    sides = {
        f"intra:{device}": [point for point in points if point.num_nodes == 1],
        "inter": [point for point in points if point.num_nodes > 1],
    }
    return {key: _fit(own) for key, own in sides.items() if own}


def _line(point: LinkPoint) -> Line:
    """How many latencies and how many times its own size a collective takes, by the formulas of `costs.collectives`."""
    if point.kind not in COLLECTIVES:
        return 1.0, 1.0
    return Group(point.num_ranks, 1, _UNIT).lines(point.kind)[0]


def _fit(points: Sequence[LinkPoint]) -> Link:
    """The link with the least sum of squared relative errors over all points."""
    latencies, passes = np.array([_line(point) for point in points], dtype=np.float64).T
    moved = passes * np.array([point.size_bytes for point in points])
    times = np.maximum(np.array([point.time_s for point in points]), 1e-9)
    per_byte_s, latency_s = fit_optimizer(moved, latencies, times)
    # Where only small messages were measured nothing tells the bandwidth: the best rate seen is the least it can be.
    bandwidth = 1 / per_byte_s if per_byte_s > 0 else float(np.max(moved / times))
    return Link("measured", bandwidth, latency_s)
