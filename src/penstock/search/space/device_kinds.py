"""The kinds of devices that a cluster has, and what one of several equal replicas gets of each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.costs.memory import CUDA_CONTEXT_BYTES, NCCL_BYTES, SLACK
from penstock.search.space.stage_costs import DevicePool

if TYPE_CHECKING:
    from penstock.clusters import Cluster, Device

__all__ = ["Kind", "kinds_of"]


@dataclass(frozen=True)
class Kind:
    """All devices of one kind."""

    device: Device
    ranks: tuple[int, ...]
    per_node: int
    """Devices that are in one node wherever a run of so many begins."""
    last_node: int
    """Devices of its last node."""
    talks: bool = True
    """Whether there are other devices."""

    def idle_nodes(self, replicas: int) -> int:
        """Nodes that so many replicas leave unused, at the end of the last ones."""
        return len(self.ranks) % replicas // self.last_node

    def pool(self, replicas: int, memory_limit_bytes: float) -> DevicePool:
        """What one of so many replicas has of this kind."""
        count = len(self.ranks) // replicas
        node = self.per_node if count % self.per_node == 0 else math.gcd(count, self.per_node)
        context = 0 if self.device.name.startswith("cpu") else CUDA_CONTEXT_BYTES + NCCL_BYTES * self.talks
        limit = min(memory_limit_bytes, self.device.memory_bytes)
        return DevicePool(count, max(node, 1), (limit - context) / (1 + SLACK))


def kinds_of(cluster: Cluster) -> list[Kind]:
    """The kinds of a cluster with their ranks; nodes of unequal sizes count as several of their common divisor."""
    found = []
    for device, _ in cluster.kinds:
        ranks: list[int] = []
        sizes: list[int] = []
        first = 0
        for run in cluster.runs:
            if run.node.device == device:
                ranks += range(first, first + run.num_devices)
                sizes.append(run.node.num_devices)
            first += run.num_devices
        found.append(Kind(device, tuple(ranks), math.gcd(*sizes), sizes[-1], cluster.num_devices > 1))
    return found
