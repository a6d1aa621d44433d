"""What every source of costs can answer: a profile, the roofline formulas, or the tables of another planner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.clusters import Cluster
from penstock.costs.table import CostTable
from penstock.models.ops import Model
from penstock.models.shapes import Shape

__all__ = ["CostSource"]


class CostSource(Protocol):
    """Times and bytes, in the units of their names."""

    @property
    def name(self) -> str:
        """How the source is written on the command line, such as `roofline` or `profile:h200.json`."""
        ...

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """All op costs of `model` at these shapes and degrees on the cluster's device kinds."""
        ...

    def collective_s(self, kind: str, size_bytes: float, cluster: Cluster, ranks: Sequence[int]) -> float:
        """Time of `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or `broadcast` of a tensor of this whole size."""
        ...

    def transfer_s(self, size_bytes: float, cluster: Cluster, sender: int, receiver: int) -> float:
        """Time of one message between two ranks."""
        ...

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0
    ) -> float:
        """Time of the optimizer step over this many weights of one rank, in this many tensors."""
        ...
