"""The same cluster with other prices, or with links as they were measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from penstock.clusters.cluster import Cluster
from penstock.clusters.devices import DEVICES
from penstock.clusters.hardware import Link, Node, unknown_name
from penstock.clusters.instances import INSTANCES
from penstock.errors import InputError
from penstock.files import read_yaml

__all__ = ["with_measured_links", "with_prices"]


def with_prices(cluster: Cluster, path: str | Path) -> Cluster:
    """The cluster priced by a YAML file that maps instances, nodes (USD per hour) or devices (USD per hour each) to prices."""
    source = f"price file '{path}'"
    prices = _read_prices(path, source)
    own_names = [name for run in cluster.runs for name in (run.node.name, run.node.device.name)]
    known = {name.lower(): name for name in (*DEVICES, *INSTANCES, *own_names)}
    for name in prices:
        if name not in known:
            raise unknown_name(f"{source}: instance, node or device", name, dict.fromkeys(known.values()))
    return cluster.with_nodes(_priced(run.node, prices, source) for run in cluster.runs)


def _read_prices(path: str | Path, source: str) -> dict[str, float]:
    """The file's prices by lower-case name."""
    data = read_yaml(path, "price file")
    if not isinstance(data, dict):
        raise InputError(f"{source} must map names to USD per hour, as in 'p4d.24xlarge: 32.77'.")
    prices: dict[str, float] = {}
    for name, price in data.items():
        is_number = isinstance(price, (int, float)) and not isinstance(price, bool)
        if not is_number or not math.isfinite(price) or price < 0:
            raise InputError(f"{source}: {name}: a price of 0 or more USD per hour was expected (got {price!r}).")
        prices[str(name).lower()] = float(price)
    return prices


def _priced(node: Node, prices: Mapping[str, float], source: str) -> Node:
    """The node with its own price, else that of its devices, else as it was."""
    price = prices.get(node.name.lower())
    if price is None and node.device.name.lower() in prices:
        price = prices[node.device.name.lower()] * node.num_devices
    if price is None:
        return node
    return dataclasses.replace(node, price_usd_per_h=price, price_date="", price_source=source)


def with_measured_links(cluster: Cluster, links: Mapping[str, Link]) -> Cluster:
    """The cluster with its nodes' links replaced by measured ones.

    Keys are 'intra:<device>' for the link between two such devices of one node, and 'inter' for the network between nodes, which is
    taken to be one path that a node's devices share. Devices the cluster does not have are passed over (a profile may cover
    more); overrides of the cluster stay.
    """
    for key in links:
        if key != "inter" and not key.startswith("intra:"):
            raise InputError(f"measured link {key!r} is not known; 'inter' or 'intra:<device>' was expected.")
    return cluster.with_nodes(_measured(run.node, links) for run in cluster.runs)


def _measured(node: Node, links: Mapping[str, Link]) -> Node:
    intra = links.get(f"intra:{node.device.name}", node.intra)
    if "inter" not in links:
        return dataclasses.replace(node, intra=intra)
    return dataclasses.replace(node, intra=intra, inter=links["inter"], num_rails=1)
