"""What follows the last micro-batch: gradient sync and the optimizer step.

N are the ops of the chain, O the distinct ones. What is named `least_…` is a bound: no plan is below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.collectives import BUCKET_BYTES, group_of, sync_gradients_s
from penstock.costs.table import Floats
from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.option_tables import OptionTables
from penstock.search.space.stage_costs import StageOption

if TYPE_CHECKING:
    from penstock.search.space.request import Request

__all__ = ["UpdatePrices", "step_s_per_weight"]

_LARGE = 1e9
"""Weights of an optimizer step in which the time to start it no longer counts."""


def step_s_per_weight(request: Request, device: str) -> float:
    """Optimizer time for one more weight on a device, without what starting the step takes."""
    frame, step_s = request.frame, request.estimator.source.optimizer_s
    once, twice = (step_s(n * _LARGE, device, frame.precision, frame.optimizer, gradients=frame.gradients) for n in (1, 2))
    return (twice - once) / _LARGE


@dataclass(frozen=True, eq=False)
class UpdatePrices(FamilyPart):
    """Time that a family's options spend on weights after the last micro-batch."""

    tables: OptionTables

    def after_s(self, option: StageOption) -> Floats:
        """[N] least time per op of gradient sync and optimizer step after the last micro-batch, wherever the replicas lie."""
        return self.op_after_s(option)[self.tables.chain[0]]

    @remembered
    def op_after_s(self, option: StageOption) -> Floats:
        """[O] `after_s` of the distinct ops."""
        if self.request.asynchronous:
            return np.zeros(len(self.tables.copies))
        return self.update_s(option)

    def update_s(self, option: StageOption) -> Floats:
        """[O] least time to sum the gradients of the distinct ops and to change their weights."""
        holders = self.family.replicas * option.dp if option.zero else 1
        step_s = step_s_per_weight(self.request, self.tables.device(option)) / holders
        return np.asarray(self.tables.weights(option) * (step_s + sum(self.sent_s_per_weight(option))))

    def least_after_s(self, options: Sequence[StageOption]) -> float:
        """What follows the last micro-batch of a plan of these options at least: the average over devices, every op under its best one."""
        each = np.stack([option.num_devices / self.family.num_devices * self.op_after_s(option) for option in options])
        return float(each.min(axis=0)[self.tables.chain[0]].sum())

    @remembered
    def side_by_side_s(self, option: StageOption) -> Floats:
        """[N] gradient sync and optimizer step where a replica's stages lie side by side: those of a node share its network."""
        kind, own = self.family.kinds[option.pool], self.family.pools[option.pool].num_devices
        lanes = [kind.ranks[replica * own + i * option.tp] for replica in range(self.family.replicas) for i in range(option.dp)]
        step_s = step_s_per_weight(self.request, self.tables.device(option)) / len(lanes)
        if len(lanes) > 1:
            sharing = option.tp * max(1, min(own, kind.per_node) // option.num_devices)
            step_s += sum(self._group_s(lanes, sharing))
        return np.asarray(self.tables.weights(option) * step_s)[self.tables.chain[0]]

    @remembered
    def ends_s(self, option: StageOption) -> float:
        """Time to add up the gradients of a weight that the first op shares with a later one, if a stage of this option has one of both
        and another such stage in another node the other."""
        kind, cluster, (user, shared_bytes) = self.family.kinds[option.pool], self.request.estimator.cluster, self.tables.tied
        apart = next((rank for rank in kind.ranks if cluster.node_index(rank) != cluster.node_index(kind.ranks[0])), None)
        if user < 0 or apart is None:
            return 0.0
        own = self.family.pools[option.pool].num_devices
        sharing = min(option.num_devices * max(1, kind.per_node // own), kind.per_node)
        return sync_gradients_s(shared_bytes, cluster, (kind.ranks[0], apart), sharing=sharing)  # whole, unless both ends divide it

    def ends_between_s(self, first: StageOption, last: StageOption) -> float:
        """Time to add up the gradients of the weight that the first op shares with a later one, between stages of two options in
        different nodes; they divide the weight if both options do."""
        cluster, tp, (user, shared_bytes) = self.request.estimator.cluster, min(first.tp, last.tp), self.tables.tied
        pairs = max(first.num_devices, last.num_devices)
        sharing = max(self.tables.flows(option, pairs) for option in (first, last))
        ranks = self.family.kinds[first.pool].ranks[0], self.family.kinds[last.pool].ranks[-1]

        def summed_s() -> float:
            if user < 0 or ranks[0] == ranks[1]:
                return 0.0
            return sync_gradients_s(shared_bytes / tp, cluster, ranks, sharing=sharing)

        return self.request.once("ends", (ranks, tp, sharing), summed_s)

    @remembered
    def sent_s_per_weight(self, option: StageOption) -> tuple[float, float]:
        """Time per weight to sum gradients among the ranks that hold it, each keeping a part, and to gather it from them."""
        kind, holders = self.family.kinds[option.pool], self.family.replicas * option.dp
        if holders == 1:
            return 0.0, 0.0

        def sent_s() -> tuple[float, float]:
            lanes = [kind.ranks[i * option.tp] for i in range(holders) if i * option.tp < len(kind.ranks)]
            if not option.zero:
                group = group_of(self.request.estimator.cluster, lanes, option.tp)
                return group.time_s("all_reduce", BUCKET_BYTES) / BUCKET_BYTES * self.tables.bytes_per_weight[1], 0.0
            return self._group_s(lanes, option.tp)

        return self.request.once("sent", (kind.device.name, holders, option.tp, option.zero > 0), sent_s)

    def _group_s(self, lanes: Sequence[int], sharing: int) -> tuple[float, float]:
        """Time per weight to sum gradients among some ranks, each keeping a part, and to gather the weight, with so many groups at once."""
        group = group_of(self.request.estimator.cluster, lanes, sharing)
        weight, gradient, _, _ = self.tables.bytes_per_weight
        summed, gathered = (group.time_s(name, BUCKET_BYTES) / BUCKET_BYTES for name in ("reduce_scatter", "all_gather"))
        return summed * gradient, gathered * weight
