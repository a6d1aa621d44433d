"""A bound for pipelines over several kinds of devices: whole stages, each with the messages that its neighbours leave it, and what follows
the last micro-batch on the network of its own kind.

Kinds are in different nodes, so a message between them crosses the slower of two networks. What else crosses depends on the order of
ranks, of which there are two, bounded one by one:

    stages of a replica side by side   messages may stay in a node, but all stages of a node then sum their gradients over one network
    replicas of a stage side by side   gradients have their nodes' networks for themselves, but all replicas on a node send messages at once

A plan takes (m - 1) · slowest stage + sum of stages + what the last stage to end does after the last micro-batch. The slowest stage is at
least any average over a pool's devices, or over as many stages as there may be; what follows is at least any average over the devices (or
nodes) of a pool, and what one of the two stages does that share a weight. With weights for all these averages, a plan costs at
least a sum over its stages, and the cheapest way to cut the chain into stages is a bound whatever the weights are. The stages may take at
most 1 / m of the best plan's time. Plans are divided by the kinds on which the two ends of a shared weight lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.partition.stage_space import Machine, StageSpace, build_space
from penstock.search.space.families import PlanFamily, Subspace
from penstock.search.space.prices import FamilyPrices
from penstock.search.space.stage_costs import Ints, StageOption, sums_before

if TYPE_CHECKING:
    from penstock.clusters import Node

__all__ = ["STEPS", "NeighbourStages", "StagePrices", "neighbours_bound_s"]

STEPS = 20
"""Rounds in which the weights are improved; a few tell whether a subspace is among the weakest."""
_GOOD, _MEAN = 2e-3, 5
"""How near to the best they need to come, and how often the mean of all so far is looked at."""


class NeighbourStages(NamedTuple):
    """Stages as the kernel takes them."""

    offset: Ints
    width: Ints
    times: Floats
    """[pairs] as in a `StageSpace`, with no stage behind."""
    enter: Floats
    leave: Floats
    """[C, 2, cuts] messages to a neighbour of the same kind, and of another."""
    hidden: Floats
    """[C, cuts] prefix sums of what zero-bubble hides."""
    pool_of: Ints
    tied: int
    """The last op that shares a weight with the first one, or less than 0."""


class StagePrices(NamedTuple):
    """What a stage that takes t costs: (1 + busy) · t - hidden + after, and what the ends of a shared weight cost besides."""

    busy: Floats
    """[C]"""
    after: Floats
    """[C, cuts] prefix sums."""
    first: Floats
    """[C, cuts] of a first stage up to a cut."""
    last: Floats
    """[C, cuts + 1] prefix sums, and a constant."""


def neighbours_bound_s(family: PlanFamily, subspace: Subspace, known_s: float, good_s: float, steps: int = STEPS) -> float:
    """What no plan of a subspace over several kinds that is faster than `known_s` can be below; `good_s` is enough."""
    pools = sorted({option.pool for option in subspace.options})
    if subspace.max_stages == 1:
        alone = (replace(subspace, options=tuple(option for option in subspace.options if option.pool == pool)) for pool in pools)
        return min(subspace_bound(family, one, known_s).time_s for one in alone)
    plain = subspace_bound(family, subspace, known_s)
    if len(pools) == 1 or family.request.cluster.overrides or plain.time_s >= good_s:
        return plain.time_s
    space, found = _space(family, subspace, known_s), np.inf
    for side_by_side in (True, False) if family.replicas > 1 else (True,):
        order = _Order(family, subspace, space, side_by_side, known_s, plain.weights)
        for ends in order.ends():
            found = min(found, order.bound_s(ends, min(found, good_s), steps))
    return min(max(found, plain.time_s), known_s)


def _space(family: PlanFamily, subspace: Subspace, known_s: float) -> StageSpace:
    """All stages at least as short as under any schedule and with any number of stages behind them."""
    prices = family.prices
    costs = [prices.hiding(prices.least_costs(option)) for option in subspace.options]
    return build_space(
        costs, family.request.blocks, Machine(family.pools, 1.0, 0.0), max_stages=1, longest=known_s / family.count, recompute="bounded",
        levels=[prices.levels(option) for option in subspace.options],
    )  # fmt: skip


class _Order:
    """The plans of a subspace in one order of ranks."""

    def __init__(
        self, family: PlanFamily, subspace: Subspace, space: StageSpace, side_by_side: bool, known_s: float, weights: tuple[float, ...]
    ) -> None:
        """`weights` of devices and stages are those to begin with."""
        self._family, self._subspace, self._known_s = family, subspace, known_s
        self._sizes = np.array([*(max(pool.num_devices, 1) for pool in family.pools), subspace.max_stages], float)
        shares = np.maximum(np.array(weights) * self._sizes, 1e-3 * family.count)
        self._shares = shares / shares.sum()
        prices, options, num_cuts = family.prices, subspace.options, len(space.cuts)
        grains = [math.gcd(pool.num_devices, *(o.num_devices for o in options if o.pool == p)) for p, pool in enumerate(family.pools)]
        links = [_Links(prices, option, side_by_side, grains[option.pool]) for option in options]
        enter, leave = np.zeros((len(options), 2, num_cuts)), np.zeros((len(options), 2, num_cuts))
        for c, (option, link) in enumerate(zip(options, links, strict=True)):
            (table, shape), ops = prices.table(option), prices.chain[0]
            s = table.shape_index(shape)
            enter[c, :, 1:-1] = link.messages_s(table.input_bytes[ops[1:], s, 0, 0]) / prices.window
            leave[c, :, 1:-1] = link.messages_s(table.output_bytes[ops[:-1], s, 0, 0]) / prices.window
        self._tied, shared_bytes = prices.shared
        pools = np.array([option.pool for option in options])
        self._stages = NeighbourStages(
            space.offset, space.width, space.times[0], enter, leave, space.hidden_fill_s, pools, self._tied
        )  # fmt: skip
        self._average = sums_before([link.average_after_s()[prices.chain[0]] for link in links])
        self._whole = sums_before([prices.after_s(option) for option in options])
        self._shared_s = np.array([link.shared_s(shared_bytes) for link in links])
        self._taken = np.array([option.num_devices for option in options], float)
        size = (num_cuts, len(family.pools), 2)
        self._tables = np.zeros(size), np.zeros((*size, 3), np.int64), np.zeros((num_cuts, 4), np.int64)

    def ends(self) -> list[tuple[int, int]]:
        """The kinds on which the two ends of a shared weight may lie; any where there is none."""
        pools = sorted({option.pool for option in self._subspace.options})
        return [(first, last) for first, last in product(pools, pools)] if self._tied >= 0 else [(-1, -1)]

    def bound_s(self, ends: tuple[int, int], good_s: float, steps: int) -> float:
        """The bound on plans with these ends: weights of what is the most grow; the mean of weights so far is often better than each."""
        shares, afters, best = self._shares, np.full(len(self._sizes) + 1, 1 / (len(self._sizes) + 1)), -np.inf
        means = [0 * shares, 0 * afters]
        for step in range(steps):
            value, load, after = self._value(shares, afters, ends)
            # A concave value is nowhere above its tangent.
            most = value + (self._family.count - 1) * float(load.max() - shares @ load) + float(after.max() - afters @ after)
            best = max(best, value)
            if best >= good_s or most <= best * (1 + _GOOD):
                break
            shares, afters = _dearer(shares, load, 0.6 / (1 + step / 8)), _dearer(afters, after, 2 / (1 + step / 6))
            if step >= steps // 3:
                means = [mean + weights for mean, weights in zip(means, (shares, afters), strict=True)]
                if step % _MEAN == _MEAN - 1 or step == steps - 1:
                    best = max(best, self._value(means[0] / means[0].sum(), means[1] / means[1].sum(), ends)[0])
        return best

    def _value(self, shares: Floats, afters: Floats, ends: tuple[int, int]) -> tuple[float, Floats, Floats]:
        """The bound at some weights; the work of each pool's devices and of stages; and what follows in each pool and at the two ends."""
        from penstock.search.partition.neighbour_kernels import cheapest_stages

        s, pools = self._stages, len(self._family.pools)
        weights = (self._family.count - 1) * shares / self._sizes
        shared_s = self._shared_s if ends[0] != ends[1] else np.zeros_like(self._shared_s)
        of_first, of_last = self._whole + shared_s[:, None], np.column_stack([self._whole, shared_s])
        prices = StagePrices(
            self._taken * weights[s.pool_of] + weights[-1], afters[s.pool_of][:, None] * self._average, afters[pools] * of_first,
            afters[pools + 1] * of_last,
        )  # fmt: skip
        value, number = cheapest_stages(s, prices, self._known_s / self._family.count, np.array(ends), *self._tables)
        load, after = np.zeros(pools + 1), np.zeros(pools + 2)
        for a, b, c, sides in self._tables[2][:number].tolist():
            time = s.times[s.offset[c, a] + b - a - 1] + s.enter[c, sides // 2, a] + s.leave[c, sides % 2, b]
            pool, has_tied = int(s.pool_of[c]), a <= self._tied < b
            load[[pool, -1]] += self._taken[c] * time, time
            after[pool] += self._average[c, b] - self._average[c, a]
            if has_tied and a > 0:
                after[pools + 1] = of_last[c, b] - of_last[c, a] + of_last[c, -1]
            elif a == 0 and not has_tied:
                after[pools] = of_first[c, b]
        return value, load / self._sizes, after


def _dearer(weights: Floats, amounts: Floats, step: float) -> Floats:
    """Weights that sum to 1, larger for what there is most of."""
    if not amounts.max() > 0:
        return weights
    weights = weights * np.exp(step * (amounts / amounts.max() - 1))
    return np.asarray(weights / weights.sum())


class _Links:
    """What the stages of one option send over at least, in one order of ranks."""

    def __init__(self, prices: FamilyPrices, option: StageOption, side_by_side: bool, grain: int) -> None:
        """`grain` divides the devices of all stages of the kind in a replica, and so the places where they begin."""
        self._prices, self._option, self._side_by_side, self._grain = prices, option, side_by_side, grain
        self._own, self._replicas = prices.pools[option.pool].num_devices, prices.replicas
        cluster, device = prices.request.estimator.cluster, prices.kinds[option.pool].device
        self._runs = [run.node for run in cluster.runs if run.node.device == device]
        self._others = [run.node for run in cluster.runs if run.node.device != device]
        sizes = {node.num_devices for node in self._runs}
        self._node, uniform = max(sizes), len(sizes) == 1
        self._lanes = self._lanes_of_a_node() if uniform else 1

    def _lanes_of_a_node(self) -> int:
        """Ranks of a stage that send from each of its nodes at once, over all replicas, at least."""
        node, own, size = self._node, self._own, self._option.num_devices
        if not self._side_by_side:
            return math.gcd(self._replicas * self._grain, node)
        return min(size, node) * (node // own if node % own == 0 else 1)

    def messages_s(self, sizes: Floats) -> Floats:
        """[2, sizes] times of messages to a stage of the same kind, and of another."""
        apart = self._option.num_devices >= self._node or (not self._side_by_side and self._replicas >= self._node)
        same = self._across(self._runs)
        if not apart:
            inside = [node.intra for node in self._runs]
            same = min(same[0], *(link.latency_s for link in inside)), max(same[1], *(link.bandwidth_bytes_per_s for link in inside))
        return np.stack([latency_s + sizes / bandwidth for latency_s, bandwidth in (same, self._across(self._others))])

    def _across(self, others: Sequence[Node]) -> tuple[float, float]:
        """Latency and bandwidth to some nodes, the best of each."""
        each = [[node.inter.bandwidth_bytes_per_s / max(node.num_rails, self._lanes) for node in nodes] for nodes in (self._runs, others)]
        return min(node.inter.latency_s for node in (*self._runs, *others)), min(map(max, each))

    def average_after_s(self) -> Floats:
        """[O] what each distinct op adds to what follows the last micro-batch, on average over the devices or nodes of its pool."""
        prices, option, node = self._prices, self._option, self._node
        after_s = prices.op_after_s(option) * option.num_devices / self._own
        nodes = self._replicas * self._own / node
        if not self._side_by_side or self._replicas == 1 or nodes <= 1 or (self._own < node and node % self._own):
            return np.asarray(after_s)
        # All stages on a node sum their gradients over its network, and a stage is on a node of every replica, or on all nodes.
        on = min(self._replicas, nodes) if self._own >= node else nodes
        weights, (weight, gradient) = prices.op_weights(option), prices.sent_bytes
        sent_s = (1 - 1 / on) * (weight + gradient) / max(run.inter.bandwidth_bytes_per_s for run in self._runs)
        share = on * max(1.0, option.num_devices / node) / math.ceil(nodes)
        return np.maximum(after_s, weights * option.tp * sent_s * share)

    def shared_s(self, size_bytes: float) -> float:
        """Time to sum the gradient of a weight with a stage of another kind."""
        return size_bytes / self._option.tp / self._across(self._others)[1]
