"""Plans of one family with stages of any size: exact cuts, options of each stage, and recomputation by time per byte.

The partition programme finds the best pipeline; what it leaves out (gradient sync, optimizer step, memory to the byte) comes from the
estimate, by which the plans found are compared. Short chains are cut between any two ops at once; long chains and several kinds of
devices first between blocks, then between any two ops near those cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.plans.plan import Plan
from penstock.schedules.rules import SCHEDULES
from penstock.search.assemble import MEMORY_SHARES, assembled, best_order, first_fitting, stage_of
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.choice import Choice
from penstock.search.partition.after_limits import StageAfter
from penstock.search.partition.flags import recompute_flags
from penstock.search.partition.priced import Priced
from penstock.search.partition.programme import Messages, best_cuts, best_partition, crossing
from penstock.search.partition.stage_space import Machine, StageChoice, StageSpace, build_space
from penstock.search.space.families import PlanFamily, Subspace
from penstock.search.space.stage_costs import Ints, OptionCosts, StageOption

__all__ = ["best_pipeline", "bound_of_subspace", "equal_pipeline"]

COARSE_CUTS, COARSE_TOLERANCE = 128, 1e-3
"""Cuts that the first look at a long chain has, and how near to the best of them it comes."""
LONG_CHAIN, BOUND_CUTS = 2000, 512
"""Chains of more ops than this are bounded with at most so many cuts."""
_ROUNDS, _LESS = 5, 0.8
"""How often the programme looks for stages that do less after the last micro-batch, and how much less at least."""
_FEW, _GAIN = 64, 0.03
"""Over one kind only in short chains on so many devices at most, where a shorter end could make the plan faster by at least this share."""
_NEARLY = 1.05
"""A plan is estimated where what it does after the last micro-batch, roughly, makes it no more than so much slower than the best."""


def best_pipeline(family: PlanFamily, known_s: float, anywhere: bool = False) -> Choice | None:
    """The fastest plan of a family that fits, if it is faster than `known_s`; a first look `anywhere` knows every cut of every chain."""
    best: Choice | None = None
    schedules = family.request.unchunked
    for subspace in (replace(own, anywhere=True) if anywhere else own for own in family.subspaces):
        for schedule in schedules if subspace.max_stages > 1 else schedules[-1:]:
            for depth, fewer in pairwise(_depths(subspace, schedule)):
                shallow, in_flight = replace(subspace, max_stages=depth), _in_flight(family, schedule, fewer)
                if subspace_bound(family, shallow, known_s, schedule, in_flight).time_s >= known_s:
                    continue
                found = _best_of_subspace(family, shallow, schedule, known_s)
                if found is not None and found.estimate.time_s < known_s:
                    best, known_s = found, found.estimate.time_s
                # Over several kinds a plan is not the best of all stages, so that fewer of them may find another.
                if fewer and (len(family.pools) == 1 or found is None) and _all_fit(family, shallow, schedule, known_s):
                    break
    return best


def _machine(family: PlanFamily, share: float) -> Machine:
    """The devices of a replica, with a share of their memory."""
    return Machine(tuple(pool.with_share(share) for pool in family.pools), 1.0, 0.0, idle=len(family.pools) > 1)


def _all_fit(family: PlanFamily, subspace: Subspace, schedule: str, known_s: float) -> bool:
    """Whether memory excludes no stage of a zero-bubble schedule at this depth, so that fewer stages, which hold less, allow no more."""
    blocks, costs = family.request.blocks, [family.prices.costs(option) for option in subspace.options]
    cuts = None if subspace.fine else blocks.every(blocks.stride(COARSE_CUTS))

    def able(share: float, in_flight: int) -> NDArray[np.bool_]:
        machine = _machine(family, share)
        return np.isfinite(_plain_space(family, costs, machine, 1, known_s, cuts, in_flight).times)

    return np.array_equal(able(MEMORY_SHARES[-1], min(subspace.max_stages, family.count)), able(1.0, 1))


def _in_flight(family: PlanFamily, schedule: str, fewer: int) -> int:
    """Micro-batches that every stage of a pipeline of more than so many stages holds at least."""
    return min(fewer + 1, family.count) if SCHEDULES[schedule].splits_backward else 1


def _depths(subspace: Subspace, schedule: str) -> list[int]:
    """The most stages to solve for, in turn, down to the number that is too few; under a zero-bubble schedule every stage holds as many
    micro-batches as there are stages, so that a limit on their number leaves more memory."""
    if subspace.equal:
        return [subspace.max_stages, subspace.max_stages - 1]
    if not SCHEDULES[schedule].splits_backward:
        return [subspace.max_stages, 0]
    most = subspace.max_stages
    return sorted({0, *(min(2**k, most) for k in range(1, most.bit_length() + 1))}, reverse=True)


def _best_of_subspace(family: PlanFamily, subspace: Subspace, schedule: str, known_s: float) -> Choice | None:
    """The fastest plan of a subspace under one schedule, if its pipeline leaves enough of `known_s` for what follows it."""
    left_s = known_s - family.prices.updates.least_after_s(subspace.options)

    def solve(share: float) -> Choice | None:
        if subspace.max_stages > 1:
            return _best_within(family, subspace, schedule, share, known_s)
        found = _stages(family, subspace, schedule, share, left_s)
        return None if found is None or _least_s(family, *found) >= known_s else _estimated(family, schedule, *found)

    return first_fitting(solve)


def _best_within(family: PlanFamily, subspace: Subspace, schedule: str, share: float, known_s: float) -> Choice | None:
    """The best of several plans, each with less to do after the last micro-batch than the one before."""
    after, best, limit_s, alike = StageAfter(family.prices), None, np.inf, len(family.pools) == 1
    least_s = family.prices.updates.least_after_s(subspace.options)
    is_small = subspace.fine and family.request.cluster.num_devices <= _FEW and not family.request.asynchronous
    for _ in range(_ROUNDS):
        found = _stages(family, subspace, schedule, share, known_s - least_s, limit_s)
        if found is None:
            break
        pipeline_s = _pipeline_s(family, found[1])
        after_s = after.longest(*found) if is_small or not alike else 0.0
        if (alike or pipeline_s + after_s < known_s * _NEARLY) and _least_s(family, *found) < known_s:
            choice = _estimated(family, schedule, *found)
            if best is None or (not choice.estimate.fits, choice.estimate.time_s) < (not best.estimate.fits, best.estimate.time_s):
                best = choice
            if choice.estimate.fits:
                known_s = min(known_s, choice.estimate.time_s)
        if alike and (not is_small or pipeline_s + least_s > known_s * (1 - _GAIN)):
            break
        # No pipeline is shorter than this one, so that the others have to do less after it.
        limit_s = min(known_s - pipeline_s, _LESS * after_s) if pipeline_s < known_s else _LESS * after_s
    return best


def _pipeline_s(family: PlanFamily, chosen: Sequence[StageChoice]) -> float:
    """The pipeline of these stages by formula."""
    return (family.count - 1) * max(stage.time for stage in chosen) + sum(stage.time - stage.hidden_fill_s for stage in chosen)


def _least_s(family: PlanFamily, space: StageSpace, chosen: Sequence[StageChoice]) -> float:
    """What a plan of these stages takes at least, with what follows its last micro-batch."""
    after = [family.prices.updates.after_s(space.costs[stage.option].option)[stage.first : stage.last] for stage in chosen]
    return _pipeline_s(family, chosen) + max(float(times.sum()) for times in after)


def _stages(
    family: PlanFamily, subspace: Subspace, schedule: str, share: float, known_s: float, after_limit_s: float = np.inf
) -> tuple[StageSpace, tuple[StageChoice, ...]] | None:
    """The programme's best stages with this share of the memory, of those that take at most so long after the last micro-batch; None where
    nothing can be faster than `known_s`."""
    blocks, count = family.request.blocks, family.count
    machine = _machine(family, share)

    def space_of(costs: Sequence[OptionCosts], cuts: Ints | None) -> StageSpace:
        depth = subspace.max_stages
        if not SCHEDULES[schedule].recomputes:
            found = _plain_space(family, costs, machine, depth, known_s, cuts, min(depth, count))
        else:
            levels = [family.prices.levels(c.option) for c in costs]
            found = build_space(costs, blocks, machine, max_stages=depth, longest=known_s / count, cuts=cuts, levels=levels)
        return found if after_limit_s == np.inf else StageAfter(family.prices).limited(found, after_limit_s)

    costs, stride = _costs(family, subspace, schedule, family.prices.costs), blocks.stride(COARSE_CUTS)
    everywhere = subspace.fine or subspace.anywhere
    space = space_of(costs, blocks.ends if subspace.max_stages == 1 else None if everywhere else blocks.every(stride))
    if subspace.fine:
        found = best_partition(space, count, known_s)
        return (space, found.stages) if found.stages else None
    # Cuts between ops make a stage shorter by less than the blocks between two coarse cuts.
    slack_s = (count - 1 + subspace.max_stages) * min(_longest_step_s(c, space.cuts) for c in costs)
    stages = best_partition(space, count, known_s + slack_s, COARSE_TOLERANCE).stages
    for between_blocks in ((True, False) if stride > 1 else (False,)) if stages else ():
        used, near = sorted({stage.option for stage in stages}), [stage.first for stage in stages[1:]]
        cuts = blocks.starts_near(near, stride) if between_blocks else blocks.ops_near(near)
        space = space_of([space.costs[option] for option in used], cuts)
        given = [replace(stage, option=used.index(stage.option)) for stage in stages]
        found = best_cuts(space, given, count, _messages(family, space, given) if len(family.pools) > 1 else None)
        if not (stages := found.stages):
            return None
    return (space, stages) if stages and found.time < known_s else None


def _messages(family: PlanFamily, space: StageSpace, given: Sequence[StageChoice]) -> list[Messages]:
    """What each stage waits for at each cut. Between kinds of devices, and stages of unequal size, that depends on both neighbours."""
    options, nothing = [space.costs[stage.option].option for stage in given], np.zeros(len(space.cuts))
    neighbours = zip(options, options[1:], crossing(space, given), strict=False)
    cuts = [family.prices.messages.between_s(before, after, across) for before, after, across in neighbours]
    there, back = ([times[space.cuts] for times in column] for column in zip(*cuts, strict=True)) if cuts else ([], [])
    return list(zip([nothing, *there], [*back, nothing], strict=True))


def _plain_space(
    family: PlanFamily, costs: Sequence[OptionCosts], machine: Machine, depth: int, known_s: float, cuts: Ints | None, in_flight: int
) -> StageSpace:
    """The stages under a zero-bubble schedule: nothing is recomputed, and each holds so many micro-batches at least."""
    return build_space(
        costs, family.request.blocks, machine, max_stages=depth, longest=known_s / family.count, cuts=cuts, recompute="never",
        in_flight=in_flight,
    )  # fmt: skip


def _costs(family: PlanFamily, subspace: Subspace, schedule: str, of: Callable[[StageOption], OptionCosts]) -> list[OptionCosts]:
    """The costs of a subspace's options under one schedule."""
    costs = [of(option) for option in subspace.options]
    return [family.prices.hiding(c) for c in costs] if SCHEDULES[schedule].fill_relief else costs


