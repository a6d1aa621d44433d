"""The compiled loop behind bounds of several kinds of devices: the cheapest stages of a chain, which know their neighbours.

In these loops a is the cut at which a stage begins, b that at which it ends, and c its option.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numba import njit

from penstock.costs.table import Floats
from penstock.kernels import borrowing
from penstock.search.space.stage_costs import Ints

if TYPE_CHECKING:
    from penstock.search.partition.neighbour_stages import NeighbourStages, NeighbourTables, StagePrices

__all__ = ["StageLimits", "allowed_groups", "can_hold_ends", "cheapest_stages", "stage_cost", "tiny", "warm"]


class StageLimits(NamedTuple):
    """The limits that `cheapest_stages` keeps to."""

    longest: float
    latest: float
    ends: Ints


class _Stage(NamedTuple):
    """A stage, and what may be behind it."""

    option: int
    first: int
    last: int
    cost: float
    """Without messages."""
    spare: float
    """Time that is left for its messages."""
    allowed: int
    """Groups that may sum gradients on its network for it to end in time, its own among them."""
    stays: bool
    """Whether the stage behind it may lie in the same node."""
    in_node: float
    """Cost of all behind it if the next stage lies in the same node and no other was there before, with the message."""
    rest: float
    """Least cost of all behind it."""


class _Begun(NamedTuple):
    """The cheapest stages from one cut on whose first has one option, by the size of the stage elsewhere that is before them."""

    cost: Floats
    """[K] without the message from that stage."""
    last: Ints
    """[K] where the first of them ends."""
    next_size: Ints
    """[K] the size of the stage elsewhere behind it, -1 where it lies in its node or there is none."""


@njit(cache=True, nogil=True)
def cheapest_stages(stages, prices, longest, latest, ends, tables, places):  # type: ignore[no-untyped-def]
    """Least cost of a chain in stages that take at most `longest`, and at most `latest` after the last micro-batch; their number, which is
    0 where there are none; and how many stages were looked at.

    A stage (`NeighbourStages`) costs its time less what is hidden, and what `StagePrices` says. `ends` are the pools of the first op and
    of op `stages.tied`, or less than 0 for any. `tables` (`NeighbourTables`) are filled from the last cut to the first. `places` [cuts, 5]
    receives the cheapest stages: first and last cut, option, and the sizes of the stages elsewhere that are before and behind it, -1 where
    it has none or they lie in its node.
    """
    sizes = tables.far.shape[1]
    begun = _Begun(np.zeros(sizes), np.zeros(sizes, np.int64), np.zeros(sizes, np.int64))
    return _fill_tables(stages, prices, StageLimits(longest, latest, ends), tables, begun, places)


@borrowing
def _fill_tables(stages, prices, limits, tables, begun, places):  # type: ignore[no-untyped-def]
    """`cheapest_stages`, with room for what begins at a cut."""
    end = stages.near_in.shape[1] - 1
    tables.far[:], tables.near[end], tables.top[:, end] = np.inf, np.inf, -1  # nothing is behind the end
    _tell_groups_apart(stages, limits, tables.groups_apart)
    least, first_option, first_last, first_next, looked = np.inf, 0, 0, 0, 0
    for a in range(end - 1, -1, -1):
        for pool in range(len(stages.node_units)):
            apart = tables.groups_apart[pool]
            tables.near[a, pool, :, : apart + 1, : apart + 1] = np.inf
        for c in range(len(stages.pool_of)):
            if a == 0 and limits.ends[0] >= 0 and stages.pool_of[c] != limits.ends[0]:
                continue
            looked += _begin_stages(a, c, stages, prices, limits, tables, begun)
            if a > 0:
                _fill_far(a, c, stages, prices, tables, begun)
            elif begun.cost[0] < least:
                least, first_option, first_last, first_next = begun.cost[0], c, begun.last[0], begun.next_size[0]
        _allow_more_groups(a, stages, tables)
        _fill_behind(a, stages, prices, limits, tables)
    if least == np.inf:
        return least, 0, looked
    return least, _write_places(first_option, first_last, first_next, stages, limits, tables, places), looked


@borrowing
def _begin_stages(a, c, stages, prices, limits, tables, begun):  # type: ignore[no-untyped-def]
    """Tries all stages of an option from a cut on, behind stages elsewhere and in their node; returns how many were looked at."""
    end, widest = stages.near_in.shape[1] - 1, tables.far.shape[1] - 1 if a else 0
    while a and widest >= 0 and stages.far_in[c, a, stages.by_in[c, a, widest]] > limits.longest:
        widest -= 1
    begun.cost[:] = np.inf
    furthest = a
    while furthest < min(a + stages.width[c, a], end):
        too_long = stages.times[stages.offset[c, a] + furthest - a] > limits.longest
        if too_long or stages.after_s[c, furthest + 1] - stages.after_s[c, a] > limits.latest:
            break
        furthest += 1
    looked = furthest - a
    for b in range(furthest, a, -1):  # the longest, which are often the best, first
        if can_hold_ends(a, b, c, stages, limits.latest, limits.ends):
            stage = _stage(a, b, c, stages, prices, limits, tables)
            _follow_elsewhere(stage, stages, tables, widest, begun)
            if a > 0:
                looked += _follow_in_node(stage, stages, prices, tables)
    return looked


@borrowing
def can_hold_ends(a, b, c, stages, latest, ends):  # type: ignore[no-untyped-def]
    """Whether a stage may be where the ends of the shared weight are to lie, and sums its gradient in time if it has one end alone."""
    has_tied = a <= stages.tied < b
    if has_tied and ends[1] >= 0 and stages.pool_of[c] != ends[1]:
        return False
    if (a == 0) == has_tied:
        return True
    own_after = stages.after_s[c, b] - stages.after_s[c, a]
    return own_after + stages.shared_s[c] + (stages.tied_copy_s[c, 0] if a else 0.0) <= latest


@borrowing
def stage_cost(a, b, c, stages, prices, time, spent):  # type: ignore[no-untyped-def]
    """What a stage that takes so much time costs, added to what was spent before."""
    cost = spent + prices.rate[c] * time + prices.price[c] + prices.after[c, b] - prices.after[c, a]
    if a > 0 or b < stages.near_in.shape[1] - 1:  # with one stage there is nothing to fill
        cost -= stages.hidden[c, b] - stages.hidden[c, a]
    return cost


@borrowing
def allowed_groups(a, b, c, stages, latest, most):  # type: ignore[no-untyped-def]
    """How many groups of ranks may sum gradients over the network of a stage at once for it to end in time, up to `most`."""
    each_s = _group_s(a, b, c, stages)
    return most if each_s * most <= latest else int(latest / each_s * (1 + 1e-12))


@borrowing
def _group_s(a, b, c, stages):  # type: ignore[no-untyped-def]
    """What one of a stage's groups takes to sum gradients, if no other uses the network."""
    return stages.group_s[c, b] - stages.group_s[c, a] + (stages.tied_copy_s[c, 1] if 0 < a <= stages.tied < b else 0.0)


