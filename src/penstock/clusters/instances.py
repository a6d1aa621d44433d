"""The instance catalogue: what clouds rent, with the network of a whole node and dated on-demand prices.

Prices are list prices in US dollars per hour for Linux in each vendor's main US region (us-east-1, us-central1, East US). They
were written down by hand, not fetched, and vendors change them (AWS cut p4 and p5 in mid-2025): a node of a cluster
file may have a `price_usd_per_h` of its own.
"""

from __future__ import annotations

from penstock.clusters.devices import resolve_device
from penstock.clusters.hardware import Node, unknown_name
from penstock.clusters.links import network, resolve_link

__all__ = ["INSTANCES", "find_instance", "resolve_instance"]

_PRICE_DATE = "2025-01"
_SOURCES = {
    "aws": "Amazon EC2 on-demand list, Linux, us-east-1",
    "aws-block": "Amazon EC2 Capacity Blocks list, Linux (no on-demand rate is published)",
    "gcp": "Google Compute Engine on-demand list, us-central1",
    "azure": "Azure pay-as-you-go list, Linux, East US",
}

# name, source, device, devices, link inside, network kind, Gbit/s of the node, rails, USD per hour.
# A rail is what one device alone can drive: a p5 has 32 cards of 100 Gbit/s, four to each device, so eight rails.
# Sizes rented with "up to" 10 Gbit/s are given 10. GCP a3: the cards that serve the devices, without the host's own.
_TABLE: tuple[tuple[str, str, str, int, str, str, float, int, float], ...] = (
    ("p3.2xlarge", "aws", "v100-16gb", 1, "nvlink2", "ethernet", 10, 1, 3.06),
    ("p3.8xlarge", "aws", "v100-16gb", 4, "nvlink2", "ethernet", 10, 1, 12.24),
    ("p3.16xlarge", "aws", "v100-16gb", 8, "nvlink2", "ethernet", 25, 1, 24.48),
    ("p3dn.24xlarge", "aws", "v100-32gb", 8, "nvlink2", "efa", 100, 1, 31.212),
    ("p4d.24xlarge", "aws", "a100-40gb", 8, "nvlink3", "efa", 400, 4, 32.7726),
    ("p4de.24xlarge", "aws", "a100-80gb", 8, "nvlink3", "efa", 400, 4, 40.96575),
    ("p5.48xlarge", "aws", "h100-80gb", 8, "nvlink4", "efa", 3200, 8, 98.32),
    ("p5e.48xlarge", "aws-block", "h200-141gb", 8, "nvlink4", "efa", 3200, 8, 43.26),
    ("g5.xlarge", "aws", "a10g", 1, "pcie4", "ethernet", 10, 1, 1.006),
    ("g5.12xlarge", "aws", "a10g", 4, "pcie4", "ethernet", 40, 1, 5.672),
    ("g5.24xlarge", "aws", "a10g", 4, "pcie4", "ethernet", 50, 1, 8.144),
    ("g5.48xlarge", "aws", "a10g", 8, "pcie4", "ethernet", 100, 1, 16.288),
    ("g6.xlarge", "aws", "l4", 1, "pcie4", "ethernet", 10, 1, 0.8048),
    ("g6.12xlarge", "aws", "l4", 4, "pcie4", "ethernet", 40, 1, 4.6016),
    ("g6.24xlarge", "aws", "l4", 4, "pcie4", "ethernet", 50, 1, 6.6752),
    ("g6.48xlarge", "aws", "l4", 8, "pcie4", "ethernet", 100, 1, 13.3504),
    ("a2-highgpu-1g", "gcp", "a100-40gb", 1, "nvlink3", "ethernet", 24, 1, 3.6734),
    ("a2-highgpu-2g", "gcp", "a100-40gb", 2, "nvlink3", "ethernet", 32, 1, 7.3468),
    ("a2-highgpu-4g", "gcp", "a100-40gb", 4, "nvlink3", "ethernet", 50, 1, 14.6935),
    ("a2-highgpu-8g", "gcp", "a100-40gb", 8, "nvlink3", "ethernet", 100, 1, 29.3871),
    ("a2-ultragpu-8g", "gcp", "a100-80gb", 8, "nvlink3", "ethernet", 100, 1, 40.5504),
    ("a3-highgpu-8g", "gcp", "h100-80gb", 8, "nvlink4", "ethernet", 800, 4, 88.49),
    ("a3-megagpu-8g", "gcp", "h100-80gb", 8, "nvlink4", "ethernet", 1600, 8, 93.40),
    ("g2-standard-4", "gcp", "l4", 1, "pcie4", "ethernet", 10, 1, 0.7068),
    ("g2-standard-24", "gcp", "l4", 2, "pcie4", "ethernet", 32, 1, 1.9984),
    ("g2-standard-48", "gcp", "l4", 4, "pcie4", "ethernet", 50, 1, 3.9968),
    ("g2-standard-96", "gcp", "l4", 8, "pcie4", "ethernet", 100, 1, 7.9937),
    ("Standard_ND40rs_v2", "azure", "v100-32gb", 8, "nvlink2", "infiniband", 100, 1, 22.032),
    ("Standard_ND96asr_v4", "azure", "a100-40gb", 8, "nvlink3", "infiniband", 1600, 8, 27.197),
    ("Standard_ND96amsr_A100_v4", "azure", "a100-80gb", 8, "nvlink3", "infiniband", 1600, 8, 32.77),
    ("Standard_ND96isr_H100_v5", "azure", "h100-80gb", 8, "nvlink4", "infiniband", 3200, 8, 98.32),
    ("Standard_ND96isr_H200_v5", "azure", "h200-141gb", 8, "nvlink4", "infiniband", 3200, 8, 84.80),
)


def _instance(
    name: str, source: str, device: str, num_devices: int, intra: str, net: str, gbit_per_s: float, rails: int, price: float
) -> Node:
    return Node(
        name=name,
        device=resolve_device(device),
        num_devices=num_devices,
        intra=resolve_link(intra),
        inter=network(net, gbit_per_s),
        price_usd_per_h=price,
        price_date=_PRICE_DATE,
        price_source=_SOURCES[source],
        num_rails=rails,
    )


INSTANCES = {row[0]: _instance(*row) for row in _TABLE}
_BY_KEY = {name.lower().removeprefix("standard_"): node for name, node in INSTANCES.items()}


def find_instance(name: str) -> Node | None:
    """The instance of a name, in any case, Azure's with or without 'Standard_'; None if there is none."""
    return _BY_KEY.get(name.strip().lower().removeprefix("standard_"))


def resolve_instance(name: str) -> Node:
    """The instance of a name; an unknown one is refused with the nearest."""
    node = find_instance(name)
    if node is None:
        raise unknown_name("instance", name, INSTANCES)
    return node
