"""Why a device among many is slower than the one whose efficiency curves were measured: power, the slowest of all, and links.

The curves of the roofline come from one device that had its node to itself. Beside others three things happen to it, none of which
depends on the model:

    power       eight H100s at work under their power limits hold about 88 % of the clock that one alone holds; the matrix units slow down
                with it, memory does not. A100s hold theirs.
    the slowest devices of one kind differ in speed, with a standard deviation of about 2 %, and every synchronous step waits for the
                slowest of them: of 64 that is expected 2.4 deviations below the mean. So many are assumed wherever several
                work, so that more devices never make the same plan slower; those that idle do not count.
    links       collectives reach four fifths of what NVLink and PCIe signal, and nine tenths of a network's.

Sources are in docs/costs.md.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.clusters import Cluster, Device, Link
from penstock.clusters.links import LINKS

__all__ = ["SPREAD", "slowest_of", "sustained", "with_achieved_links"]

SPREAD = 0.02
"""Standard deviation of the speed of devices of one kind."""
_SUSTAINED = {"h100": 0.88, "h200": 0.88, "b200": 0.88}
"""Share of its clock that a device holds in a node of such devices at work, where it is not all of it."""


def sustained(device: Device, num_devices: int) -> float:
    """The share of its arithmetic rate that a device keeps beside others."""
    return _SUSTAINED.get(device.name.split("-")[0], 1.0) if num_devices > 1 else 1.0


def slowest_of(num_devices: int) -> float:
    """How many times longer than the average device the slowest takes."""
    return 1 + SPREAD * 2.4 if num_devices > 1 else 1.0


def with_achieved_links(cluster: Cluster) -> Cluster:
    """The cluster with what collectives reach of the catalogue's links; links from files and measurements stay."""
    nodes = [run.node for run in cluster.runs]
    return cluster.with_nodes(replace(node, intra=_achieved(node.intra), inter=_achieved(node.inter)) for node in nodes)


def _achieved(link: Link) -> Link:
    if link != LINKS.get(link.kind) or link.kind == "shared-memory":
        return link
    share = 0.8 if link.kind.startswith(("nvlink", "xgmi", "pcie")) else 0.9
    return replace(link, kind=f"{link.kind} achieved", bandwidth_bytes_per_s=share * link.bandwidth_bytes_per_s)
