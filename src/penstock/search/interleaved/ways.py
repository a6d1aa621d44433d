"""Interleaved pipelines with cuts of their own: equal groups of devices, each with several chunks whose sum is what counts.

A pipeline of G groups with v chunks each takes m · slowest + the others / v, where a group takes the sum of its chunks. That holds for
chunks of about equal time alone, so cuts stay within a tenth of a chunk, or an op, of where equal ones would be; within that, they are
moved until the groups' sums are nearly equal. Ways whose ops do not divide so evenly that the simulator agrees with the formula are left
out, and so are plans that it finds slower. Nothing is recomputed: where only some blocks are, chunks are no longer equal.

The first bound: the sum over all groups is that of all ops and of v · G - 1 messages, and the slowest takes at least the average. All
devices together hold the state of every op, and what it keeps as often as the chunk it may be in at least. A sharper one looks at every
place of every cut (`interleaved_bound`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.table import Floats
from penstock.plans.plan import Degrees, Plan, Stage
from penstock.schedules.rules import CHUNKED_SCHEDULE, SCHEDULES, schedule_of
from penstock.search.interleaved.cuts_bound import cuts_bound_s
from penstock.search.interleaved.group_links import Links, links_of
from penstock.search.partition.stages import Blocks, Ints, StageOption
from penstock.search.space.families import CHUNKS, MAX_DEPTH, Family

if TYPE_CHECKING:
    from penstock.timing.estimate import Estimate

__all__ = [
    "Interleaving",
    "balanced_cuts",
    "best_interleaved",
    "divides_evenly",
    "interleavings",
    "sharper_bound_s",
    "simulated_pipeline_s",
]

_MOVES, _LEAST_MOVES = 20_000, 60_000
"""That are tried for each cut, and for all of them."""
_DRAWS, _EVENLY = 6, (0.0, 0.5)
"""How often, and with how much regard to equal chunks: cuts that the formula takes for equally good are not so under the simulator."""
_ESTIMATED = 2
"""Cuts of each order of ranks that are estimated whole."""
_WINDOW = 0.1
"""Of a chunk, by which a cut may be off."""
_HONEST, _EVEN = 1.03, 1.05
"""The simulator may find a plan this much slower than the formula, and chunks that are as equal as ops allow this much slower than equal
ones."""


@dataclass(frozen=True)
class Interleaving:
    """One way to interleave: an option for all groups, their number, and the chunks of each."""

    family: Family
    option: StageOption
    groups: int
    chunks: int
    bound_s: float
    """What no such plan can be below."""

    @cached_property
    def orders(self) -> tuple[tuple[bool, Links], ...]:
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
        return _windows(_before(self.family, self.option), self.groups * self.chunks)

    def order_bound_s(self, links: Links) -> float:
        """What no plan in this order can be below."""
        before = _before(self.family, self.option)
        return cuts_bound_s(before, links, *self.windows, self.family.count, self.chunks)


def interleavings(family: Family) -> Iterator[Interleaving]:
    """All ways of a family on devices of one kind whose micro-batches come in whole rounds, as the schedule needs them to stay busy."""
    if len(family.pools) > 1 or CHUNKED_SCHEDULE not in family.request.schedules:
        return
    for option in (variant for plain in family.options for variant in family.variants(plain)):
        groups, rest = divmod(family.num_devices, option.num_devices)
        for chunks in CHUNKS:
            deep = 2 <= groups <= MAX_DEPTH and groups * chunks <= family.request.model.num_ops
            if not rest and deep and family.count % groups == 0:
                yield Interleaving(family, option, groups, chunks, _bound_s(family, option, groups, chunks))


def _bound_s(family: Family, option: StageOption, groups: int, chunks: int) -> float:
    """The bound wherever the groups lie; they cross the fewest nodes side by side."""
    enter, leave = _messages(family, option, groups)
    low, high = _windows(_before(family, option), groups * chunks)
    messages_s, after_s = 0.0, float(family.after_s(option).sum()) / groups
    for cut in range(1, groups * chunks):
        at = slice(int(low[cut]), int(high[cut]) + 1)
        messages_s += float((enter[cut % groups, at] + leave[(cut - 1) % groups, at]).min())
    return messages_s * _pipeline_s(1.0, 1.0 / groups, family.count, chunks) + after_s + _work_bound_s(family, option, groups, chunks)


def _work_bound_s(family: Family, option: StageOption, groups: int, chunks: int) -> float:
    """Of the ops alone; infinite where all devices together cannot hold their weights and what they keep."""
    numbers = family.chain[0]
    state, kept, _ = family.op_memory(option)
    held = _least_held(_before(family, option), groups, chunks, family.count)
    if float(state[numbers].sum() + held @ kept[numbers].sum(axis=1)) > groups:
        return np.inf
    return float(family.times(option)[1].sum()) * _pipeline_s(1.0, 1.0 / groups, family.count, chunks)


def sharper_bound_s(way: Interleaving) -> float:
    """The same with whole ops, and where messages and gradients meet the links between the devices that they go between."""
    if not np.isfinite(_work_bound_s(way.family, way.option, way.groups, way.chunks)):
        return np.inf
    return min(way.order_bound_s(links) for _, links in way.orders)


def _before(family: Family, option: StageOption) -> Floats:
    """[N + 1] time of the ops before each."""
    return np.concatenate([[0.0], np.cumsum(family.times(option)[1])])


def _least_held(before: Floats, groups: int, chunks: int, count: int) -> Ints:
    """[N] micro-batches of which each op's chunk holds what it keeps, at least, wherever cuts may be."""
    low, high = _windows(before, groups * chunks)
    held = _in_flight(groups, chunks, count)
    least = np.full(len(before) - 1, np.iinfo(np.int64).max)
    for chunk in range(groups * chunks):
        ops = slice(int(low[chunk]), int(high[chunk + 1]))
        least[ops] = np.minimum(least[ops], held[chunk % groups][chunk // groups])
    return least


@cache
def _in_flight(groups: int, chunks: int, count: int) -> tuple[tuple[int, ...], ...]:
    """Of each group and chunk; no more than in two rounds, after which it is steady."""
    return tuple(SCHEDULES[CHUNKED_SCHEDULE].in_flight(groups, group, min(count, 2 * groups), chunks) for group in range(groups))


def _windows(before: Floats, num_chunks: int) -> tuple[Ints, Ints]:
    """[chunks + 1] the first and the last op at which each cut may be; the nearest ops on both sides always."""
    share = float(before[-1]) / num_chunks
    wanted, least = share * np.arange(num_chunks + 1), np.arange(num_chunks + 1)
    low = np.searchsorted(before, wanted - _WINDOW * share, side="right") - 1
    high = np.searchsorted(before, wanted + _WINDOW * share, side="left")
    low, high = np.clip(low, least, len(before) - 1 - least[::-1]), np.clip(high, least, len(before) - 1 - least[::-1])
    low[0] = high[0] = 0
    low[-1] = high[-1] = len(before) - 1
    return np.asarray(low), np.asarray(high)


def _pipeline_s(sum_s: float, slowest_s: float, count: int, chunks: int) -> float:
    return (count - 1 / chunks) * slowest_s + sum_s / chunks


def best_interleaved(way: Interleaving, blocks: Blocks, known_s: float) -> tuple[Plan, Estimate] | None:
    """The plan with balanced groups, or with chunks as equal as ops allow where the simulator does not agree with the formula about the
    first; none where it does not fit or is not faster than `known_s`."""
    family, equal = way.family, _near_equal(_before(way.family, way.option), *way.windows)
    tried = []
    for together, links in way.orders:
        if way.order_bound_s(links) >= known_s:
            continue
        compute = family.costs(way.option).compute
        drawn = [
            balanced_cuts(compute, links, blocks.start, family.count, way.chunks, draw, even)[0]
            for draw in range(_DRAWS)
            for even in _EVENLY
        ]
        distinct = {cuts.tobytes(): cuts for cuts in (*drawn, *([equal] if equal is not None else []))}
        timed = sorted(((_least_s(way, links, cuts), cuts) for cuts in distinct.values()), key=lambda entry: entry[0])
        honest = ((time_s, together, cuts) for time_s, cuts in timed if time_s < known_s and _is_honest(way, links, cuts))
        tried += list(islice(honest, _ESTIMATED))
    best = None
    for time_s, together, cuts in sorted(tried, key=lambda entry: entry[0]):
        if time_s >= known_s:
            break
        plan = _plan(way, cuts, together)
        estimate = family.request.estimator.estimate(plan)
        if estimate.fits and estimate.time_s < known_s and simulated_pipeline_s(plan, estimate) <= _HONEST * estimate.pipeline_s:
            best, known_s = (plan, estimate), estimate.time_s
    return best


def _least_s(way: Interleaving, links: Links, cuts: Ints) -> float:
    """What a plan with these cuts takes at least."""
    return _formula_s(way, links, cuts) + links.least_after_s(cuts)


def _formula_s(way: Interleaving, links: Links, cuts: Ints) -> float:
    sums = np.bincount(np.arange(len(cuts) - 1) % way.groups, _chunks_s(way, links, cuts).sum(axis=0))
    return _pipeline_s(float(sums.sum()), float(sums.max()), way.family.count, way.chunks)


def _chunks_s(way: Interleaving, links: Links, cuts: Ints) -> Floats:
    """[2, chunks] forward and backward passes, messages included."""
    costs, (there, back) = way.family.costs(way.option), links.messages_s(cuts)
    forward, both = (np.add.reduceat(times, cuts[:-1]) for times in (costs.forward, costs.compute))
    return np.stack([forward + there, both - forward + back])


def _is_honest(way: Interleaving, links: Links, cuts: Ints) -> bool:
    """Whether the simulator agrees with the formula."""
    simulated_s = _simulated_s(_chunks_s(way, links, cuts), way.family.count, way.chunks)
    return simulated_s <= _HONEST * _formula_s(way, links, cuts)


def simulated_pipeline_s(plan: Plan, estimate: Estimate) -> float:
    """From the first forward to the last backward pass under the schedule, by the simulator."""
    from penstock.timing.planned import simulated

    return simulated(plan, estimate).pipeline_s


def _simulated_s(passes: Floats, count: int, chunks: int) -> float:
    """The same for [2, stages] forward and backward times."""
    from penstock.timing.simulator import simulate

    order = schedule_of(CHUNKED_SCHEDULE, passes.shape[1], count, chunks)
    return float(simulate(order, np.repeat(passes[:, :, None], count, axis=2), np.zeros((2, passes.shape[1] - 1, count))).makespan_s)


def divides_evenly(way: Interleaving) -> bool:
    """Whether under the simulator the most equal chunks that ops allow take about as long as the formula says of equal groups."""
    costs, before = way.family.costs(way.option), _before(way.family, way.option)
    cuts = _near_equal(before, *way.windows)
    if cuts is None:
        return False
    enter, leave = _messages(way.family, way.option, way.groups)
    group = np.arange(len(cuts) - 1) % way.groups
    forward = np.add.reduceat(costs.forward, cuts[:-1]) + enter[group, cuts[:-1]]
    both = np.add.reduceat(costs.compute, cuts[:-1]) + enter[group, cuts[:-1]] + leave[group, cuts[1:]]
    sums = np.bincount(group, both)
    count = min(way.family.count, 4 * way.groups)  # after some rounds nothing new happens
    formula_s = _pipeline_s(float(sums.sum()), float(sums.mean()), count, way.chunks)
    return _simulated_s(np.stack([forward, both - forward]), count, way.chunks) <= _EVEN * formula_s


def _messages(family: Family, option: StageOption, groups: int) -> tuple[Floats, Floats]:
    """[G, N + 1] time of the message that a chunk of each group gets before an op, and of the one after the op before.

    Groups lie side by side, which crosses the fewest nodes.
    """
    costs, pool, size = family.costs(option), family.pools[0], option.num_devices
    several = pool.num_devices > pool.per_node
    arrives = [int(several and group * size % pool.per_node == 0) for group in range(groups)]
    departs = [int(several and (group + 1) * size % pool.per_node == 0) for group in range(groups)]
    return costs.enter[arrives], costs.leave[departs]


def balanced_cuts(
    time: Floats, links: Links, starts: Ints, count: int, chunks: int, draw: int = 0, even: float = 0.0
) -> tuple[Ints, float]:
    """[v · G + 1] cuts near equal chunks, moved so that the pipeline of the groups' sums and what follows it are short, and their time.

    They begin between any two ops, and between blocks (`starts`), whose messages are often smaller, where there are enough of them. Each
    `draw` moves other cuts. With `even`, chunks are kept more equal, and have a price if they are not, as part of the time.
    """
    from penstock.search.interleaved.balance_kernels import balance

    num_chunks = len(links.enter) * chunks
    before, every = np.concatenate([[0.0], np.cumsum(time)]), np.arange(len(time) + 1)
    windows = _windows(before, num_chunks)
    steps = max(_MOVES * num_chunks, _LEAST_MOVES)

    def moved(places: Ints, low: Ints, high: Ints, cuts: Ints) -> tuple[Ints, float]:
        found = cuts.copy()
        messages = links.enter.take(places, axis=1), links.leave.take(places, axis=1)  # in the order that the kernel is compiled for
        tables = before[places], *messages, links.weights[places], links.after_s, links.tied_s
        time_s = balance(*tables, low, high, count - 1 / chunks, 1 / chunks, steps, draw, even, found)
        return places[found], float(time_s)

    tried: list[tuple[Ints, float]] = []
    for places in (every, starts):
        low, high = np.searchsorted(places, windows[0]), np.searchsorted(places, windows[1], side="right") - 1
        cuts = _near_equal(before[places], low, high)
        if cuts is not None:
            tried.append(moved(places, low, high, cuts))
    if len(tried) > 1:
        tried.append(moved(every, *windows, tried[1][0]))
    return min(tried, key=lambda found: found[1])


def _near_equal(before: Floats, low: Ints, high: Ints) -> Ints | None:
    """Cuts nearest to equal chunks within their windows, each with a place at least; None where there are too few places."""
    if len(low) > len(before) or (low > high).any():
        return None
    wanted = before[-1] * np.arange(len(low)) / (len(low) - 1)
    after = np.clip(np.searchsorted(before, wanted), 1, len(before) - 1)
    nearest = np.clip(after - (wanted - before[after - 1] < before[after] - wanted), low, high)
    cuts = np.maximum.accumulate(nearest - np.arange(len(low))) + np.arange(len(low))
    return np.asarray(cuts) if (cuts <= high).all() else None


def _plan(way: Interleaving, cuts: Ints, together: bool) -> Plan:
    family, option, stages = way.family, way.option, []
    places = [family.ranks(option, group * option.num_devices, together) for group in range(way.groups)]
    for number, (first, last) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
        stages.append(Stage(
            first, last, places[number % way.groups], Degrees(option.tp, option.dp),
            zero=option.zero if option.dp * family.replicas > 1 else 0, sequence_parallel=option.sequence,
        ))  # fmt: skip
    frame = family.request.frame
    batching = replace(frame.micro_batching, samples=family.samples)
    return replace(
        frame, stages=tuple(stages), num_replicas=family.replicas, micro_batching=batching, schedule=CHUNKED_SCHEDULE
    )  # fmt: skip
