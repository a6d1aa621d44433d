"""Interleaved pipelines with cuts of their own: equal groups of devices, each with several chunks whose sum is what counts.

A pipeline of G groups with v chunks each takes m · slowest + the others / v, where a group takes the sum of its chunks. That holds for
chunks of about equal time alone, so cuts stay within a tenth of a chunk, or an op, of where equal ones would be; within that, they are
moved until the groups' sums are nearly equal. Ways whose ops do not divide so evenly that the simulator agrees with the formula are left
out, and so are plans that it finds slower. Nothing is recomputed: where only some blocks are, chunks are no longer equal.

The bound: the sum over all groups is that of all ops and of v · G - 1 messages, and the slowest takes at least the average. All
devices together hold the state of every op, and what it keeps as often as the chunk it may be in at least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.collectives import sync_gradients_s
from penstock.costs.memory import bytes_per_parameter, rank_parameters
from penstock.costs.messages import cut_times_s, gradient_sharing
from penstock.costs.table import Floats
from penstock.plans.inflight import in_flight_by_chunk
from penstock.plans.plan import Degrees, Plan, Stage
from penstock.search.families import CHUNKS, MAX_DEPTH, Family
from penstock.search.stages import Blocks, Ints, StageOption

if TYPE_CHECKING:
    from penstock.costs.estimate import Estimate

__all__ = [
    "Interleaving",
    "balanced_cuts",
    "best_interleaved",
    "divides_evenly",
    "interleavings",
    "sharper_bound_s",
    "simulated_pipeline_s",
]

_MOVES, _LEAST_MOVES = 2000, 60_000
"""That are tried for each cut, and for all of them."""
_WINDOW = 0.1
"""Of a chunk, by which a cut may be off."""
_HONEST, _EVEN = 1.03, 1.05
"""The simulator may find a plan this much slower than the formula, and chunks that are as equal as ops allow this much slower than equal
ones."""
_SEEN = 8
"""Replicas whose messages are taken to share a network."""


@dataclass(frozen=True)
class Interleaving:
    """One way to interleave: an option for all groups, their number, and the chunks of each."""

    family: Family
    option: StageOption
    groups: int
    chunks: int
    bound_s: float
    """What no such plan can be below."""


def interleavings(family: Family) -> Iterator[Interleaving]:
    """All ways of a family on devices of one kind whose micro-batches come in whole rounds, as the schedule needs them to stay busy."""
    if len(family.pools) > 1 or "interleaved" not in family.request.schedules:
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
    """The same where messages and gradients meet the links between the devices that they go between."""
    family, option = way.family, way.option
    work_s = _work_bound_s(family, option, way.groups, way.chunks)
    orders = (False, True) if family.replicas > 1 else (False,)
    return work_s + min(_sent_bound_s(way, [family.ranks(option, g * option.num_devices, t) for g in range(way.groups)]) for t in orders)


def _sent_bound_s(way: Interleaving, places: Sequence[tuple[tuple[int, ...], ...]]) -> float:
    """What messages, gradient sync and optimizer step add at least, with these ranks of each group.

    Each cut has the smallest carry of the ops where it may be.
    """
    family, cluster = way.family, way.family.request.estimator.cluster
    model, option = family.request.estimator.model_under(way.option.sequence), way.option
    sizes = np.array([model.boundary_bytes(op).at(family.table(option)[1], option.tp) for op in range(1, model.num_ops)])
    small, large = 1 + int(sizes.argmin()), 1 + int(sizes.argmax())
    stages = [Stage(0, 1, devices, Degrees(option.tp, option.dp)) for devices in places]

    def hops_s(cut: int) -> Floats:
        """[G] of the first replica's messages there and back between each group and the next, if they are cut here."""
        times = []
        for sender, receiver in zip(stages, [*stages[1:], stages[0]], strict=True):
            ends = (sender.devices[:_SEEN], receiver.devices[:_SEEN])
            pair = (replace(sender, last=cut, devices=ends[0]), replace(receiver, first=cut, last=model.num_ops, devices=ends[1]))
            plan = replace(family.request.frame, stages=pair)
            times.append(sum(cut_times_s(lambda *_: model, cluster, plan, family.samples, 0)[0]))
        return np.array(times)

    least, most = hops_s(small), hops_s(large)
    slopes = (most - least) / max(float(sizes.max() - sizes.min()), 1.0)
    every = np.tile(np.arange(way.groups), way.chunks)[:-1]  # after the last chunk nothing is sent
    low, high = _windows(_before(family, option), way.groups * way.chunks)
    carried = np.array([sizes[int(a) - 1 : int(b)].min() for a, b in zip(low[1:-1], high[1:-1], strict=True)])
    messages_s = float(least[every].sum() + slopes[every] @ (carried - sizes.min()))
    return messages_s * _pipeline_s(1.0, 1.0 / way.groups, family.count, way.chunks) + _after_bound_s(way, stages)


