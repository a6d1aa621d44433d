"""Devices and links that are slower than their kind: any source of costs, with the times of some ranks and pairs of ranks multiplied.

    table of the source        ops × … × [a100]
    with rank 3 slowed         ops × … × [a100, a100 of rank 3]

A slowed device has a column of its own in every table and stays of its kind for all else: it keeps its memory, its links, and its place in
tensor-parallel groups, where all wait for the slowest. Search, batch planner, simulator and timed devices ask one source, and so agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from penstock.clusters import Cluster, Link
from penstock.clusters.cluster import LinkOverride
from penstock.clusters.hardware import SLOWED_MARK
from penstock.costs.source import CostSource, DeviceBytes
from penstock.costs.table import CostTable, Floats
from penstock.errors import InputError
from penstock.models.ops import Model, Op
from penstock.models.shapes import Shape

__all__ = ["OpClass", "SlowedCosts", "Speeds", "class_of"]


class OpClass(StrEnum):
    """Ops that a foreign load on the same device slows down alike."""

    MATMUL = "matmul"
    """Bound by arithmetic: linear layers and convolutions."""
    ATTENTION = "attention"
    MEMORY = "memory"
    """Bound by memory: norms, activations, embeddings, pooling, losses; the optimizer."""


_SLOWED = " slowed"
_MEMORY = frozenset({"embedding", "norm", "activation", "loss", "batch_norm", "relu", "max_pool", "avg_pool", "class_loss"})


def class_of(op: Op) -> OpClass:
    """The class of an op; kinds that Penstock does not know (traced ones) count as arithmetic."""
    if op.kind == "attention":
        return OpClass.ATTENTION
    return OpClass.MEMORY if op.kind in _MEMORY else OpClass.MATMUL


@dataclass(frozen=True)
class Speeds:
    """How many times longer than the costs say work takes: for each rank by class of op, and for messages between two ranks."""

    ranks: Mapping[int, Mapping[OpClass, float]] = field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """The lower rank first."""

    def __post_init__(self) -> None:
        for rank, own in self.ranks.items():
            for op_class, factor in own.items():
                _require_factor(f"rank {rank}, {op_class}", factor)
        for (one, other), factor in self.links.items():
            if one >= other:
                raise InputError(f"link {one}-{other}: two ranks were expected, the lower one first.")
            _require_factor(f"link {one}-{other}", factor)

    @classmethod
    def of(cls, ranks: Mapping[int, float], links: Mapping[tuple[int, int], float] | None = None) -> Speeds:
        """Speeds with one factor for all classes of a rank's ops; what is neither slower nor faster is left out."""
        slowed = {rank: dict.fromkeys(OpClass, factor) for rank, factor in ranks.items() if factor != 1.0}
        return cls(slowed, {pair: factor for pair, factor in (links or {}).items() if factor != 1.0})

    def factor(self, rank: int, op_class: OpClass = OpClass.MATMUL) -> float:
        """How many times longer a rank's ops of one class take."""
        return self.ranks.get(rank, {}).get(op_class, 1.0)

    def link_factor(self, one: int, other: int) -> float:
        """How many times longer messages between two ranks take."""
        return self.links.get((min(one, other), max(one, other)), 1.0)

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster with slowed links, and with a name of its own for each slowed device."""
        missing = [rank for rank in (*self.ranks, *(rank for pair in self.links for rank in pair)) if rank >= cluster.num_devices]
        if missing:
            raise InputError(f"rank {missing[0]} is slowed, but the cluster has ranks 0 to {cluster.num_devices - 1}.")
        # Estimators ask again for what they were given: a link is slowed once.
        overrides = [self._slowed_link(cluster, *pair) for pair in self.links if not cluster.link(*pair).kind.endswith(_SLOWED)]
        return replace(cluster, overrides=(*cluster.overrides, *overrides), slowed=frozenset(self.ranks))

    def _slowed_link(self, cluster: Cluster, one: int, other: int) -> LinkOverride:
        """A pair has an override to itself, so it gets what one flow alone would have had."""
        link, factor = cluster.link(one, other), self.links[one, other]
        rate = cluster.flow_bandwidth_bytes_per_s(one, other) / factor
        return LinkOverride(((one, one + 1),), ((other, other + 1),), Link(f"{link.kind}{_SLOWED}", rate, factor * link.latency_s))


def _require_factor(where: str, factor: float) -> None:
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"{where}: the factor is {factor}; a number above 0 was expected.")


class SlowedCosts:
    """Another source's costs at measured speeds."""

    def __init__(self, source: CostSource, speeds: Speeds) -> None:
        self.source, self.speeds = source, speeds

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def error(self) -> float:
        return self.source.error

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """The source's table with a column more for each slowed device; its collectives take as long as its kind's."""
        table = self.source.table(model, shapes, tps, replace(cluster, slowed=frozenset()))
        slowed = [cluster.device(rank) for rank in sorted(cluster.slowed)]
        if not slowed:
            return table
        from_column = [table.device_index(device.kind) for device in slowed]
        factors = np.array([[self.speeds.factor(rank, class_of(op)) for rank in sorted(cluster.slowed)] for op in model.distinct_ops])

        def extended(times_s: Floats, by: Floats | None = None) -> Floats:
            more = times_s[..., from_column]
            return np.concatenate([times_s, more if by is None else more * by[:, None, None, None, :]], axis=-1)

        return replace(
            table, devices=(*table.devices, *(device.name for device in slowed)), host_s=extended(table.host_s) if len(table.host_s) else
            table.host_s, forward_s=extended(table.forward_s, factors), backward_s=extended(table.backward_s, factors),
            forward_comm_s=extended(table.forward_comm_s), backward_comm_s=extended(table.backward_comm_s),
        )  # fmt: skip

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        """The source's, slowed like ops that are bound by memory."""
        kind, _, rank = device.partition(SLOWED_MARK)
        factor = self.speeds.factor(int(rank), OpClass.MEMORY) if rank else 1.0
        return factor * self.source.optimizer_s(num_parameters, kind, precision, optimizer, num_tensors, gradients)

    def memory_of(self, device: str, dtype: str) -> DeviceBytes:
        """The memory of the device's kind: a slow device holds no less."""
        return self.source.memory_of(device.partition(SLOWED_MARK)[0], dtype)

    def links_of(self, cluster: Cluster) -> Cluster:
        """The source's, with slowed links, and with names for slowed devices."""
        return self.speeds.on(self.source.links_of(cluster))

    def notes(self, model: Model) -> tuple[str, ...]:
        return self.source.notes(model)