@borrowing
def _tell_groups_apart(stages, limits, apart):  # type: ignore[no-untyped-def]
    """How many groups on one network of each pool are told apart: only one where no stage is kept from being there with all others."""
    apart[:] = 1
    for c in range(len(stages.pool_of)):
        for a in range(stages.offset.shape[1]):
            b = a + stages.width[c, a]
            while b > a + 1 and stages.times[stages.offset[c, a] + b - a - 1] > limits.longest:
                b -= 1
            if _group_s(a, b, c, stages) * stages.max_groups > limits.latest:
                apart[stages.pool_of[c]] = stages.max_groups
                break


@borrowing
def _stage(a, b, c, stages, prices, limits, tables):  # type: ignore[no-untyped-def]
    """The stage, with what is known of all behind it."""
    pool, units = stages.pool_of[c], stages.units[c]
    time, apart = stages.times[stages.offset[c, a] + b - a - 1], tables.groups_apart[stages.pool_of[c]]
    cost, allowed = stage_cost(a, b, c, stages, prices, time, 0.0), allowed_groups(a, b, c, stages, limits.latest, apart)
    at_end, has_room, in_node = b == stages.near_in.shape[1] - 1, units < stages.node_units[pool], np.inf
    if has_room:
        in_node = tables.near[b, pool, units, min(stages.groups[c], apart), allowed] + prices.rate[c] * stages.near_out[c, b]
    best_elsewhere = tables.behind[c, b, tables.top[c, b]] if tables.top[c, b] >= 0 else np.inf
    rest = 0.0 if at_end else min(best_elsewhere, in_node)
    return _Stage(c, a, b, cost, limits.longest - time, allowed, has_room and not at_end, in_node, rest)


