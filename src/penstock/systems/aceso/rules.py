"""Aceso's own rules: what a search over its tables must reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.models.ops import Model
from penstock.search.partition import DevicePool, Machine
from penstock.systems.aceso.plans import begins_op
from penstock.systems.aceso.tables import AcesoTables

__all__ = ["CUTS", "AcesoProblem", "Cuts", "shares_storage", "starts_segment"]

Cuts = Literal["ops", "both", "blocks"]
"""Where a plan may be cut and recomputation may begin and end: at any op of the tables, or only where an op of ours begins too, so that
nothing is rounded where the plan is imported; with `blocks` stages begin with whole layers besides."""
CUTS: tuple[Cuts, ...] = ("ops", "both", "blocks")


@dataclass(frozen=True)
class AcesoProblem:
    """A model of Aceso's tables on equal GPUs; memory in MB as the tables have it."""

    tables: AcesoTables
    model: Model
    num_nodes: int
    per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]
    memory_mb: float
    cuts: Cuts = "ops"

    @cached_property
    def names(self) -> list[str]:
        """The table's name of each op of the chain."""
        return [place.op.config["op"] for place in self.model.ops]

    @cached_property
    def kept_share(self) -> Floats:
        """[N] what Aceso counts of each op's activation: some outputs live in memory that another op counts."""
        share = {name: 1.5 if name == "enc-attention-dropout" else float(not shares_storage(name)) for name in set(self.names)}
        return np.array([share[name] for name in self.names])

    @cached_property
    def stays(self) -> NDArray[np.bool_]:
        """[N] whether what an op keeps is held even if it is recomputed: a segment begins behind it, or the chain ends."""
        begins = {name: starts_segment(name) for name in set(self.names)}
        apart = {name: not shares_storage(name) for name in begins}
        return np.array([*(begins[after] and apart[name] for name, after in pairwise(self.names)), True])

    @cached_property
    def begins(self) -> NDArray[np.bool_]:
        """[N] whether a stage, or a run of recomputed ops, may begin with an op."""
        if self.cuts == "ops":
            return np.ones(len(self.names), bool)
        return np.array(begins_op(self.family, self.names))

    @property
    def family(self) -> str:
        """`gpt`, `t5` or `resnet`."""
        return str(self.model.config["family"])

    def machine(self) -> Machine:
        """fp16 training keeps weights, fp32 masters, gradients and moments: 8 × the weights; fp32 training 4 ×."""
        pool = DevicePool(self.num_nodes * self.per_node, self.per_node, float(self.memory_mb))
        return Machine((pool,), 4.0 if self.family == "resnet" else 8.0)


def shares_storage(op: str) -> bool:
    """Whether an op's output lives in memory that another op counts."""
    return op in ("enc-attention-softmax", "bn1") or "-bn3" in op or ("-downsample" in op and "0-0" not in op)


def starts_segment(op: str) -> bool:
    """Whether a recomputed segment ends before this op."""
    return op == "enc-1st-layernorm" or "-conv1" in op
