"""The stages of a subspace over several kinds of devices in one order of ranks, with the messages that each neighbour leaves them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.partition.chain_prices import CutChain, PlanLimits
from penstock.search.partition.least_links import LeastLinks
from penstock.search.partition.stage_space import StageSpace
from penstock.search.space.families import PlanFamily, Subspace
from penstock.search.space.stage_costs import Ints, sums_before

__all__ = ["Cheapest", "Labels", "NeighbourStages", "NeighbourTables", "OrderedStages", "StagePrices"]


_MAX_GROUPS = 8
"""Groups that sum gradients over one network at once are counted up to here; more count as so many, which makes the bound no less sure."""

_LABELS, _STEPS = 1 << 17, 2_000_000
"""Where devices are counted, at most so many ways to have come to a cut are kept, and so many stages looked at; the bound by prices serves
where that is not enough."""


class NeighbourStages(NamedTuple):
    """What stages take, by option (C of them) and by the cuts where they begin and end.

    A stage is in the same node as its neighbour, or elsewhere. K are the sizes, numbers of devices on one pool, that stages may have.
    """

    offset: Ints
    width: Ints
    times: Floats
    """Of a `StageSpace`, with no stage behind: times[offset[c, a] + b - a - 1] is that of option c from cut a to b ≤ a + width[c, a]."""
    hidden: Floats
    """[C, cuts] prefix sums of what zero-bubble hides."""
    after_s: Floats
    """[C, cuts] prefix sums of what a stage does after the last micro-batch."""
    shared_s: Floats
    """[C] what it does besides if it has one end of a shared weight."""
    near_in: Floats
    near_out: Floats
    """[C, cuts] messages from and to a stage in the same node."""
    far_in: Floats
    far_out: Floats
    """[C, cuts, K] messages from and to a stage elsewhere, of each size."""
    by_in: Ints
    by_out: Ints
    """[C, cuts, K] these sizes, those with the shortest messages first."""
    pool_of: Ints
    size_of: Ints
    """[C] the pool of devices, and which of the K sizes."""
    units: Ints
    """[C] devices, in units of a pool."""
    node_units: Ints
    """[P] units of a node; 0 where nothing is known of nodes."""
    tied: int
    """The last op that shares a weight with the first one, or less than 0."""
    groups: Ints
    """[C] groups of ranks that sum gradients, each of them over the networks of all nodes of the stage."""
    group_s: Floats
    """[C, cuts] prefix sums of the time of one such group, if no other uses these networks."""
    unit_devices: Ints
    """[P] devices of a unit."""
    max_groups: int
    """Up to where groups on one network are counted: more count as so many, and so many may always be there."""
    tied_copy_s: Floats
    """[C, 2] what a stage with op `tied` but not the first one adds to `after_s` and to `group_s`, since it holds their weight again."""


class StagePrices(NamedTuple):
    """What a stage costs besides what zero-bubble hides: price + rate · time + after."""

    price: Floats
    rate: Floats
    """[C]"""
    after: Floats
    """[C, cuts] prefix sums."""


class NeighbourTables(NamedTuple):
    """What the kernel fills: the cost of all stages from a cut on."""

    near: Floats
    """[cuts, P, units taken, groups there, groups allowed] where the first stage behind the cut lies in the same node as the one before:
    by how many units of the node the stages before it take, how many groups of theirs sum gradients, and how many may be there."""
    far: Floats
    """[cuts, K, K] where it lies elsewhere: by the size of the stage before the cut, and its own."""
    near_choice: Ints
    far_choice: Ints
    """[…, 3] of both: that first stage's option and end, and the size of the next stage elsewhere, or -1."""
    behind: Floats
    """[C, cuts, K] behind a stage that ends at the cut, with its message elsewhere: the best of the first so many sizes of `by_out`."""
    behind_choice: Ints
    """[C, cuts, K] the size of that."""
    top: Ints
    """[C, cuts] the first of these that is the best of all; -1 where there is none."""
    groups_apart: Ints
    """[P] up to where groups on one network were counted: 1 where all may always be there together."""

    @classmethod
    def of(cls, cuts: int, options: int, pools: int, sizes: int, room: int, groups: int) -> NeighbourTables:
        """Room for them."""
        near, far, behind = (cuts, pools, max(room, 1), groups + 1, groups + 1), (cuts, sizes, sizes), (options, cuts, sizes)
        return cls(
            np.empty(near), np.empty(far), np.empty((*near, 3), np.int32), np.empty((*far, 3), np.int32), np.empty(behind),
            np.empty(behind, np.int32), np.empty(behind[:2], np.int64), np.empty(pools, np.int64),
        )  # fmt: skip


