"""Clusters in one word: '4xa100-40gb', '2xp4d.24xlarge+6xg5.24xlarge', '2xcpu'."""

from __future__ import annotations

import re

from penstock.clusters.cluster import Cluster, NodeRun
from penstock.clusters.devices import DEVICES, find_device
from penstock.clusters.hardware import Device, Node, unknown_name, unnamed
from penstock.clusters.instances import INSTANCES, find_instance
from penstock.errors import InputError

__all__ = ["parse_shorthand"]

_PART = re.compile(r"\s*(?:([+-]?[0-9]{1,9})\s*[x×*]\s*)?([A-Za-z][\w.\-]*)\s*", re.IGNORECASE)
_DEVICES_PER_NODE = 8


def parse_shorthand(text: str) -> Cluster:
    """The cluster of a shorthand: parts joined by '+', each a count, 'x', and an instance or a device name."""
    return Cluster(text.strip(), tuple(run for part in text.split("+") for run in _parse_part(part, text)))


def _parse_part(part: str, text: str) -> tuple[NodeRun, ...]:
    match = _PART.fullmatch(part)
    if match is None:
        raise InputError(
            f"cluster {text!r}: cannot read {part!r}. Write COUNTxNAME, as in '4xa100-40gb' or '2xp4d.24xlarge+6xg5.24xlarge', "
            "give the path of a cluster file (.yaml), or 'local'."
        )
    count = int(match[1] or 1)
    if count < 1:
        raise InputError(f"cluster {text!r}: the count in {part!r} is {count}, 1 or more was expected.")
    node = find_instance(match[2])
    if node is not None:
        return (NodeRun(node, count),)
    device = find_device(match[2])
    if device is None:
        raise unknown_name(f"cluster {text!r}: device or instance", match[2], (*DEVICES, *INSTANCES))
    return _runs_of(device, count)


def _runs_of(device: Device, count: int) -> tuple[NodeRun, ...]:
    """Nodes of eight, and one smaller node for what is left over."""
    full, rest = divmod(count, _DEVICES_PER_NODE)
    full_runs = (NodeRun(plain_node(device, _DEVICES_PER_NODE), full),) if full else ()
    return (*full_runs, NodeRun(plain_node(device, rest))) if rest else full_runs


def plain_node(device: Device, num_devices: int) -> Node:
    """An unnamed, unpriced node with the device's own links."""
    return Node(unnamed(num_devices, device), device, num_devices, device.intra, device.inter, num_rails=device.num_rails)
