"""Cluster files: from checked YAML to a cluster, every error naming the field it is about."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.clusters.cluster import Cluster, LinkOverride, NodeRun
from penstock.clusters.devices import DEVICES, resolve_device
from penstock.clusters.hardware import Device, Link, Node, unknown_name
from penstock.clusters.instances import resolve_instance
from penstock.clusters.links import LINKS, resolve_link
from penstock.clusters.shorthand import plain_node
from penstock.errors import InputError
from penstock.files import read_yaml

if TYPE_CHECKING:
    from penstock.clusters.schema import ClusterSpec, DeviceSpec, LinkSpec, NodeSpec, OverrideSpec

__all__ = ["parse_cluster", "read_cluster"]

_RANGE = re.compile(r"(node:)?([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_cluster(path: str | Path) -> Cluster:
    """The cluster of a YAML file."""
    return parse_cluster(read_yaml(path, "cluster file"), f"cluster file '{path}'", Path(path).stem)


def parse_cluster(data: Any, what: str, default_name: str) -> Cluster:
    """The cluster that the YAML value `data` describes; `what` names its origin in errors."""
    from penstock.clusters.schema import validate_cluster

    spec = validate_cluster(data, what)
    with _at(what):
        own = _own_devices(spec)
        runs = []
        for index, node in enumerate(spec.nodes):
            with _at(f"nodes.{index}"):
                runs.append(NodeRun(_node(node, own), node.count))
        cluster = Cluster(spec.name or default_name, tuple(runs))
        overrides = []
        for index, override in enumerate(spec.links):
            with _at(f"links.{index}"):
                overrides.append(_override(override, cluster))
        return dataclasses.replace(cluster, overrides=tuple(overrides))


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Puts `where` before the message of an error raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _own_devices(spec: ClusterSpec) -> dict[str, Device]:
    """The devices the file defines, by lower-case name; they come before those of the catalogue."""
    own: dict[str, Device] = {}
    for index, device in enumerate(spec.devices):
        with _at(f"devices.{index}"):
            if device.name.lower() in own:
                raise InputError(f"name {device.name!r} is given twice; give each device once.")
            own[device.name.lower()] = _device(device)
    return own


def _device(spec: DeviceSpec) -> Device:
    def rate(tflops: float | None) -> float | None:
        return None if tflops is None else tflops * 1e12

    return Device(
        name=spec.name,
        memory_bytes=round(spec.memory_gb * 1e9),
        memory_bandwidth_bytes_per_s=spec.memory_bandwidth_gb_per_s * 1e9,
        fp32_flops_per_s=spec.fp32_tflops * 1e12,
        tf32_flops_per_s=rate(spec.tf32_tflops),
        fp16_flops_per_s=rate(spec.fp16_tflops),
        bf16_flops_per_s=rate(spec.bf16_tflops),
        fp8_flops_per_s=rate(spec.fp8_tflops),
        intra=_link("intra", spec.intra, resolve_link("pcie4")),
        inter=_link("inter", spec.inter, resolve_link("ethernet-100g")),
        source="cluster file",
    )


def _link(field: str, spec: LinkSpec | None, default: Link) -> Link:
    """The link a field describes; what it leaves out comes from its kind, or else from `default`."""
    if spec is None:
        return default
    if spec.kind is not None and spec.kind.lower() not in LINKS and spec.bandwidth_gb_per_s is None:
        with _at(f"{field}.kind"):
            resolve_link(spec.kind)
    base = LINKS.get((spec.kind or "").lower(), default)
    bandwidth = base.bandwidth_bytes_per_s if spec.bandwidth_gb_per_s is None else spec.bandwidth_gb_per_s * 1e9
    latency_s = base.latency_s if spec.latency_us is None else spec.latency_us / 1e6
    return Link(spec.kind or "custom", bandwidth, latency_s)


def _node(spec: NodeSpec, own: dict[str, Device]) -> Node:
    """The node a list entry describes, what it implies replaced by what it says."""
    node = _base_node(spec, own)
    price = {} if spec.price_usd_per_h is None else _price(spec.price_usd_per_h)
    return dataclasses.replace(
        node,
        name=spec.name or node.name,
        device=_limited(node.device, spec.memory_limit_gb),
        intra=_link("intra", spec.intra, node.intra),
        inter=_link("inter", spec.inter, node.inter),
        # Rails belong to the network they divide: a network of the file's own is one path unless it says more.
        num_rails=spec.rails or (node.num_rails if spec.inter is None else 1),
        **price,
    )


def _price(usd_per_h: float) -> dict[str, Any]:
    return {"price_usd_per_h": usd_per_h, "price_date": "", "price_source": "cluster file"}


def _base_node(spec: NodeSpec, own: dict[str, Device]) -> Node:
    if spec.instance is not None:
        given = [field for field in ("device", "gpus") if getattr(spec, field) is not None]
        if given:
            raise InputError(f"{given[0]}: {getattr(spec, given[0])!r} contradicts instance {spec.instance!r}; give one or the other.")
        with _at("instance"):
            return resolve_instance(spec.instance)
    if spec.device is None or spec.gpus is None:
        missing = "device" if spec.device is None else "gpus"
        raise InputError(f"{missing}: missing. Give 'instance' (such as p4d.24xlarge), or both 'device' and 'gpus'.")
    with _at("device"):
        return plain_node(_named_device(spec.device, own), spec.gpus)


def _named_device(name: str, own: dict[str, Device]) -> Device:
    if name.lower() in own:
        return own[name.lower()]
    try:
        return resolve_device(name)
    except InputError:
        if own and not any(known.startswith(name.lower()) for known in DEVICES):
            raise unknown_name("device", name, (*own, *DEVICES)) from None
        raise


def _limited(device: Device, memory_limit_gb: float | None) -> Device:
    """The device with no more memory than the limit."""
    if memory_limit_gb is None:
        return device
    limit = round(memory_limit_gb * 1e9)
    if limit > device.memory_bytes:
        memory_gb = device.memory_bytes / 1e9
        raise InputError(f"memory_limit_gb: {memory_limit_gb:g} is more than the {memory_gb:.3g} GB of {device.name}; lower it.")
    return dataclasses.replace(device, memory_bytes=limit)


def _override(spec: OverrideSpec, cluster: Cluster) -> LinkOverride:
    if spec.kind is None and spec.bandwidth_gb_per_s is None:
        raise InputError("bandwidth_gb_per_s: missing. Give it, or a 'kind' such as ethernet-25g.")
    with _at("between"):
        (first, first_is_node), (second, second_is_node) = (_endpoint(text, cluster) for text in spec.between)
    nodes = {cluster.node_index(rank) for ranges in (first, second) for start, stop in ranges for rank in (start, stop - 1)}
    if first == second and (len(nodes) == 1 if first_is_node else first[0][1] - first[0][0] == 1):
        raise InputError(f"between: {spec.between[0]!r} is given twice: a link joins two places. Name the other one.")
    # Latency alone may be left out; the first pair the override speaks of tells what it was.
    usual = cluster.link(first[0][0], second[-1][-1] - 1)
    return LinkOverride(first, second, _link("link", spec, usual), across_nodes_only=first_is_node or second_is_node)


def _endpoint(text: str, cluster: Cluster) -> tuple[tuple[tuple[int, int], ...], bool]:
    """The rank ranges of an endpoint, and whether it speaks of nodes."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return _ranks_of_name(text.strip(), cluster), True
    first, last = int(match[2]), int(match[3] or match[2])
    what, size = ("node", cluster.num_nodes) if match[1] else ("rank", cluster.num_devices)
    if not first <= last < size:
        raise InputError(f"{text!r} is outside the cluster, which has {what}s 0 to {size - 1}.")
    if match[1]:
        return ((cluster.ranks_of(first).start, cluster.ranks_of(last).stop),), True
    return ((first, last + 1),), False


def _ranks_of_name(name: str, cluster: Cluster) -> tuple[tuple[int, int], ...]:
    """The ranks of all nodes with that name."""
    stop, ranges = 0, []
    for run in cluster.runs:
        start, stop = stop, stop + run.num_devices
        if run.node.name.lower() == name.lower():
            ranges.append((start, stop))
    if not ranges:
        hint = unknown_name("node", name, dict.fromkeys(run.node.name for run in cluster.runs))
        raise InputError(f"{hint} Or give ranks ('0-7') or nodes by number ('node:0-3').")
    return tuple(ranges)