class Labels(NamedTuple):
    """Ways to have come to a cut, as many as were kept, in a table by what tells them apart."""

    cost: Floats
    cut: Ints
    state: Ints
    used: Ints
    """What each has cost, where it is, and how it came there."""
    next: Ints
    head: Ints
    """The first of those at each cut, and the next of each; -1 where there is none."""
    slots: Ints
    """Numbers of labels, by their hashes."""

    @classmethod
    def of(cls, cuts: int, most: int) -> Labels:
        """Room for so many, a power of two."""
        cut, state, used, after = (np.zeros(most, np.int64) for _ in range(4))
        return cls(np.zeros(most), cut, state, used, after, np.zeros(cuts, np.int64), np.zeros(2 * most, np.int64))


class Cheapest(NamedTuple):
    """The cheapest chain at some prices, if there is one, what it costs with them, and how many stages were looked at."""

    cost_s: float
    chain: CutChain | None
    looked: int


class OrderedStages:
    """The stages of a subspace in one order of ranks."""

    def __init__(self, family: PlanFamily, subspace: Subspace, space: StageSpace, side_by_side: bool) -> None:
        prices, options, pools = family.prices, subspace.options, len(family.pools)
        present = sorted({option.pool for option in options})
        units = {p: math.gcd(family.pools[p].num_devices, *(o.num_devices for o in options if o.pool == p)) for p in present}
        links = {p: LeastLinks(prices, p, side_by_side, units[p]) for p in present}
        own, ops = [links[option.pool] for option in options], prices.tables.chain[0]
        sizes = {(option.pool, option.num_devices): option for option in options}
        of_size, room = list(sizes), np.array([links[p].room // units[p] if p in links else 0 for p in range(pools)])
        near = np.array([link.near() for link in own])
        far = np.array([[link.far(o, other, links[other.pool]) for other in sizes.values()] for link, o in zip(own, options, strict=True)])
        sent = [np.stack(side) / prices.family.window for side in zip(*map(prices.messages.cut_bytes, options), strict=True)]
        near_s = [np.ascontiguousarray(near[:, :1] / prices.family.window + near[:, 1:] * size) for size in sent]
        far_s = [np.ascontiguousarray(far[:, None, :, 0] / prices.family.window + far[:, None, :, 1] * size[:, :, None]) for size in sent]
        tied, tied_bytes = prices.tables.tied
        others = [[links[p] for p in present if p != option.pool] for option in options]
        self._stages = NeighbourStages(
            space.offset, space.width, space.times[0], space.hidden_fill_s,
            sums_before([link.stage_after_s(option)[ops] for link, option in zip(own, options, strict=True)]),
            np.array([link.shared_s(option, other, tied_bytes) for link, option, other in zip(own, options, others, strict=True)]),
            near_s[0], near_s[1], far_s[0], far_s[1], np.argsort(far_s[0], axis=2), np.argsort(far_s[1], axis=2),
            np.array([option.pool for option in options]), np.array([of_size.index((o.pool, o.num_devices)) for o in options]),
            np.array([option.num_devices // units[option.pool] for option in options]), room, tied,
            np.array([option.tp for option in options]),
            sums_before([link.group_after_s(option)[ops] for link, option in zip(own, options, strict=True)]),
            np.array([units.get(p, 1) for p in range(pools)]), _MAX_GROUPS,
            np.array([link.tied_copy_s(option) for link, option in zip(own, options, strict=True)]),
        )  # fmt: skip
        self._average = sums_before([link.average_after_s(option)[ops] for link, option in zip(own, options, strict=True)])
        self._of_pool = np.array([[float(option.pool == p) for p in range(pools)] for option in options])
        share = [option.num_devices / family.pools[option.pool].num_devices for option in options]
        self._share = np.column_stack([self._of_pool * np.array(share)[:, None], np.full(len(options), 1 / subspace.max_stages)])
        """[C, P + 1] of the devices of each pool, and of the stages that there may be."""
        self._shape = len(space.cuts), len(options), pools, len(sizes), int(room.max()), _MAX_GROUPS
        self._pool_units = np.array([family.pools[p].num_devices // units.get(p, 1) for p in range(pools)], float)

    def tables(self) -> NeighbourTables:
        """Room for what `cheapest` fills: megabytes, so that a box has them only while it is bounded."""
        return NeighbourTables.of(*self._shape)

    def cheapest(self, limits: PlanLimits, ends: tuple[int, int], prices: Floats, tables: NeighbourTables) -> Cheapest:
        """The cheapest chain of stages within limits, at some prices of what they take."""
        from penstock.search.partition.chain_kernels import cheapest_stages

        s, paid = self._paid(ends, prices)
        places = np.zeros((self._shape[0], 5), np.int64)
        cost_s, length, looked = cheapest_stages(s, paid, limits.stage_s[1], limits.after_s[1], np.array(ends), tables, places)
        return Cheapest(cost_s, self._chain(places[:length], cost_s, prices) if length else None, looked)

    def counted(
        self, limits: PlanLimits, ends: tuple[int, int], prices: Floats, tables: NeighbourTables, budget_s: float
    ) -> tuple[float, int]:
        """The least cost of a chain with no more devices than there are, if that is below the budget; minus infinity where it would take
        too long to tell. And how many stages were looked at. `tables` are as `cheapest` filled them for the same arguments."""
        from penstock.search.partition.counting_kernels import counted_stages

        s, paid = self._paid(ends, prices)
        devices = np.stack([self._pool_units, prices[: len(self._pool_units)] / np.maximum(self._pool_units, 1)])
        labels = Labels.of(self._shape[0], _LABELS)
        cost_s, looked = counted_stages(
            s, paid, limits.stage_s[1], limits.after_s[1], np.array(ends), tables, devices, budget_s, _STEPS, labels
        )  # fmt: skip
        return float(cost_s), int(looked)

    def _paid(self, ends: tuple[int, int], prices: Floats) -> tuple[NeighbourStages, StagePrices]:
        """Stages between given ends, and what they cost."""
        s, pools = self._stages, self._of_pool.shape[1]
        if ends[0] == ends[1]:
            s = s._replace(shared_s=np.zeros_like(s.shared_s))
        fixed, after, busy = np.split(prices, [pools + 1, 2 * pools + 1])
        return s, StagePrices(self._share @ fixed, 1 + self._share @ busy, (self._of_pool @ after)[:, None] * self._average)

    def _chain(self, places: Ints, cost_s: float, prices: Floats) -> CutChain:
        """The stages that were the cheapest."""
        s, (first, last, option, before, behind) = self._stages, places.T
        come_s = np.where(before >= 0, s.far_in[option, first, before], s.near_in[option, first] * (first > 0))
        go_s = np.where(behind >= 0, s.far_out[option, last, behind], s.near_out[option, last] * (last < s.near_out.shape[1] - 1))
        times_s = s.times[s.offset[option, first] + last - first - 1] + come_s + go_s
        after_s = self._average[option, last] - self._average[option, first]
        taken = self._share[option].sum(axis=0), self._of_pool[option].T @ after_s, self._share[option].T @ times_s
        latest_s = float((s.after_s[option, last] - s.after_s[option, first]).max())
        return CutChain(cost_s - float(prices @ np.concatenate(taken)), taken, float(times_s.max()), latest_s)
