"""What every source of costs answers: `Roofline` by formulas, `Profiled` from measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.clusters import Cluster
from penstock.costs.replay import OpBytesSource
from penstock.costs.table import CostTable
from penstock.models.ops import Model
from penstock.models.shapes import Shape

__all__ = ["CostSource", "DeviceBytes"]


class DeviceBytes(NamedTuple):
    """What a source knows of the memory of one device kind."""

    bytes_of: OpBytesSource
    """What single ops keep and need beside."""
    base_bytes: float
    """Held by libraries whatever the model."""


class CostSource(Protocol):
    """Times and bytes, in the units of their names.

    A source of its own kind need not fill a `CostTable` by hand: `Roofline(cluster=…).table(…)` has the chain, the bytes and which degrees
    are possible, and `dataclasses.replace` puts other times in, as `Profiled` does. Halves of a backward pass are no part of it: `timing`
    takes half of an op's `backward_s` for its weights' gradients.
    """

    @property
    def name(self) -> str:
        """How the source is written on the command line, such as `roofline` or `profile:h200.json`."""
        ...

    @property
    def error(self) -> float:
        """How far the times of two plans of one model are off against each other on average, as a share (see docs/accuracy.md); 0 where
        nothing is known of it, so that times are taken as they are."""
        ...

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        """All op costs of `model` at these shapes and degrees on the cluster's device kinds."""
        ...

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        """Time of the optimizer step over this many weights of one rank, in this many tensors, from gradients in this dtype (or their
        own)."""
        ...

    def memory_of(self, device: str, dtype: str) -> DeviceBytes:
        """What ops of a model in this dtype take on a device kind."""
        ...

    def links_of(self, cluster: Cluster) -> Cluster:
        """The cluster with the links that the source measured; as it is where none were."""
        ...

    def notes(self, model: Model) -> tuple[str, ...]:
        """What a reader of times for this model should know: what was asked for so far and is not from this source itself."""
        ...
