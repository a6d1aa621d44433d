"""Messages between the stages of a family's options.

N are the ops of the chain. What is named `least_…` is a bound: no plan is below it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.space.family_part import FamilyPart, remembered
from penstock.search.space.option_tables import OptionTables
from penstock.search.space.stage_costs import StageOption

__all__ = ["MessagePrices"]


@dataclass(frozen=True, eq=False)
class MessagePrices(FamilyPart):
    """Sizes and times of messages that stages of a family's options get and send."""

    tables: OptionTables

    def at_cuts_s(self, option: StageOption) -> tuple[Floats, Floats]:
        """[2, N + 1] times of the messages that a stage gets if it begins at each op, and that it sends if it ends there, inside a node and
        across nodes."""
        table, shape = self.tables.of(option)
        s, ops = table.shape_index(shape), table.chain
        enter, leave = np.zeros((2, len(ops) + 1)), np.zeros((2, len(ops) + 1))
        enter[:, 1:-1] = self._own_s(option, table.input_bytes[ops[1:], s, 0, 0])
        leave[:, 1:-1] = self._own_s(option, table.output_bytes[ops[:-1], s, 0, 0])
        return enter, leave

    def _own_s(self, option: StageOption, sizes: Floats) -> Floats:
        """[2, sizes] times of messages inside a node and across nodes, where all lanes of the stage send at once."""
        lines = self._lines(option.pool, min(option.num_devices, self.family.kinds[option.pool].per_node))
        return np.stack([latency_s + sizes / bandwidth for latency_s, bandwidth in lines]) / self.family.window

    @remembered
    def _lines(self, pool: int, lanes: int) -> list[tuple[float, float]]:
        """Latency and bandwidth of a message inside a node, and of one of so many across nodes; no time where there is none."""
        cluster, kind = self.request.estimator.cluster, self.family.kinds[pool]
        first = kind.ranks[0]
        home = cluster.node_index(first)
        inside = next((rank for rank in kind.ranks[1:] if cluster.node_index(rank) == home), None)
        # A replica that has no more than a node of this kind sends to other kinds where it sends to other nodes.
        own = () if len(self.family.kinds) > 1 and self.family.pools[pool].num_devices <= kind.per_node else kind.ranks
        others = (*own, *(rank for other in self.family.kinds for rank in other.ranks[:1]))
        across = next((rank for rank in others if cluster.node_index(rank) != home), None)
        ends, none = ((inside, 1), (across, lanes)), (0.0, np.inf)
        return [
            (cluster.link(first, rank).latency_s, cluster.flow_bandwidth_bytes_per_s(first, rank, sharing)) if rank is not None else none
            for rank, sharing in ends
        ]

    def between_s(self, before: StageOption, after: StageOption, across: bool) -> tuple[Floats, Floats]:
        """[N + 1] times of the message there and of the one back, at each op, between stages of two options that lie side by side."""
        latency_s, there_s, back_s = self.link_between(before, after, across)
        return latency_s + there_s * self.cut_bytes(after)[0], latency_s + back_s * self.cut_bytes(before)[1]

    @remembered
    def cut_bytes(self, option: StageOption) -> tuple[Floats, Floats]:
        """[N + 1] what a rank of a stage gets that begins at each op, and what it gets back if it ends there."""
        table, shape = self.tables.of(option)
        got, back, at = np.zeros(len(table.chain) + 1), np.zeros(len(table.chain) + 1), table.shape_index(shape)
        got[1:-1], back[1:-1] = table.input_bytes[table.chain[1:], at, 0, 0], table.output_bytes[table.chain[:-1], at, 0, 0]
        return got, back

    def link_between(self, before: StageOption, after: StageOption, across: bool) -> tuple[float, float, float]:
        """Latency of messages between stages of two options that lie side by side, and seconds for each byte that a rank gets there, and
        back; a rank of the smaller stage serves several of the larger one in turn."""
        cluster, wider = self.request.estimator.cluster, after.num_devices / before.num_devices
        sender, receiver = self.family.kinds[before.pool].ranks[0], self.family.kinds[after.pool].ranks[-1]
        if across:
            sharing = max(self.tables.flows(option, max(before.num_devices, after.num_devices)) for option in (before, after))
            latency_s, bandwidth = cluster.link(sender, receiver).latency_s, cluster.flow_bandwidth_bytes_per_s(sender, receiver, sharing)
        else:
            link = cluster.node_of(sender).intra
            latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_per_s
        per_byte_s = 1 / bandwidth / self.family.window
        return latency_s / self.family.window, max(1.0, wider) * per_byte_s, max(1.0, 1 / wider) * per_byte_s

    def least_sent_bytes(self, option: StageOption) -> Floats:
        """[2] of the smallest message that a stage may get, and of the smallest that it may send; infinite in a chain of one op."""
        table, shape = self.tables.of(option)
        s, ops = table.shape_index(shape), table.chain
        entering, leaving = table.input_bytes[ops[1:], s, 0, 0], table.output_bytes[ops[:-1], s, 0, 0]
        return np.array([entering.min(initial=np.inf), leaving.min(initial=np.inf)])

    @remembered
    def least_s(self, option: StageOption) -> Floats:
        """[2] what a stage with others before and behind it spends at least on the message it gets and the one it sends."""
        sizes = self.least_sent_bytes(option)
        inside, across = self._own_s(option, np.where(np.isfinite(sizes), sizes, 0.0))
        edges = self.edges(option)
        if edges == 0:
            return np.asarray(np.minimum(inside, across))
        if edges == 2:
            return np.asarray(across)
        near, far = np.minimum(inside, across), np.maximum(inside, across)
        return np.array(min([(near[0], far[1]), (far[0], near[1])], key=sum))

    def edges(self, option: StageOption) -> int:
        """How many of the two messages of a stage between others cross nodes at least."""
        node = self.family.pools[option.pool].per_node
        if len(self.family.pools) > 1 or 2 * option.num_devices < node:
            return 0
        return 2 if option.num_devices >= node else 1