def _longest_step_s(costs: OptionCosts, cuts: Ints) -> float:
    return float(np.add.reduceat(costs.compute, cuts[:-1]).max())


def equal_pipeline(family: PlanFamily, option: StageOption, known_s: float) -> Choice | None:
    """The fastest plan whose stages all have one option and whole blocks, with nothing recomputed, if it is faster than `known_s`."""
    blocks, depth = family.request.blocks, family.num_devices // option.num_devices
    space = build_space(
        [family.prices.costs(option)], blocks, Machine(family.pools, 1.0, 0.0), max_stages=depth, longest=known_s / family.count,
        cuts=blocks.start, recompute="never",
    )  # fmt: skip
    found = best_partition(space, family.count, known_s)
    choice = _estimated(family, family.request.unchunked[-1], space, found.stages) if found.stages else None
    return choice if choice is not None and choice.estimate.fits and choice.estimate.time_s < known_s else None


def bound_of_subspace(
    family: PlanFamily, subspace: Subspace, schedule: str, known_s: float, least_s: float, good_s: float
) -> tuple[float, list[Choice]]:  # fmt: skip
    """What no plan of a subspace under one schedule that is faster than `known_s` can be below, and plans met on the way that fit.

    `least_s` holds already, and nothing above `good_s` is asked for. Zero-bubble schedules recompute nothing, and every stage holds as many
    micro-batches as there are stages, so that each range of depths has a bound of its own.
    """
    found = [
        _bound(family, replace(subspace, max_stages=most), schedule, _in_flight(family, schedule, fewer), known_s, least_s, good_s)
        for most, fewer in pairwise(_depths(subspace, schedule))
    ]
    return min(bound for bound, _ in found), [choice for _, choices in found for choice in choices]


