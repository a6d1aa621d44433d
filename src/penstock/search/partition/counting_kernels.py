"""The compiled loop that counts devices: the cheapest stages of a chain that take no more of each kind than there are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from penstock.costs.table import Floats
from penstock.kernels import borrowing
from penstock.search.partition.chain_kernels import StageLimits, allowed_groups, can_hold_ends, stage_cost, tiny
from penstock.search.space.stage_costs import Ints

__all__ = ["counted_stages", "warm"]


class _Arrival(NamedTuple):
    """A way to have come to a cut."""

    spent: float
    """What all stages before the cut have cost, with the message to the next."""
    used: int
    """Units taken of every pool, in mixed radix."""
    before: int
    """The size of the stage elsewhere before the cut, -1 for none."""
    size: int
    """The size that the stage behind the cut must have, -1 for any."""
    pool: int
    """Of the node in which the stages before and behind the cut both lie; -1 where they do not."""
    taken: int
    groups: int
    limit: int
    """Of that node: units taken, groups that sum gradients, and how many may be there."""


class _Budget(NamedTuple):
    """What may be taken and spent."""

    units: Floats
    """[P] of each pool."""
    prices: Floats
    """[P] of a unit that is left."""
    strides: Ints
    """[P + 1] of units in mixed radix."""
    most: float
    room: int
    """Units of the largest node."""


@njit(cache=True, nogil=True)
def counted_stages(stages, prices, longest, latest, ends, tables, devices, budget, most, labels):  # type: ignore[no-untyped-def]
    """Least cost of a chain as `cheapest_stages` takes it, whose stages also take no more units of each pool than there are, and what is
    left of them paid for as well; infinite where that is above `budget` for all, minus infinity where `labels` or `most` steps were not
    enough. And how many steps were taken.

    From the first cut to the last, a label is kept for each way to have come to a cut: the state that `tables`, filled by
    `cheapest_stages` for the same arguments, tell apart, and the units taken. With what these say of the rest, most are beyond the budget.
    `devices` [2, P] are units of each pool and the price of one; `labels` are `Labels`.
    """
    strides = np.ones(len(stages.node_units) + 1, np.int64)
    for pool in range(len(stages.node_units)):
        strides[pool + 1] = strides[pool] * (int(devices[0, pool]) + 1)
    limits, given = StageLimits(longest, latest, ends), _Budget(devices[0], devices[1], strides, budget, stages.node_units.max())
    return _count(stages, prices, limits, tables, given, most, labels)


@borrowing
def _count(stages, prices, limits, tables, budget, most, labels):  # type: ignore[no-untyped-def]
    """`counted_stages`."""
    end, sizes = stages.near_in.shape[1] - 1, tables.far.shape[1]
    labels.head[:], labels.slots[:] = -1, -1
    found, steps, number = np.inf, 0, 0
    for a in range(end):
        label = labels.head[a]
        while a == 0 or label >= 0:
            arrival = _arrival(a, label, stages, sizes, budget.room, labels)
            for c in range(len(stages.pool_of)):
                if _may_follow(a, c, arrival, stages, limits, budget):
                    least, looked, number = _extend(a, c, arrival, stages, prices, limits, tables, budget, labels, number)
                    found, steps = min(found, least), steps + looked
                if steps > most or number + sizes * end >= len(labels.cost):
                    return -np.inf, steps
            if a == 0:
                break
            label = labels.next[label]
    return found, steps


@borrowing
def _arrival(a, label, stages, sizes, room, labels):  # type: ignore[no-untyped-def]
    """The way to a cut that a label stands for; to the first there is but one."""
    if a == 0:
        return _Arrival(0.0, 0, -1, -1, -1, 0, 0, 0)
    spent, used, state = labels.cost[label], labels.used[label], labels.state[label]
    if state < sizes**2:
        return _Arrival(spent, used, state // sizes, state % sizes, -1, 0, 0, 0)
    apart, state = stages.max_groups + 1, state - sizes**2
    place = state // apart**2
    return _Arrival(spent, used, -1, -1, place // room, place % room, state // apart % apart, state % apart)


@borrowing
def _may_follow(a, c, arrival, stages, limits, budget):  # type: ignore[no-untyped-def]
    """Whether a stage of an option may begin there: on its kind, of its size, with room in the node and devices left."""
    pool, units = stages.pool_of[c], stages.units[c]
    if (arrival.size >= 0 and stages.size_of[c] != arrival.size) or (a == 0 and limits.ends[0] >= 0 and pool != limits.ends[0]):
        return False
    room = stages.node_units[pool]
    if arrival.pool >= 0 and (pool != arrival.pool or units >= room or arrival.taken + units > room):
        return False
    return _taken(pool, arrival.used, budget.strides) + units <= budget.units[pool]


@borrowing
def _extend(a, c, arrival, stages, prices, limits, tables, budget, labels, number):  # type: ignore[no-untyped-def]
    """Tries all stages of an option behind an arrival; returns the least cost of a chain that one of them ends, how many were tried, and
    how many labels there are."""
    end, pool, units, found, steps = stages.near_in.shape[1] - 1, stages.pool_of[c], stages.units[c], np.inf, 0
    come = stages.far_in[c, a, arrival.before] if arrival.before >= 0 else (stages.near_in[c, a] if a else 0.0)
    used, apart, in_node = arrival.used + units * budget.strides[pool], tables.groups_apart[pool], arrival.pool >= 0
    for b in range(a + 1, min(a + stages.width[c, a], end) + 1):
        alone = stages.times[stages.offset[c, a] + b - a - 1]
        if alone + come > limits.longest or stages.after_s[c, b] - stages.after_s[c, a] > limits.latest:
            break
        steps += 1
        if not can_hold_ends(a, b, c, stages, limits.latest, limits.ends):
            continue
        cost, spare = stage_cost(a, b, c, stages, prices, alone + come, arrival.spent), limits.longest - alone - come
        taken, groups, limit = units, stages.groups[c], allowed_groups(a, b, c, stages, limits.latest, apart)
        if in_node:
            taken, groups, limit = taken + arrival.taken, groups + arrival.groups, min(limit, arrival.limit)
        if cost > budget.most or (in_node and groups > limit and limit < apart):
            continue
        if b < end:
            place = pool, taken, min(groups, apart), limit
            number = _stay_in_node(b, c, cost, spare, used, place, stages, prices, tables, budget, labels, number)
            number = _leave_node(b, c, cost, spare, used, stages, prices, tables, budget.most, labels, number)
        elif cost + _left_over(used, budget) <= budget.most:
            found = min(found, cost + _left_over(used, budget))
    return found, steps, number


@borrowing
def _taken(pool, used, strides):  # type: ignore[no-untyped-def]
    """Units of a pool among those used."""
    return used // strides[pool] % (strides[pool + 1] // strides[pool])


@borrowing
def _left_over(used, budget):  # type: ignore[no-untyped-def]
    """What the units cost that were not used."""
    cost = 0.0
    for pool in range(len(budget.units)):
        cost += budget.prices[pool] * (budget.units[pool] - _taken(pool, used, budget.strides))
    return cost


@borrowing
def _stay_in_node(b, c, cost, spare, used, place, stages, prices, tables, budget, labels, number):  # type: ignore[no-untyped-def]
    """Keeps a label for a next stage in the same node, if that may be good enough; returns how many there are."""
    pool, taken, groups, limit = place
    room = stages.node_units[pool]
    if stages.units[c] >= room or taken >= room or stages.near_out[c, b] > spare:
        return number
    more = cost + prices.rate[c] * stages.near_out[c, b]
    if more + tables.near[b, pool, taken, groups, limit] > budget.most:
        return number
    state = tables.far.shape[1] ** 2 + _node_state(pool, taken, groups, limit, stages.max_groups + 1, budget.room)
    return _keep(b, state, used, more, labels, number)


@borrowing
def _leave_node(b, c, cost, spare, used, stages, prices, tables, most, labels, number):  # type: ignore[no-untyped-def]
    """Keeps a label for each size of a next stage elsewhere that may be good enough; returns how many there are."""
    if tables.top[c, b] < 0 or cost + tables.behind[c, b, tables.top[c, b]] > most:
        return number
    own, sizes = stages.size_of[c], tables.far.shape[1]
    for i in range(sizes):
        e = stages.by_out[c, b, i]
        go = stages.far_out[c, b, e]
        if go > spare:
            break
        more = cost + prices.rate[c] * go
        if more + tables.far[b, own, e] <= most:
            number = _keep(b, own * sizes + e, used, more, labels, number)
    return number


@borrowing
def _node_state(pool, taken, groups, limit, apart, room):  # type: ignore[no-untyped-def]
    """One number for how a node is taken, where so many groups are told apart."""
    return ((pool * room + taken) * apart + groups) * apart + limit


@borrowing
def _keep(cut, state, used, cost, labels, number):  # type: ignore[no-untyped-def]
    """Keeps a label, or the cheaper of two that are equal; returns how many there are."""
    key = ((cut * 1_000_003 + state) * 1_000_003 + used) * 0x9E3779B97F4A7C1
    mask = len(labels.slots) - 1
    slot = (key ^ (key >> 29)) & mask
    while labels.slots[slot] >= 0:
        own = labels.slots[slot]
        if labels.cut[own] == cut and labels.state[own] == state and labels.used[own] == used:
            labels.cost[own] = min(labels.cost[own], cost)
            return number
        slot = (slot + 1) & mask
    labels.slots[slot] = number
    labels.cut[number], labels.state[number], labels.used[number], labels.cost[number] = cut, state, used, cost
    labels.next[number], labels.head[cut] = labels.head[cut], number
    return number + 1


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    from penstock.search.partition.neighbour_stages import Labels

    stages, prices, tables = tiny()
    counted_stages(stages, prices, 9.0, 9.0, np.array([-1, -1]), tables, np.ones((2, 1)), 9.0, 9, Labels.of(2, 4))
