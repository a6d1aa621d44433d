"""The compiled loop behind bounds of several kinds of devices: the cheapest stages of a chain, which know their neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from penstock.search.partition.neighbour_stages import NeighbourStages, NeighbourTables, StagePrices

__all__ = ["allowed_groups", "cheapest_stages", "tiny", "warm"]


@njit(cache=True, nogil=True)
def cheapest_stages(stages, prices, longest, latest, ends, tables, places):  # type: ignore[no-untyped-def]
    """Least cost of a chain in stages that take at most `longest`, and at most `latest` after the last micro-batch; their number, which is
    0 where there are none; and how many stages were looked at.

    A stage (`NeighbourStages`) costs its time less what is hidden, and what `StagePrices` says. `ends` are the pools of the first op and
    of op `stages.tied`, or less than 0 for any. `tables` (`NeighbourTables`) are filled from the last cut to the first. `places` [cuts, 5]
    receives the cheapest stages: first and last cut, option, and the sizes of the stages elsewhere that are before and behind it, -1 where
    it has none or they lie in its node.
    """
    offset, width, times, hidden, whole, shared_s, near_in, near_out, far_in, far_out, by_in, by_out = stages[:12]
    pool_of, class_of, taken, room, tied, groups, group_s, grain, _, again_s = stages[12:]
    price, rate, after = prices
    near, far, near_choice, far_choice, behind, behind_choice, top, told = tables
    end, num_classes = near_in.shape[1] - 1, far.shape[1]
    far[:], near[end], top[:, end] = np.inf, np.inf, -1  # nothing is behind the end
    _tell_apart(stages, longest, latest, told)
    best, best_b, best_right = np.zeros(num_classes), np.zeros(num_classes, np.int64), np.zeros(num_classes, np.int64)
    least, start, looked = np.inf, np.zeros(3, np.int64), 0
    for a in range(end - 1, -1, -1):
        for p in range(len(room)):
            near[a, p, :, : told[p] + 1, : told[p] + 1] = np.inf
        for c in range(len(pool_of)):
            p, k, n, own = pool_of[c], class_of[c], taken[c], groups[c]
            most_groups = told[p]
            if a == 0 and ends[0] >= 0 and p != ends[0]:
                continue
            inside, widest = n < room[p], num_classes - 1 if a else 0
            while a and widest >= 0 and far_in[c, a, by_in[c, a, widest]] > longest:
                widest -= 1
            best[:] = np.inf
            reach = a
            while reach < min(a + width[c, a], end):
                if times[offset[c, a] + reach - a] > longest or whole[c, reach + 1] - whole[c, a] > latest:
                    break
                reach += 1
            looked += reach - a
            for b in range(reach, a, -1):  # the longest, which are often the best, first
                alone, own_after = times[offset[c, a] + b - a - 1], whole[c, b] - whole[c, a]
                has_tied = a <= tied < b
                if has_tied and ends[1] >= 0 and p != ends[1]:
                    continue
                if (a == 0) != has_tied and own_after + shared_s[c] + (again_s[c, 0] if a else 0.0) > latest:
                    continue
                cost, left = rate[c] * alone + price[c] + after[c, b] - after[c, a], longest - alone
                if a > 0 or b < end:  # with one stage there is nothing to fill
                    cost -= hidden[c, b] - hidden[c, a]
                again = again_s[c, 1] if has_tied and a else 0.0
                allowed = allowed_groups(group_s[c, b] - group_s[c, a] + again, latest, most_groups)
                stay, there = inside and b < end, np.inf
                if inside:
                    there = near[b, p, n, min(own, most_groups), allowed] + rate[c] * near_out[c, b]
                rest = 0.0 if b == end else min(behind[c, b, top[c, b]] if top[c, b] >= 0 else np.inf, there)
                # Of stages elsewhere before it, those with the shortest messages first; all that leave time for the best behind it are
                # told by the last of them.
                i, e = -1, widest
                while e >= 0 and cost + rest < best[e]:
                    come = far_in[c, a, by_in[c, a, e]] if a else 0.0
                    if come <= left:
                        while i < top[c, b] and far_out[c, b, by_out[c, b, i + 1]] <= left - come:
                            i += 1
                        value, right = (behind[c, b, i], behind_choice[c, b, i]) if i >= 0 else (np.inf, -1)
                        if b == end:
                            value = 0.0
                        elif stay and near_out[c, b] <= left - come and there < value:
                            value, right = there, -1
                        if cost + value < best[e]:
                            best[e], best_b[e], best_right[e] = cost + value, b, right
                        if i == top[c, b] and (not stay or near_out[c, b] <= left - come):
                            break
                    e -= 1
                left -= near_in[c, a]
                cost += rate[c] * near_in[c, a]
                if a == 0 or not inside or left < 0 or (allowed <= own and allowed < most_groups):
                    continue
                fullest = min((room[p] - n) * grain[p], most_groups)
                if allowed < most_groups:
                    fullest = min(fullest, allowed - own)
                # What does where most is taken does anywhere; but where more groups count as so many, any may be behind this stage, and
                # elsewhere only as many as it has.
                beaten = near[a, p, room[p] - n, fullest, min(fullest + own, most_groups)]
                if own < n * grain[p] and own + 1 < most_groups <= fullest + own:
                    beaten = max(beaten, near[a, p, room[p] - n, most_groups - own - 1, most_groups - 1])
                if cost + rest >= beaten:
                    continue
                value, right = np.inf, -1
                if b == end:
                    value = 0.0
                else:
                    i = top[c, b]
                    while i >= 0 and far_out[c, b, by_out[c, b, i]] > left:
                        i -= 1
                    if i >= 0:
                        value, right = behind[c, b, i], behind_choice[c, b, i]
                stay = stay and near_out[c, b] <= left
                for at in range(1, room[p] - n + 1):
                    goes_on = stay and at + n < room[p]
                    for g in range(1, min(at * grain[p], most_groups) + 1):
                        if allowed < most_groups and g + own > allowed:
                            break
                        looked += 1
                        more = min(g + own, most_groups)
                        most_there = value
                        if goes_on:
                            most_there = min(value, near[b, p, at + n, more, allowed] + rate[c] * near_out[c, b])
                        if cost + most_there >= near[a, p, at, g, more]:  # where fewest may be there, which do for more
                            continue
                        for limit in range(more, allowed + 1):
                            there, towards = value, right
                            if goes_on and near[b, p, at + n, more, limit] + rate[c] * near_out[c, b] < there:
                                there, towards = near[b, p, at + n, more, limit] + rate[c] * near_out[c, b], -1
                            if cost + there < near[a, p, at, g, limit]:
                                near[a, p, at, g, limit] = cost + there
                                near_choice[a, p, at, g, limit, 0] = c
                                near_choice[a, p, at, g, limit, 1] = b
                                near_choice[a, p, at, g, limit, 2] = towards
            if a == 0:
                if best[0] < least:
                    least = best[0]
                    start[0], start[1], start[2] = c, best_b[0], best_right[0]
                continue
            last = -1
            for i in range(num_classes - 1, -1, -1):
                if last < 0 or best[i] < best[last]:
                    last = i
                e = by_in[c, a, i]
                if best[last] + rate[c] * far_in[c, a, e] < far[a, e, k]:
                    far[a, e, k] = best[last] + rate[c] * far_in[c, a, e]
                    far_choice[a, e, k, 0], far_choice[a, e, k, 1], far_choice[a, e, k, 2] = c, best_b[last], best_right[last]
        _allow_more(a, stages, near, near_choice, told)
        _fill_behind(a, stages, rate, longest, tables)
    return least, _followed(start, stages, latest, tables, places) if least < np.inf else 0, looked


@njit(cache=True, nogil=True)
def _tell_apart(stages, longest, latest, told):  # type: ignore[no-untyped-def]
    """How many groups on one network of each pool are told apart: only one where no stage is kept from being there with all others."""
    told[:] = 1
    for c in range(len(stages.pool_of)):
        for a in range(stages.offset.shape[1]):
            b = a + stages.width[c, a]
            while b > a + 1 and stages.times[stages.offset[c, a] + b - a - 1] > longest:
                b -= 1
            each_s = stages.group_s[c, b] - stages.group_s[c, a] + (stages.again_s[c, 1] if 0 < a <= stages.tied < b else 0.0)
            if each_s * stages.most_groups > latest:
                told[stages.pool_of[c]] = stages.most_groups
                break


@njit(cache=True, nogil=True)
def allowed_groups(each_s, latest, most):  # type: ignore[no-untyped-def]
    """How many groups of ranks, of which one alone would take so long, may sum gradients over one network at once, up to `most`."""
    return most if each_s * most <= latest else int(latest / each_s * (1 + 1e-12))


@njit(cache=True, nogil=True)
def _allow_more(a, stages, near, near_choice, told):  # type: ignore[no-untyped-def]
    """Where more groups may be in a node, stages with fewer are possible as well."""
    room, grain = stages.room, stages.grain
    for p in range(len(room)):
        for at in range(1, room[p]):
            for g in range(1, min(at * grain[p], told[p]) + 1):
                for limit in range(g + 1, told[p] + 1):
                    if near[a, p, at, g, limit - 1] < near[a, p, at, g, limit]:
                        near[a, p, at, g, limit] = near[a, p, at, g, limit - 1]
                        for i in range(3):
                            near_choice[a, p, at, g, limit, i] = near_choice[a, p, at, g, limit - 1, i]


@njit(cache=True, nogil=True)
def _fill_behind(a, stages, rate, longest, tables):  # type: ignore[no-untyped-def]
    """What is behind a stage of each option that ends at a cut, of all whose messages take no longer than one of them."""
    far_out, by_out, class_of = stages.far_out, stages.by_out, stages.class_of
    far, behind, behind_choice, top = tables.far, tables.behind, tables.behind_choice, tables.top
    for c in range(len(class_of)):
        value, right, top[c, a] = np.inf, -1, -1
        for i in range(far.shape[1]):
            e = by_out[c, a, i]
            if far_out[c, a, e] > longest:
                break
            if rate[c] * far_out[c, a, e] + far[a, class_of[c], e] < value:
                value, right, top[c, a] = rate[c] * far_out[c, a, e] + far[a, class_of[c], e], e, i
            behind[c, a, i], behind_choice[c, a, i] = value, right


@njit(cache=True, nogil=True)
def _followed(start, stages, latest, tables, places):  # type: ignore[no-untyped-def]
    """Puts the stages that the tables chose into `places`, from the first one's option, end and next size on; returns their number."""
    end, (c, b, right) = stages.near_in.shape[1] - 1, start
    a, before, at, number, shared, limit = 0, -1, 0, 0, 0, stages.most_groups
    while True:
        places[number] = a, b, c, before, right
        number += 1
        if b == end:
            return number
        p, k = stages.pool_of[c], stages.class_of[c]
        most = tables.told[p]
        if before >= 0 or number == 1:
            at, shared, limit = 0, 0, most
        at, shared = at + stages.taken[c], min(shared + stages.groups[c], most)
        again = stages.again_s[c, 1] if 0 < a <= stages.tied < b else 0.0
        limit = min(limit, allowed_groups(stages.group_s[c, b] - stages.group_s[c, a] + again, latest, most))
        a, before = int(b), k if right >= 0 else -1
        if right >= 0:
            c, b, right = tables.far_choice[a, k, right]
        else:
            c, b, right = tables.near_choice[a, p, at, shared, limit]


def tiny() -> tuple[NeighbourStages, StagePrices, NeighbourTables]:
    """Arguments of the types that kernels are called with: one op and one option."""
    from penstock.search.partition.neighbour_stages import NeighbourStages, NeighbourTables, StagePrices

    one, two, far = np.ones((1, 1), np.int64), np.zeros((1, 2)), np.zeros((1, 2, 1))
    ones, none, classes = np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros((1, 2, 1), np.int64)
    stages = NeighbourStages(
        0 * one, one, np.ones(1), two, two, np.zeros(1), two, two, far, far, classes, classes, none, none, ones, ones, -1, ones, two,
        ones, 1, two,
    )  # fmt: skip
    return stages, StagePrices(np.ones(1), np.ones(1), two), NeighbourTables.of(2, 1, 1, 1, 1, 1)


def warm() -> None:
    """Compiles the kernel for the types it is called with."""
    stages, prices, tables = tiny()
    cheapest_stages(stages, prices, 9.0, 9.0, np.array([-1, -1]), tables, np.zeros((2, 5), np.int64))
