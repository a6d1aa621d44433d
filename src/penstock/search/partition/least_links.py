"""What stages on several kinds of devices send over at least, in one of the two orders of ranks.

    stages of a replica side by side   messages may stay in a node, but all stages of a node then sum their gradients over one network
    replicas of a stage side by side   gradients have their nodes' networks for themselves, but all replicas on a node send messages at once

Between two stages a rank of the smaller one serves several of the larger one in turn, and all pairs on a node share its network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.table import Floats
from penstock.search.space.prices import FamilyPrices
from penstock.search.space.stage_costs import StageOption

if TYPE_CHECKING:
    from penstock.clusters import Node

__all__ = ["LeastLinks", "Link"]

Link = tuple[float, float]
"""Latency, and seconds for each byte that a rank of the stage gets."""


@dataclass(frozen=True)
class LeastLinks:
    """The links of stages of one kind of devices."""

    prices: FamilyPrices
    pool: int
    side_by_side: bool
    unit_devices: int
    """It divides the devices of all stages of the kind in a replica, and so the places where they begin."""

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes of the kind, one of each sort."""
        device = self.prices.family.kinds[self.pool].device
        return tuple(run.node for run in self.prices.family.request.estimator.cluster.runs if run.node.device == device)

    @property
    def _own(self) -> int:
        return self.prices.family.pools[self.pool].num_devices

    @cached_property
    def _node(self) -> int:
        """Devices of the largest node."""
        return max(node.num_devices for node in self.nodes)

    @property
    def _uniform(self) -> bool:
        return all(node.num_devices == self._node for node in self.nodes)

    @cached_property
    def _aligned(self) -> bool:
        """Whether replicas begin where nodes do or fill them, so that no stage lies partly in a node."""
        return self._uniform and (self._own % self._node == 0 or self._node % self._own == 0)

    @property
    def room(self) -> int:
        """Devices of a node for the stages of a replica that send each other nothing across nodes; 0 where they may be anywhere."""
        return min(self._own, self._node) if self.side_by_side else 0

    def flows(self, option: StageOption, pairs: int) -> int:
        """Messages over the network of some node of a stage at least, if so many leave it at once in every replica, all across nodes."""
        if self.side_by_side:
            inside = min(1.0, self.prices.family.pools[self.pool].per_node / option.num_devices)
            alike = min(self.prices.family.replicas, self._node // self._own) if self._aligned else 1
            return math.ceil(pairs * inside) * max(1, alike)
        on_node = math.gcd(self.prices.family.replicas * self.unit_devices, self._node) if self._uniform else 1
        return on_node * max(1, pairs // option.num_devices)

    def near(self) -> Link:
        """To a stage in the same node."""
        links = [node.intra for node in self.nodes]
        return min(link.latency_s for link in links), 1 / max(link.bandwidth_bytes_per_s for link in links)

    def far(self, option: StageOption, other: StageOption, links: LeastLinks) -> Link:
        """To a stage elsewhere, whose kind has these links; to one of the same kind anywhere where replicas of a stage are side by side."""
        wider, pairs = max(1.0, option.num_devices / other.num_devices), max(option.num_devices, other.num_devices)
        lanes = max(self.flows(option, pairs), links.flows(other, pairs))
        if self.pool != links.pool:
            latency_s, per_byte_s = _across((self.nodes, links.nodes), lanes)
        elif self.side_by_side:
            # A stage that lies partly in a node sends something across, but not all.
            whole = self._aligned or pairs <= self.prices.family.pools[self.pool].per_node
            latency_s, per_byte_s = _across((self.nodes,), lanes if whole else 1)
        else:
            latency_s, per_byte_s = _across((self.nodes,), self.flows(option, 1))
            if option.num_devices < self._node and self.prices.family.replicas < self._node:
                latency_s, per_byte_s = min(latency_s, self.near()[0]), min(per_byte_s, self.near()[1])
        return latency_s, per_byte_s * wider

    def average_after_s(self, option: StageOption) -> Floats:
        """[O] what each distinct op adds to what follows the last micro-batch, on average over the devices or nodes of its pool."""
        after_s = self.prices.updates.op_after_s(option) * option.num_devices / self._own
        if (on := self._nodes_of_a_stage()) <= 1:
            return np.asarray(after_s)
        # A replica of no more than a node has a part of each stage on every node that it fills.
        each = math.ceil(self.prices.family.replicas * self._own / self._node)
        share = 1.0 if self._own <= self._node else on * max(1.0, option.num_devices / self._node) / each
        return np.maximum(after_s, self._over_node_s(option, on) * share)

    def stage_after_s(self, option: StageOption) -> Floats:
        """[O] what each distinct op adds to what a stage that has it does after the last micro-batch."""
        after_s, on = self.prices.updates.op_after_s(option), self._nodes_of_a_stage()
        return np.maximum(after_s, self._over_node_s(option, on)) if on > 1 else np.asarray(after_s)

    def group_after_s(self, option: StageOption) -> Floats:
        """[O] what each distinct op adds to the time in which one of the groups that hold equal weights of a stage sums its gradients, if
        it is alone on the networks of the stage's nodes; of several, each takes as many times as long."""
        on = self._nodes_of_a_stage()
        return self._over_node_s(option, on) / option.tp if on > 1 else np.zeros_like(self.prices.tables.weights(option))

    def tied_copy_s(self, option: StageOption) -> tuple[float, float]:
        """What a weight that another stage has as well adds to `stage_after_s` and to `group_after_s` of a stage that has it."""
        weights, shared_bytes = self.prices.tables.weights(option), max(self.prices.tables.tied[1], 0.0)
        largest = int(weights.argmax())
        times = shared_bytes / self.prices.tables.sent_bytes[1] / option.tp / weights[largest]  # all of it grows with the weights
        return float(times * self.stage_after_s(option)[largest]), float(times * self.group_after_s(option)[largest])

    def _nodes_of_a_stage(self) -> int:
        """Nodes over whose networks every stage of the kind sums gradients at least; 0 where that is not known."""
        if not self.side_by_side:
            return 0
        if self._own >= self._node:
            return self.prices.family.replicas
        nodes = self.prices.family.replicas * self._own / self._node
        return (math.ceil(nodes) if self._aligned else math.floor(nodes)) if self._uniform else 0

    def _over_node_s(self, option: StageOption, on: int) -> Floats:
        """[O] what each distinct op sends over the network of each node of its stage, on so many nodes."""
        weight, gradient = self.prices.tables.sent_bytes
        sent_s = (1 - 1 / on) * (weight + gradient) / max(node.inter.bandwidth_bytes_per_s for node in self.nodes)
        return np.asarray(self.prices.tables.weights(option) * option.tp * sent_s)

    def shared_s(self, option: StageOption, others: Iterable[LeastLinks], size_bytes: float) -> float:
        """Time to sum the gradient of a weight with a stage of another kind."""
        lanes = self.flows(option, option.num_devices)
        return min(_across((self.nodes, other.nodes), lanes)[1] for other in others) * size_bytes / option.tp


def _across(ends: Iterable[tuple[Node, ...]], lanes: int) -> Link:
    """The best latency and time per byte of so many messages at once between some nodes."""
    each = [max(node.inter.bandwidth_bytes_per_s / max(node.num_rails, lanes) for node in nodes) for nodes in ends]
    return min(node.inter.latency_s for nodes in ends for node in nodes), 1 / min(each)
