"""What prices of a family's options are made from: op costs, numbers of weights, and who shares a network.

N are the ops of the chain, O the distinct ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.costs.memory import bytes_per_parameter
from penstock.costs.table import CostTable, Floats
from penstock.models.shapes import Shape
from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.stage_costs import Ints, StageOption
from penstock.timing.pipeline import share_shape

__all__ = ["OptionTables"]


@dataclass(frozen=True, eq=False)
class OptionTables(FamilyPart):
    """Op costs and weights of a family's options."""

    @cached_property
    def chain(self) -> tuple[Ints, Ints]:
        """[N] number of each op among the distinct ones, and the first op of each number."""

        def numbered() -> tuple[Ints, Ints]:
            index = {op.signature: number for number, op in enumerate(self.request.model.distinct_ops)}
            numbers = np.array([index[place.op.signature] for place in self.request.model.ops])
            return numbers, np.unique(numbers, return_index=True)[1]

        return self.request.once("chain", (), numbered)

    @cached_property
    def copies(self) -> Ints:
        """[O] how often each distinct op occurs."""
        return np.bincount(self.chain[0], minlength=len(self.request.model.distinct_ops))

    @remembered
    def leanest(self, option: StageOption) -> StageOption:
        """The option with sequence parallelism if it can have that."""
        return replace(option, sequence=option.tp > 1 and self.request.estimator.divides_tokens)

    def of(self, option: StageOption) -> tuple[CostTable, Shape]:
        """The op costs of an option, and the shape of its ranks' share of a micro-batch."""
        samples = self.family.samples
        shape = self.request.once("shape", (samples, option.dp), lambda: share_shape(self.request.frame, samples, option.dp))
        return self.request.estimator.table(shape, option.tp, option.sequence), shape

    def device(self, option: StageOption) -> str:
        """The name of the devices it runs on."""
        return self.family.kinds[option.pool].device.name

    def weights(self, option: StageOption) -> Floats:
        """[O] weights on one rank; those that a distinct op shares with another count there alone, as if one stage held both."""
        ops = self.request.model.distinct_ops
        shared = [op.config.get("untied_parameters", 0) / option.tp if op.tied_to else np.inf for op in ops]
        return np.minimum(self.of(option)[0].parameters[:, 0, 0], shared)

    @property
    def bytes_per_weight(self) -> tuple[int, int, int, int]:
        """Bytes of a weight, its gradient, its master copy and its moments."""
        frame = self.request.frame
        return bytes_per_parameter(frame.precision, frame.optimizer, frame.gradients)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes of a weight and of its gradient."""
        return self.bytes_per_weight[0], self.bytes_per_weight[1]

    @cached_property
    def tied(self) -> tuple[int, float]:
        """The last op that shares a weight with the first one and the bytes of its gradient; -1 where there is none."""

        def found() -> tuple[int, float]:
            model = self.request.model
            users = [place for place in model.ops if place.op.tied_to == model.ops[0].name]
            if not users:
                return -1, 0.0
            count = users[-1].op.parameters.at(Shape(1)) - float(users[-1].op.config.get("untied_parameters", 0))
            return users[-1].index, count * self.bytes_per_weight[1]

        return self.request.once("shared", (), found)

    def flows(self, option: StageOption, pairs: int) -> int:
        """Messages over the network of a node of a stage, if so many leave the stage at once in every replica."""
        kind, own = self.family.kinds[option.pool], self.family.pools[option.pool].num_devices
        return math.ceil(pairs * min(1.0, kind.per_node / option.num_devices)) * max(1, kind.per_node // own)