@borrowing
def _follow_elsewhere(stage, stages, tables, widest, begun):  # type: ignore[no-untyped-def]
    """Notes in `begun` where a stage is the best behind stages elsewhere.

    Sizes of the stage before come with the longest message first, which leaves the least time for the one to the stage behind. Where there
    is time for the best of these, shorter ones change nothing: `_fill_far` takes the best of all longer ones for them.
    """
    c, a, b = stage.option, stage.first, stage.last
    i, e = -1, widest
    while e >= 0 and stage.cost + stage.rest < begun.cost[e]:
        come = stages.far_in[c, a, stages.by_in[c, a, e]] if a else 0.0
        if come <= stage.spare:
            while i < tables.top[c, b] and stages.far_out[c, b, stages.by_out[c, b, i + 1]] <= stage.spare - come:
                i += 1
            value, next_size = (tables.behind[c, b, i], tables.behind_choice[c, b, i]) if i >= 0 else (np.inf, -1)
            if b == stages.near_in.shape[1] - 1:
                value = 0.0
            elif stage.stays and stages.near_out[c, b] <= stage.spare - come and stage.in_node < value:
                value, next_size = stage.in_node, -1
            if stage.cost + value < begun.cost[e]:
                begun.cost[e], begun.last[e], begun.next_size[e] = stage.cost + value, b, next_size
            if i == tables.top[c, b] and (not stage.stays or stages.near_out[c, b] <= stage.spare - come):
                break
        e -= 1


@borrowing
def _follow_in_node(stage, stages, prices, tables):  # type: ignore[no-untyped-def]
    """Notes in `tables.near` where a stage is the best behind one in its node; returns how many ways to be there were looked at."""
    c, a, b, allowed = stage.option, stage.first, stage.last, stage.allowed
    pool, units, own, looked = stages.pool_of[c], stages.units[c], stages.groups[c], 0
    room, apart = stages.node_units[pool] - units, tables.groups_apart[pool]
    spare, cost = stage.spare - stages.near_in[c, a], stage.cost + prices.rate[c] * stages.near_in[c, a]
    if room <= 0 or spare < 0 or (allowed <= own and allowed < apart) or cost + stage.rest >= _known_in_node(stage, stages, tables):
        return 0
    elsewhere, next_size = _cheapest_elsewhere(b, c, spare, stages, tables)
    stays, go = stage.stays and stages.near_out[c, b] <= spare, prices.rate[c] * stages.near_out[c, b]
    for taken in range(1, room + 1):
        goes_on = stays and taken < room
        for others in range(1, min(taken * stages.unit_devices[pool], apart) + 1):
            if allowed < apart and others + own > allowed:
                break
            looked += 1
            groups, least = min(others + own, apart), elsewhere
            if goes_on:
                least = min(elsewhere, tables.near[b, pool, taken + units, groups, allowed] + go)
            if cost + least >= tables.near[a, pool, taken, others, groups]:  # where fewest may be there, which do for more
                continue
            for limit in range(groups, allowed + 1):
                value, towards = elsewhere, next_size
                if goes_on and tables.near[b, pool, taken + units, groups, limit] + go < value:
                    value, towards = tables.near[b, pool, taken + units, groups, limit] + go, -1
                if cost + value < tables.near[a, pool, taken, others, limit]:
                    tables.near[a, pool, taken, others, limit] = cost + value
                    choice = tables.near_choice[a, pool, taken, others, limit]
                    choice[0], choice[1], choice[2] = c, b, towards
    return looked


@borrowing
def _known_in_node(stage, stages, tables):  # type: ignore[no-untyped-def]
    """The most that stages already noted in `tables.near` cost wherever a stage may be: where it costs as much, it is best nowhere.

    What does where most is taken does anywhere; but where more groups count as so many, any may be behind this stage, and elsewhere only
    as many as it has.
    """
    c, allowed = stage.option, stage.allowed
    pool, own = stages.pool_of[c], stages.groups[c]
    room, apart, unit = stages.node_units[pool] - stages.units[c], tables.groups_apart[pool], stages.unit_devices[pool]
    fullest = min(room * unit, apart)
    if allowed < apart:
        fullest = min(fullest, allowed - own)
    known = tables.near[stage.first, pool, room, fullest, min(fullest + own, apart)]
    if own < stages.units[c] * unit and own + 1 < apart <= fullest + own:
        known = max(known, tables.near[stage.first, pool, room, apart - own - 1, apart - 1])
    return known


