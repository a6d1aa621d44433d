"""Link kinds by name: bandwidth per direction as the standards give it, latency as collectives usually see it.

Bandwidths are NVIDIA's, AMD's and PCI-SIG's figures halved where the vendor quotes both directions together. No vendor publishes
latencies: those are estimates of one NCCL (or gloo) hop, to be replaced by a measured profile.
"""

from __future__ import annotations

from penstock.clusters.hardware import Link, unknown_name

__all__ = ["LINKS", "network", "resolve_link"]


def _link(kind: str, gb_per_s: float, latency_us: float) -> Link:
    return Link(kind, gb_per_s * 1e9, latency_us / 1e6)


_INSIDE = (
    _link("nvlink2", 150, 4),  # V100: 6 × 25 GB/s
    _link("nvlink3", 300, 4),  # A100: 12 × 25 GB/s
    _link("nvlink4", 450, 4),  # H100, H200: 18 × 25 GB/s
    _link("nvlink5", 900, 4),  # B200: 18 × 50 GB/s
    _link("xgmi", 448, 5),  # MI300X, Infinity Fabric: 7 × 64 GB/s, one to each other device
    _link("pcie3", 16, 10),
    _link("pcie4", 32, 10),
    _link("pcie5", 64, 10),
    _link("shared-memory", 5, 20),  # gloo between processes of one host
)

_NETWORK_LATENCY_US = {"ethernet": 30.0, "efa": 20.0, "infiniband": 6.0}
_GBIT_PER_S = {
    "ethernet": (1, 10, 25, 40, 50, 100, 200, 400),
    "efa": (100, 400, 3200),
    "infiniband": (100, 200, 400, 800, 1600, 3200),
}


def network(kind: str, gbit_per_s: float) -> Link:
    """The network of one node, from the gigabits per second that vendors quote."""
    return _link(f"{kind}-{gbit_per_s:g}g", gbit_per_s / 8, _NETWORK_LATENCY_US[kind])


LINKS = {link.kind: link for link in (*_INSIDE, *(network(kind, rate) for kind, rates in _GBIT_PER_S.items() for rate in rates))}


def resolve_link(kind: str) -> Link:
    """The link of a kind such as 'nvlink3', 'pcie4', 'ethernet-25g', 'infiniband-1600g'."""
    link = LINKS.get(kind.lower())
    if link is None:
        raise unknown_name("link kind", kind, LINKS)
    return link
