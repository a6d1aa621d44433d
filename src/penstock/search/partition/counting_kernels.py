"""The compiled loop that counts devices: the cheapest stages of a chain that take no more of each kind than there are."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.partition.chain_kernels import allowed_groups, tiny

__all__ = ["counted_stages", "warm"]


@njit(cache=True, nogil=True)
def counted_stages(stages, prices, longest, latest, ends, tables, devices, budget, most, labels):  # type: ignore[no-untyped-def]
    """Least cost of a chain as `cheapest_stages` takes it, whose stages also take no more units of each pool than there are, and what is
    left of them paid for as well; infinite where that is above `budget` for all, minus infinity where `labels` or `most` steps were not
    enough. And how many steps were taken.

    From the first cut to the last, a label is kept for each way to have come to a cut: the state that `tables`, filled by
    `cheapest_stages` for the same arguments, tell apart, and the units taken. With what these say of the rest, most are beyond the budget.
    `devices` [2, P] are units of each pool and the price of one; `labels` are `Labels`.
    """
    pools, end, far = len(stages.room), stages.near_in.shape[1] - 1, tables.far
    strides = np.ones(pools + 1, np.int64)
    for p in range(pools):
        strides[p + 1] = strides[p] * (int(devices[0, p]) + 1)
    labels.head[:], labels.slots[:] = -1, -1
    found, steps, number = np.inf, 0, 0
    for a in range(end):
        label = labels.head[a]
        while a == 0 or label >= 0:
            spent, before, first, node, used = 0.0, -1, -1, (-1, 0, 0, 0), 0
            if a:
                spent, used = labels.cost[label], labels.used[label]
                before, first, node = _state(labels.state[label], stages, far.shape[1])
            for c in range(len(stages.pool_of)):
                p, n = stages.pool_of[c], stages.taken[c]
                most_groups = tables.told[p]
                if (first >= 0 and stages.class_of[c] != first) or (a == 0 and ends[0] >= 0 and p != ends[0]):
                    continue
                if node[0] >= 0 and (p != node[0] or n >= stages.room[p] or node[1] + n > stages.room[p]):
                    continue
                if used // strides[p] % (strides[p + 1] // strides[p]) + n > devices[0, p]:
                    continue
                come = stages.far_in[c, a, before] if before >= 0 else (stages.near_in[c, a] if a else 0.0)
                for b in range(a + 1, min(a + stages.width[c, a], end) + 1):
                    alone, own_after = stages.times[stages.offset[c, a] + b - a - 1], stages.whole[c, b] - stages.whole[c, a]
                    if alone + come > longest or own_after > latest:
                        break
                    steps += 1
                    has_tied, left = a <= stages.tied < b, longest - alone - come
                    if has_tied and ends[1] >= 0 and p != ends[1]:
                        continue
                    if (a == 0) != has_tied and own_after + stages.shared_s[c] + (stages.again_s[c, 0] if a else 0.0) > latest:
                        continue
                    cost = spent + prices.rate[c] * (alone + come) + prices.price[c] + prices.after[c, b] - prices.after[c, a]
                    if a > 0 or b < end:
                        cost -= stages.hidden[c, b] - stages.hidden[c, a]
                    again = stages.again_s[c, 1] if has_tied and a else 0.0
                    allowed = allowed_groups(stages.group_s[c, b] - stages.group_s[c, a] + again, latest, most_groups)
                    at, groups, limit = n, stages.groups[c], allowed
                    if node[0] >= 0:
                        at, groups, limit = at + node[1], groups + node[2], min(limit, node[3])
                    if cost > budget or (node[0] >= 0 and groups > limit and limit < most_groups):
                        continue
                    if b == end:
                        rest = 0.0
                        for q in range(pools):
                            rest += devices[1, q] * (devices[0, q] - (used + n * strides[p]) // strides[q] % (strides[q + 1] // strides[q]))
                        if cost + rest <= budget:
                            found = min(found, cost + rest)
                        continue
                    groups = min(groups, most_groups)
                    if n < stages.room[p] and at < stages.room[p] and stages.near_out[c, b] <= left:
                        more = cost + prices.rate[c] * stages.near_out[c, b]
                        if more + tables.near[b, p, at, groups, limit] <= budget:
                            state = far.shape[1] ** 2 + _node_state(p, at, groups, limit, stages)
                            number = _kept(b, state, used + n * strides[p], more, labels, number)
                    if tables.top[c, b] < 0 or cost + tables.behind[c, b, tables.top[c, b]] > budget:
                        continue
                    for i in range(far.shape[1]):
                        e = stages.by_out[c, b, i]
                        go = stages.far_out[c, b, e]
                        if go > left:
                            break
                        if cost + prices.rate[c] * go + far[b, stages.class_of[c], e] <= budget:
                            state = stages.class_of[c] * far.shape[1] + e
                            number = _kept(b, state, used + n * strides[p], cost + prices.rate[c] * go, labels, number)
                if steps > most or number + far.shape[1] * end >= len(labels.cost):
                    return -np.inf, steps
            if a == 0:
                break
            label = labels.next[label]
    return found, steps


@njit(cache=True, nogil=True)
def _node_state(pool, at, groups, limit, stages):  # type: ignore[no-untyped-def]
    """One number for how a node is taken."""
    told = stages.most_groups + 1
    return ((pool * stages.room.max() + at) * told + groups) * told + limit


@njit(cache=True, nogil=True)
def _state(state, stages, classes):  # type: ignore[no-untyped-def]
    """The sizes of the stages before and behind a cut, and (pool, units, groups, limit) of the node that both lie in; -1 for none."""
    if state < classes**2:
        return state // classes, state % classes, (-1, 0, 0, 0)
    told, state = stages.most_groups + 1, state - classes**2
    place = state // told**2
    return -1, -1, (place // stages.room.max(), place % stages.room.max(), state // told % told, state % told)


@njit(cache=True, nogil=True)
def _kept(cut, state, used, cost, labels, number):  # type: ignore[no-untyped-def]
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
