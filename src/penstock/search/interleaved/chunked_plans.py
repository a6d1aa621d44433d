"""The best plan of each way to interleave, by the formula and by the simulator, which must agree.

The formula takes all chunks for equal. Ways whose ops do not divide so evenly that the simulator agrees with it are left out, and so are
plans that it finds slower. Nothing is recomputed: where only some blocks are, chunks are no longer equal.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.table import Floats
from penstock.plans.plan import Plan
from penstock.schedules.rules import CHUNKED_SCHEDULE, schedule_of
from penstock.search.assemble import assembled, estimated, stage_of
from penstock.search.choice import Choice
from penstock.search.interleaved.balanced_cuts import balanced_cuts, near_equal
from penstock.search.interleaved.group_links import GroupLinks
from penstock.search.interleaved.ways import Interleaving, interleaved_s, side_by_side
from penstock.search.space.stage_costs import Ints

if TYPE_CHECKING:
    from penstock.timing.iteration_estimate import Estimate

__all__ = ["best_interleaved", "divides_evenly", "simulated_pipeline_s"]

_DRAWS, _EVENLY = 6, (0.0, 0.5)
"""How often cuts are moved, and with how much regard to equal chunks: those that the formula takes for equally good are not so under the
simulator."""
_ESTIMATED = 2
"""Cuts of each order of ranks that are estimated whole."""
_HONEST, _EVEN = 1.03, 1.05
"""The simulator may find a plan this much slower than the formula, and chunks that are as equal as ops allow this much slower than equal
ones."""


def best_interleaved(way: Interleaving, known_s: float) -> Choice | None:
    """The plan with balanced groups, or with chunks as equal as ops allow where the simulator does not agree with the formula about the
    first; none where it does not fit or is not faster than `known_s`."""
    family, equal = way.family, near_equal(way.before, *way.windows)
    compute, starts, tried = family.prices.costs(way.option).compute, family.request.blocks.start, []
    for together, links in way.orders:
        if way.order_bound_s(links) >= known_s:
            continue
        drawn = [
            balanced_cuts(compute, links, starts, family.count, way.chunks, draw, even)[0]
            for draw in range(_DRAWS)
            for even in _EVENLY
        ]
        distinct = {cuts.tobytes(): cuts for cuts in (*drawn, *([equal] if equal is not None else []))}
        timed = sorted(((_least_s(way, links, cuts), cuts) for cuts in distinct.values()), key=lambda entry: entry[0])
        honest = ((time_s, together, cuts) for time_s, cuts in timed if time_s < known_s and _is_honest(way, links, cuts))
        tried += list(islice(honest, _ESTIMATED))
    best: Choice | None = None
    for time_s, together, cuts in sorted(tried, key=lambda entry: entry[0]):
        if time_s >= known_s:
            break
        found = estimated(family.request, _plan(way, cuts, together), "exact")
        estimate = found.estimate
        if estimate.fits and estimate.time_s < known_s and simulated_pipeline_s(found.plan, estimate) <= _HONEST * estimate.pipeline_s:
            best, known_s = found, estimate.time_s
    return best


def _least_s(way: Interleaving, links: GroupLinks, cuts: Ints) -> float:
    """What a plan with these cuts takes at least."""
    return _formula_s(way, links, cuts) + links.least_after_s(cuts)


def _formula_s(way: Interleaving, links: GroupLinks, cuts: Ints) -> float:
    sums = np.bincount(np.arange(len(cuts) - 1) % way.groups, _chunks_s(way, links, cuts).sum(axis=0))
    return interleaved_s(float(sums.sum()), float(sums.max()), way.family.count, way.chunks)


def _chunks_s(way: Interleaving, links: GroupLinks, cuts: Ints) -> Floats:
    """[2, chunks] forward and backward passes, messages included."""
    costs, (there, back) = way.family.prices.costs(way.option), links.messages_s(cuts)
    forward, both = (np.add.reduceat(times, cuts[:-1]) for times in (costs.forward, costs.compute))
    return np.stack([forward + there, both - forward + back])


def _is_honest(way: Interleaving, links: GroupLinks, cuts: Ints) -> bool:
    """Whether the simulator agrees with the formula."""
    simulated_s = _simulated_s(_chunks_s(way, links, cuts), way.family.count, way.chunks)
    return simulated_s <= _HONEST * _formula_s(way, links, cuts)


def simulated_pipeline_s(plan: Plan, estimate: Estimate) -> float:
    """From the first forward to the last backward pass under the schedule, by the simulator."""
    from penstock.timing.planned import simulated

    return simulated(plan, estimate).pipeline_s


def _simulated_s(passes: Floats, count: int, chunks: int) -> float:
    """The pipeline of [2, stages] forward and backward times."""
    from penstock.timing.simulator import simulate

    order = schedule_of(CHUNKED_SCHEDULE, passes.shape[1], count, chunks)
    return float(simulate(order, np.repeat(passes[:, :, None], count, axis=2), np.zeros((2, passes.shape[1] - 1, count))).makespan_s)


def divides_evenly(way: Interleaving) -> bool:
    """Whether under the simulator the most equal chunks that ops allow take about as long as the formula says of equal groups."""
    costs, cuts = way.family.prices.costs(way.option), near_equal(way.before, *way.windows)
    if cuts is None:
        return False
    enter, leave = side_by_side(way.family, way.option, way.groups)
    group = np.arange(len(cuts) - 1) % way.groups
    forward = np.add.reduceat(costs.forward, cuts[:-1]) + enter[group, cuts[:-1]]
    both = np.add.reduceat(costs.compute, cuts[:-1]) + enter[group, cuts[:-1]] + leave[group, cuts[1:]]
    sums = np.bincount(group, both)
    count = min(way.family.count, 4 * way.groups)  # after some rounds nothing new happens
    formula_s = interleaved_s(float(sums.sum()), float(sums.mean()), count, way.chunks)
    return _simulated_s(np.stack([forward, both - forward]), count, way.chunks) <= _EVEN * formula_s


def _plan(way: Interleaving, cuts: Ints, together: bool) -> Plan:
    family, option = way.family, way.option
    places = [family.ranks(option, group * option.num_devices, together) for group in range(way.groups)]
    stages = [stage_of(first, last, option, places[number % way.groups]) for number, (first, last) in enumerate(pairwise(cuts.tolist()))]
    return assembled(family.request.frame, stages, family.samples, CHUNKED_SCHEDULE)
