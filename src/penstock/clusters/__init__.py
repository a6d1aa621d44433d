"""Device and instance catalogue, cluster files, and the cluster object that the rest of Penstock asks.

Only the entry points are listed here; the modules behind them are internal.
"""

from penstock.clusters.adjust import with_measured_links
from penstock.clusters.cluster import Cluster, LinkOverride, NodeRun
from penstock.clusters.devices import DEVICES, resolve_device
from penstock.clusters.hardware import Device, Link, Node
from penstock.clusters.instances import INSTANCES, resolve_instance
from penstock.clusters.plain import cluster_from_dict, cluster_to_dict
from penstock.clusters.resolve import resolve_cluster

__all__ = [
    "DEVICES",
    "INSTANCES",
    "Cluster",
    "Device",
    "Link",
    "LinkOverride",
    "Node",
    "NodeRun",
    "cluster_from_dict",
    "cluster_to_dict",
    "resolve_cluster",
    "resolve_device",
    "resolve_instance",
    "with_measured_links",
]