@borrowing
def _cheapest_elsewhere(b, c, spare, stages, tables):  # type: ignore[no-untyped-def]
    """Cost of all behind a stage whose messages to a stage elsewhere take no more than `spare`, and the size of that stage."""
    if b == stages.near_in.shape[1] - 1:
        return 0.0, -1
    i = tables.top[c, b]
    while i >= 0 and stages.far_out[c, b, stages.by_out[c, b, i]] > spare:
        i -= 1
    if i < 0:
        return np.inf, -1
    return tables.behind[c, b, i], tables.behind_choice[c, b, i]


@borrowing
def _fill_far(a, c, stages, prices, tables, begun):  # type: ignore[no-untyped-def]
    """What begins at a cut with an option, for stages elsewhere before it: where one leaves time enough, so does any with a shorter
    message."""
    best, k = -1, stages.size_of[c]
    for i in range(len(begun.cost) - 1, -1, -1):
        if best < 0 or begun.cost[i] < begun.cost[best]:
            best = i
        e = stages.by_in[c, a, i]
        cost = begun.cost[best] + prices.rate[c] * stages.far_in[c, a, e]
        if cost < tables.far[a, e, k]:
            tables.far[a, e, k] = cost
            choice = tables.far_choice[a, e, k]
            choice[0], choice[1], choice[2] = c, begun.last[best], begun.next_size[best]


@borrowing
def _allow_more_groups(a, stages, tables):  # type: ignore[no-untyped-def]
    """Where more groups may be in a node, stages with fewer are possible as well."""
    for pool in range(len(stages.node_units)):
        apart = tables.groups_apart[pool]
        for taken in range(1, stages.node_units[pool]):
            for others in range(1, min(taken * stages.unit_devices[pool], apart) + 1):
                near, choice = tables.near[a, pool, taken, others], tables.near_choice[a, pool, taken, others]
                for limit in range(others + 1, apart + 1):
                    if near[limit - 1] < near[limit]:
                        near[limit] = near[limit - 1]
                        for i in range(3):
                            choice[limit, i] = choice[limit - 1, i]


@borrowing
def _fill_behind(a, stages, prices, limits, tables):  # type: ignore[no-untyped-def]
    """What is behind a stage of each option that ends at a cut, of all whose messages take no longer than one of them."""
    for c in range(len(stages.size_of)):
        value, next_size, tables.top[c, a] = np.inf, -1, -1
        for i in range(tables.far.shape[1]):
            e = stages.by_out[c, a, i]
            if stages.far_out[c, a, e] > limits.longest:
                break
            cost = prices.rate[c] * stages.far_out[c, a, e] + tables.far[a, stages.size_of[c], e]
            if cost < value:
                value, next_size, tables.top[c, a] = cost, e, i
            tables.behind[c, a, i], tables.behind_choice[c, a, i] = value, next_size


@borrowing
def _write_places(c, b, next_size, stages, limits, tables, places):  # type: ignore[no-untyped-def]
    """Puts the stages that the tables chose into `places`, from the first one's option, end and next size on; returns their number."""
    end, a, before, taken, groups, limit, number = stages.near_in.shape[1] - 1, 0, -1, 0, 0, stages.max_groups, 0
    while True:
        place = places[number]
        place[0], place[1], place[2], place[3], place[4] = a, b, c, before, next_size
        number += 1
        if b == end:
            return number
        pool, size = stages.pool_of[c], stages.size_of[c]
        apart = tables.groups_apart[pool]
        if before >= 0 or number == 1:
            taken, groups, limit = 0, 0, apart
        taken, groups = taken + stages.units[c], min(groups + stages.groups[c], apart)
        limit = min(limit, allowed_groups(a, b, c, stages, limits.latest, apart))
        a, before = b, size if next_size >= 0 else -1
        choice = tables.far_choice[a, size, next_size] if next_size >= 0 else tables.near_choice[a, pool, taken, groups, limit]
        c, b, next_size = int(choice[0]), int(choice[1]), int(choice[2])


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
