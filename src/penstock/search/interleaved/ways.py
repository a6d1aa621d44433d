"""Ways to interleave: equal groups of devices, each with several chunks of the model, and what no such pipeline can be faster than.

A pipeline of G groups with v chunks each takes m · slowest + the others / v, where a group takes the sum of its chunks. That holds for
chunks of about equal time alone, so cuts stay near where equal ones would be (`balanced_cuts`).

The first bound: the sum over all groups is that of all ops and of v · G - 1 messages, and the slowest takes at least the average. All
devices together hold the state of every op, and what it keeps as often as the chunk it may be in at least. A sharper one looks at every
place of every cut (`cuts_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from penstock.costs.table import Floats
from penstock.schedules.rules import CHUNKED_SCHEDULE, SCHEDULES
from penstock.search.interleaved.balanced_cuts import cut_windows
from penstock.search.interleaved.cuts_bound import cuts_bound_s
from penstock.search.interleaved.group_links import GroupLinks, links_of
from penstock.search.space.families import CHUNKS, MAX_DEPTH, PlanFamily, Subspace
from penstock.search.space.stage_costs import Ints, StageOption, sums_before

__all__ = ["Interleaving", "interleaved_s", "interleavings", "side_by_side"]


def interleaved_s(sum_s: float, slowest_s: float, count: int, chunks: int) -> float:
    """The pipeline of groups whose times for one micro-batch, all chunks included, have this sum and this maximum."""
    return (count - 1 / chunks) * slowest_s + sum_s / chunks


@dataclass(frozen=True)
class Interleaving:
    """One way to interleave: an option for all groups, their number, and the chunks of each."""

    family: PlanFamily
    option: StageOption
    groups: int
    chunks: int
    bound_s: float
    """What no such plan can be below."""

    def __str__(self) -> str:
        return f"{self.family}, {self.chunks} chunks"

    @property
    def subspace(self) -> Subspace:
        """The plans of this way, as a proof names them."""
        return Subspace((self.option,), self.groups * self.chunks, fine=True, equal=True)

    @cached_property
    def before(self) -> Floats:
        """[N + 1] time of the ops before each."""
        return _before(self.family, self.option)

    @cached_property
    def orders(self) -> tuple[tuple[bool, GroupLinks], ...]:
        """The orders of ranks and their links; one where it makes no difference."""
        family, (low, high) = self.family, self.windows
        found = tuple(
            (together, links_of(family, self.option, self.groups, together, int(low[1]), int(high[-2])))
            for together in ((False, True) if family.replicas > 1 else (False,))
        )
        return found[:1] if found[0][1].like(found[-1][1]) else found

    @cached_property
    def windows(self) -> tuple[Ints, Ints]:
        """[chunks + 1] the first and the last op at which each cut may be."""
        return cut_windows(self.before, self.groups * self.chunks)

    def order_bound_s(self, links: GroupLinks) -> float:
        """What no plan in this order can be below."""
        return cuts_bound_s(self.before, links, *self.windows, self.family.count, self.chunks)

    def sharper_bound_s(self) -> float:
        """The bound with whole ops, and where messages and gradients meet the links between the devices that they go between."""
        if not np.isfinite(_work_bound_s(self.family, self.option, self.groups, self.chunks)):
            return np.inf
        return min(self.order_bound_s(links) for _, links in self.orders)


def interleavings(family: PlanFamily) -> Iterator[Interleaving]:
    """All ways of a family on devices of one kind whose micro-batches come in whole rounds, as the schedule needs them to stay busy."""
    if len(family.pools) > 1 or CHUNKED_SCHEDULE not in family.request.schedules:
        return
    for option in (variant for plain in family.options for variant in family.variants(plain)):
        groups, rest = divmod(family.num_devices, option.num_devices)
        for chunks in CHUNKS:
            deep = 2 <= groups <= MAX_DEPTH and groups * chunks <= family.request.model.num_ops
            if not rest and deep and family.count % groups == 0:
                yield Interleaving(family, option, groups, chunks, _bound_s(family, option, groups, chunks))


def _bound_s(family: PlanFamily, option: StageOption, groups: int, chunks: int) -> float:
    """The bound wherever the groups lie; they cross the fewest nodes side by side."""
    enter, leave = side_by_side(family, option, groups)
    low, high = cut_windows(_before(family, option), groups * chunks)
    messages_s, after_s = 0.0, float(family.prices.updates.after_s(option).sum()) / groups
    for cut in range(1, groups * chunks):
        at = slice(int(low[cut]), int(high[cut]) + 1)
        messages_s += float((enter[cut % groups, at] + leave[(cut - 1) % groups, at]).min())
    return messages_s * interleaved_s(1.0, 1.0 / groups, family.count, chunks) + after_s + _work_bound_s(family, option, groups, chunks)


def _work_bound_s(family: PlanFamily, option: StageOption, groups: int, chunks: int) -> float:
    """A bound from the ops alone; infinite where all devices together cannot hold their weights and what they keep."""
    numbers = family.prices.tables.chain[0]
    state, kept, _ = family.prices.memory.op_shares(option)
    held = _least_held(_before(family, option), groups, chunks, family.count)
    if float(state[numbers].sum() + held @ kept[numbers].sum(axis=1)) > groups:
        return np.inf
    return float(family.prices.passes.times(option)[1].sum()) * interleaved_s(1.0, 1.0 / groups, family.count, chunks)


def _least_held(before: Floats, groups: int, chunks: int, count: int) -> Ints:
    """[N] micro-batches of which each op's chunk holds what it keeps, at least, wherever cuts may be."""
    low, high = cut_windows(before, groups * chunks)
    held = _in_flight(groups, chunks, count)
    least = np.full(len(before) - 1, np.iinfo(np.int64).max)
    for chunk in range(groups * chunks):
        ops = slice(int(low[chunk]), int(high[chunk + 1]))
        least[ops] = np.minimum(least[ops], held[chunk % groups][chunk // groups])
    return least


@cache
def _in_flight(groups: int, chunks: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that each chunk of each group holds at once; counted over two rounds, after which it is steady."""
    return tuple(SCHEDULES[CHUNKED_SCHEDULE].in_flight(groups, group, min(count, 2 * groups), chunks) for group in range(groups))


def side_by_side(family: PlanFamily, option: StageOption, groups: int) -> tuple[Floats, Floats]:
    """[G, N + 1] time of the message that a chunk of each group gets before an op, and of the one after the op before.

    Groups lie side by side, which crosses the fewest nodes.
    """
    costs, pool, size = family.prices.costs(option), family.pools[0], option.num_devices
    several = pool.num_devices > pool.per_node
    arrives = [int(several and group * size % pool.per_node == 0) for group in range(groups)]
    departs = [int(several and (group + 1) * size % pool.per_node == 0) for group in range(groups)]
    return costs.enter[arrives], costs.leave[departs]


def _before(family: PlanFamily, option: StageOption) -> Floats:
    return np.asarray(sums_before([family.prices.passes.times(option)[1]])[0])
