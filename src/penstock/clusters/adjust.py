"""The same cluster with links as they were measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from penstock.clusters.cluster import Cluster
from penstock.clusters.hardware import Link, Node
from penstock.errors import InputError

__all__ = ["with_measured_links"]


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
