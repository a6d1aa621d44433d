"""The cluster that this machine is: its NVIDIA devices with their topology, or else its processor."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path

from penstock.clusters.cluster import Cluster, LinkOverride, NodeRun
from penstock.clusters.devices import CPU_CORES, DEVICES
from penstock.clusters.hardware import Device, Link, Node
from penstock.clusters.topology import QUERY, Gpu, Topology, order_by_link, pair_link, parse_gpus, parse_topology, visible_gpus

__all__ = ["cpu_cluster", "detect_local", "gpu_cluster"]


def detect_local() -> Cluster:
    """This machine as a cluster: one rank per visible NVIDIA device, or one rank for the whole processor."""
    gpus = parse_gpus(_output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))
    gpus = visible_gpus(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        topology = parse_topology(_output("nvidia-smi", "topo", "-m")) if len(gpus) > 1 else {}
        return gpu_cluster(gpus, topology)
    return cpu_cluster(_num_cores(), _memory_bytes())


def _output(*command: str) -> str:
    """What the command prints; nothing if it is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def gpu_cluster(gpus: Sequence[Gpu], topology: Topology) -> Cluster:
    """One node per device kind, its ranks ordered by link, and an override for each pair whose link is not the node's own."""
    kinds: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        kinds.setdefault(gpu.name, []).append(gpu)
    ordered = [_in_rank_order(group, topology) for group in kinds.values()]
    position = {gpu.index: place for place, gpu in enumerate(gpus)}
    nodes = [_gpu_node(group, topology, [position[gpu.index] for gpu in group]) for group in ordered]
    cluster = Cluster("local", tuple(NodeRun(node) for node in nodes))
    ranks = [gpu for group in ordered for gpu in group]
    return dataclasses.replace(cluster, overrides=tuple(_overrides(cluster, ranks, topology)))


def _in_rank_order(gpus: Sequence[Gpu], topology: Topology) -> list[Gpu]:
    by_index = {gpu.index: gpu for gpu in gpus}
    return [by_index[index] for index in order_by_link(list(by_index), topology)]


def _gpu_node(gpus: Sequence[Gpu], topology: Topology, device_ids: Sequence[int]) -> Node:
    device = match_device(gpus[0].name, min(gpu.memory_bytes for gpu in gpus))
    links = Counter(_link_of(a, b, device, topology) for a, b in combinations(gpus, 2))
    intra = links.most_common(1)[0][0] if links else device.intra
    ids = () if list(device_ids) == list(range(len(gpus))) else tuple(device_ids)
    return Node("local", device, len(gpus), intra, device.inter, num_rails=device.num_rails, device_ids=ids)


def _link_of(a: Gpu, b: Gpu, device: Device, topology: Topology) -> Link:
    pcie = min(a.pcie_bytes_per_s, b.pcie_bytes_per_s)
    return pair_link(device.name, pcie, topology.get((a.index, b.index), "")) or device.intra


def _overrides(cluster: Cluster, ranks: Sequence[Gpu], topology: Topology) -> list[LinkOverride]:
    overrides = []
    for (rank_a, a), (rank_b, b) in combinations(enumerate(ranks), 2):
        link = _link_of(a, b, cluster.device(rank_a), topology)
        if link != cluster.link(rank_a, rank_b):
            overrides.append(LinkOverride(((rank_a, rank_a + 1),), ((rank_b, rank_b + 1),), link))
    return overrides


def match_device(name: str, memory_bytes: int) -> Device:
    """The catalogue's device for a driver's name, with the memory the driver reports; for an unknown one, a modest stand-in."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    families = {*words, *(first + second for first, second in pairwise(words))}
    fitting = [device for device in DEVICES.values() if device.name.split("-")[0] in families]
    if fitting:
        device = min(fitting, key=lambda candidate: abs(candidate.memory_bytes - memory_bytes))
        return dataclasses.replace(device, memory_bytes=memory_bytes)
    return dataclasses.replace(
        DEVICES["t4"],
        name="-".join(words) or "gpu",
        memory_bytes=memory_bytes,
        source=f"'{name}' is not in the catalogue: the rates of a T4 are assumed. Measure it with `penstock profile`.",
    )


def cpu_cluster(num_cores: int, memory_bytes: int) -> Cluster:
    """The processor as one device, the catalogue's rates scaled by its cores."""
    base, scale = DEVICES["cpu"], num_cores / CPU_CORES
    device = dataclasses.replace(
        base,
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=base.memory_bandwidth_bytes_per_s * scale,
        fp32_flops_per_s=base.fp32_flops_per_s * scale,
        source=f"assumed: {num_cores} cores with the rates of the catalogue's cpu",
    )
    return Cluster("local", (NodeRun(Node("local", device, 1, device.intra, device.inter)),))


def _num_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int:
    """Physical memory, or the limit of the container if that is less."""
    limits = [parse_meminfo(_text("/proc/meminfo")), _number(_text("/sys/fs/cgroup/memory.max"))]
    known = [limit for limit in limits if limit]
    return min(known) if known else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def parse_meminfo(text: str) -> int | None:
    """Total memory in the text of /proc/meminfo."""
    match = re.search(r"^MemTotal:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