def _after_bound_s(way: Interleaving, stages: Sequence[Stage]) -> float:
    """Gradient sync and optimizer step of a group with an average share of the weights, on the best of the groups."""
    family, option, frame = way.family, way.option, way.family.request.frame
    estimator, holders = family.request.estimator, family.replicas * option.dp
    weights = sum(count for op, count in rank_parameters(family.request.model.ops, option.tp) if op.trainable) / way.groups
    device = family.kinds[option.pool].device.name
    step_s = estimator.source.optimizer_s(weights / (holders if option.zero else 1), device, frame.precision, frame.optimizer)
    if holders == 1:
        return step_s
    size = weights * bytes_per_parameter(frame.precision, frame.optimizer)[1]
    sharing = gradient_sharing(estimator.cluster, replace(frame, stages=tuple(stages)))
    lanes = [[ranks[at] for ranks in stage.devices for at in range(0, len(ranks), option.tp)] for stage in stages]
    return step_s + min(
        sync_gradients_s(size, estimator.cluster, ranks, zero=option.zero, sharing=together)
        for ranks, together in zip(lanes, sharing, strict=True)
    )


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
    return tuple(in_flight_by_chunk(groups, group, min(count, 2 * groups), chunks) for group in range(groups))


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
    family, (enter, leave) = way.family, _messages(way.family, way.option, way.groups)
    before = _before(family, way.option)
    balanced, time_s = balanced_cuts(family.costs(way.option).compute, enter, leave, blocks.start, family.count, way.chunks)
    equal = _near_equal(before, *_windows(before, way.groups * way.chunks))
    for cuts in (balanced, equal) if time_s < known_s else ():
        plans = (
            [_plan(way, cuts, together) for together in ((False, True) if family.replicas > 1 else (False,))] if cuts is not None else []
        )
        estimates = [(plan, family.request.estimator.estimate(plan)) for plan in plans]
        fitting = [pair for pair in estimates if pair[1].fits and pair[1].time_s < known_s]
        found = min(fitting, key=lambda pair: pair[1].time_s, default=None)
        if found is not None and simulated_pipeline_s(*found) <= _HONEST * found[1].pipeline_s:
            return found
    return None


def simulated_pipeline_s(plan: Plan, estimate: Estimate) -> float:
    """From the first forward to the last backward pass under the schedule, messages being work of those who get them."""
    passes = []
    for stage in estimate.stages:
        work = stage.work
        both = work.forward_s + work.backward_s + work.recompute_s
        passes.append((work.forward_s + (work.total_s - both) / 2, work.backward_s + work.recompute_s + (work.total_s - both) / 2))
    return _simulated_s(np.array(passes).T, estimate.num_micro_batches, plan.num_chunks)


def _simulated_s(passes: Floats, count: int, chunks: int) -> float:
    """The same for [2, stages] forward and backward times."""
    from penstock.schedules.orders import schedule_of
    from penstock.schedules.simulator import simulate

    order = schedule_of("interleaved", passes.shape[1], count, chunks)
    return float(simulate(order, np.repeat(passes[:, :, None], count, axis=2), np.zeros((2, passes.shape[1] - 1, count))).makespan_s)


def divides_evenly(way: Interleaving) -> bool:
    """Whether under the simulator the most equal chunks that ops allow take about as long as the formula says of equal groups."""
    costs, before = way.family.costs(way.option), _before(way.family, way.option)
    cuts = _near_equal(before, *_windows(before, way.groups * way.chunks))
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


def balanced_cuts(time: Floats, enter: Floats, leave: Floats, starts: Ints, count: int, chunks: int) -> tuple[Ints, float]:
    """[v · G + 1] cuts near equal chunks, moved so that the pipeline of the groups' sums is short, and its time.

    They begin between any two ops, and between blocks (`starts`), whose messages are often smaller, where there are enough of them.
    """
    from penstock.search.interleaved_kernels import balance

    num_chunks = len(enter) * chunks
    before, every = np.concatenate([[0.0], np.cumsum(time)]), np.arange(len(time) + 1)
    windows = _windows(before, num_chunks)

    def moved(places: Ints, low: Ints, high: Ints, cuts: Ints) -> tuple[Ints, float]:
        found = cuts.copy()
        tables = before[places], enter[:, places], leave[:, places]
        time_s = balance(*tables, low, high, count - 1 / chunks, 1 / chunks, max(_MOVES * num_chunks, _LEAST_MOVES), found)
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
        frame, stages=tuple(stages), num_replicas=family.replicas, micro_batching=batching, schedule="interleaved"
    )  # fmt: skip
