"""What nvidia-smi prints, read; and the order of devices that puts the best-linked next to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.clusters.hardware import Link

__all__ = ["QUERY", "Gpu", "Topology", "order_by_link", "pair_link", "parse_gpus", "parse_topology", "visible_gpus"]

QUERY = "index,uuid,memory.total,pcie.link.gen.max,pcie.link.width.max,name"

Topology = Mapping[tuple[int, int], str]
"""The label of nvidia-smi ('NV12', 'PIX' … 'SYS') for each ordered pair of device indices."""

# How devices meet when not over NVLink, best first: the share of the PCIe bandwidth that is left, and latency. Estimates.
#   PIX one switch · PXB several switches · PHB the host bridge · NODE across bridges of one socket · SYS across sockets
_PCIE_PATHS = {"PIX": (1.0, 8e-6), "PXB": (0.9, 9e-6), "PHB": (0.8, 10e-6), "NODE": (0.7, 12e-6), "SYS": (0.5, 15e-6)}
_LANE_BYTES_PER_S = {"b200": 50e9, "rtx3090": 14.0625e9}
_DEFAULT_LANE_BYTES_PER_S = 25e9  # NVLink 2, 3 and 4 alike


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as the driver describes it."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    pcie_bytes_per_s: float


def parse_gpus(text: str) -> list[Gpu]:
    """The devices in the answer to `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; other lines are passed over."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", 5)]
        if len(fields) == 6 and fields[0].isdecimal() and fields[2].isdecimal():
            index, uuid, memory_mib, generation, lanes, name = fields
            gpus.append(Gpu(int(index), uuid, name, int(memory_mib) * 2**20, _pcie_bytes_per_s(generation, lanes)))
    return gpus


def _pcie_bytes_per_s(generation: str, lanes: str) -> float:
    """0.25 GB/s a lane in the first generation, doubled by each later one; sixteen lanes of the fourth if it is not told."""
    known = generation.isdecimal() and lanes.isdecimal() and int(generation) > 0 and int(lanes) > 0
    return 0.25e9 * 2.0 ** (int(generation) - 1) * int(lanes) if known else 32e9


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """The labels in the matrix of `nvidia-smi topo -m`; empty if there is none."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((line for line in lines if len(line) > 0 and line[0] == "GPU0" and "X" not in line), [])
    columns = [int(word[3:]) for word in header if re.fullmatch(r"GPU\d+", word)]
    labels = {}
    for words in lines:
        if words and words is not header and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            labels.update({(row, column): word for column, word in zip(columns, words[1:], strict=False) if column != row})
    return labels


def _speed(label: str) -> float:
    """A number that grows with the quality of the path: any NVLink before any PCIe path, an unknown label last."""
    lanes = re.fullmatch(r"NV(\d+)", label)
    if lanes:
        return 1.0 + int(lanes[1])
    return _PCIE_PATHS.get(label, (0.0, 0.0))[0]


def order_by_link(indices: Sequence[int], topology: Topology) -> list[int]:
    """The devices in the order of ranks: from the first, always on to the best-linked one left, the lowest index of equals.

    Paths nest (a switch lies under a bridge, a bridge on a socket), so this finishes each group before it leaves it.
    """
    left = sorted(indices)
    order = left[:1]
    left = left[1:]
    while left:
        here = order[-1]
        nearest = max(left, key=lambda other: (_speed(topology.get((here, other), "")), -other))
        order.append(nearest)
        left.remove(nearest)
    return order


def pair_link(device_name: str, pcie_bytes_per_s: float, label: str) -> Link | None:
    """The link behind a label, None for a label that says nothing."""
    lanes = re.fullmatch(r"NV(\d+)", label)
    if lanes and int(lanes[1]) > 0:
        return Link(label.lower(), int(lanes[1]) * _LANE_BYTES_PER_S.get(device_name, _DEFAULT_LANE_BYTES_PER_S), 4e-6)
    if label in _PCIE_PATHS:
        share, latency_s = _PCIE_PATHS[label]
        return Link(f"pcie-{label.lower()}", share * pcie_bytes_per_s, latency_s)
    return None


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The devices that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, it stops at the first entry that fits none."""
    if setting is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        found = next((gpu for gpu in gpus if entry and (entry == str(gpu.index) or gpu.uuid.startswith(entry))), None)
        if found is None or found in chosen:
            break
        chosen.append(found)
    return chosen