def _bound(
    family: PlanFamily, subspace: Subspace, schedule: str, in_flight: int, known_s: float, least_s: float, good_s: float
) -> tuple[float, list[Choice]]:
    """`bound_of_subspace` where every stage of a zero-bubble schedule holds at least `in_flight` micro-batches.

    A very long chain is cut between blocks alone, and each stage but the first is let off its first blocks.
    """
    least_s = max(least_s, subspace_bound(family, subspace, known_s, schedule, in_flight).time_s)
    if least_s >= good_s:
        return min(least_s, known_s), []
    blocks, machine, depth = family.request.blocks, Machine(family.pools, 1.0, 0.0), subspace.max_stages
    long_chain = int(blocks.start[-1]) > LONG_CHAIN
    cuts = blocks.ends if depth == 1 else blocks.every(blocks.stride(BOUND_CUTS)) if long_chain else None
    costs = _costs(family, subspace, schedule, family.prices.least_costs)
    if not SCHEDULES[schedule].recomputes:
        space = _plain_space(family, costs, machine, depth, known_s, cuts, in_flight)
    else:
        levels = [family.prices.levels(option) for option in subspace.options]
        space = build_space(
            costs, blocks, machine, max_stages=depth, longest=known_s / family.count, cuts=cuts, recompute="bounded", levels=levels
        )  # fmt: skip
    answer = Priced(family, subspace, space.inner() if long_chain and depth > 1 else space, known_s).solve(least_s, good_s)
    if not answer.stages or answer.time_s >= known_s:
        return answer.bound_s, []
    found = _estimated(family, schedule, space, answer.stages)
    return answer.bound_s, [found] if found.estimate.fits else []


def _estimated(family: PlanFamily, schedule: str, space: StageSpace, chosen: Sequence[StageChoice]) -> Choice:
    """The plan of these stages in the better order of ranks."""
    options = [space.costs[stage.option].option for stage in chosen]
    flags = [recompute_flags(space, stage) for stage in chosen]

    def plan_in(together: bool) -> Plan:
        stages = [
            stage_of(stage.first, stage.last, option, family.ranks(option, stage.start, together), again)
            for stage, option, again in zip(chosen, options, flags, strict=True)
        ]
        return assembled(family.request.frame, stages, family.samples, schedule)

    return best_order(family, "exact", plan_in)
