"""Plans of one family with stages of any size: exact cuts, options of each stage, and recomputation by time per byte.

The partition programme finds the best pipeline; what it leaves out (gradient sync, optimizer step, memory to the byte) comes from the
estimate, by which the plans found are compared. Short chains are cut between any two ops at once; long chains and several kinds of
devices first between blocks, then between any two ops near those cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.plans.build import BESIDE, join_ranges
from penstock.plans.plan import Degrees, Plan, Stage
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, unchunked
from penstock.search.bounds.by_ops import pass_bound
from penstock.search.partition.priced import Priced
from penstock.search.partition.programme import TOLERANCE, best_cuts, best_partition
from penstock.search.partition.recompute import recompute_flags
from penstock.search.partition.stages import Blocks, Machine, OptionCosts, Recompute, StageChoice, StageOption, StageSpace, build_space
from penstock.search.space.families import Family, Pass

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.timing.estimate import Estimate

__all__ = ["best_pipeline", "blocks_of", "bound_of_pass", "equal_pipeline"]

COARSE_CUTS, COARSE_TOLERANCE = 128, 1e-3
"""Cuts that the first pass over a long chain looks at, and how near to the best of them it comes."""
LONG_CHAIN, BOUND_CUTS = 2000, 512
"""Chains of more ops than this are bounded with at most so many cuts."""
_SHARES = (1.0, 0.97, 0.93, 0.88)
"""Of the memory, tried in turn where the programme was too hopeful."""


def best_pipeline(family: Family, blocks: Blocks, known_s: float) -> tuple[Plan, Estimate] | None:
    """The fastest plan of a family that fits, if it is faster than `known_s`."""
    best: tuple[Plan, Estimate] | None = None
    schedules = unchunked({DEFAULT_SCHEDULE, *family.request.schedules})
    for part in family.passes:
        for schedule in schedules if part.max_stages > 1 else (DEFAULT_SCHEDULE,):
            for depth, fewer in pairwise(_depths(part, schedule)):
                shallow, in_flight = replace(part, max_stages=depth), _in_flight(family, schedule, fewer)
                if pass_bound(family, shallow, known_s, schedule, in_flight).time_s >= known_s:
                    continue
                found = _best_of_pass(family, blocks, shallow, schedule, known_s)
                if found is not None and found[1].time_s < known_s:
                    best, known_s = found, found[1].time_s
    return best


def _in_flight(family: Family, schedule: str, fewer: int) -> int:
    """Micro-batches that every stage of a pipeline of more than so many stages holds at least."""
    return min(fewer + 1, family.count) if SCHEDULES[schedule].splits_backward else 1


def _depths(part: Pass, schedule: str) -> list[int]:
    """The most stages to solve for, down to the number that is too few; under a zero-bubble schedule every stage holds as many
    micro-batches, so less may be more."""
    if part.equal:
        return [part.max_stages, part.max_stages - 1]
    if not SCHEDULES[schedule].splits_backward:
        return [part.max_stages, 0]
    return sorted({0, *(min(2**k, part.max_stages) for k in range(1, part.max_stages.bit_length() + 1))}, reverse=True)


def _best_of_pass(family: Family, blocks: Blocks, part: Pass, schedule: str, known_s: float) -> tuple[Plan, Estimate] | None:
    """The fastest plan of a pass under one schedule that fits, if its pipeline leaves enough of `known_s` for what follows it."""
    left_s = known_s - family.least_after_s(part)
    for share in _SHARES:
        stages = _stages(family, blocks, part, schedule, share, left_s)
        if stages is None or _least_s(family, *stages) >= known_s:
            return None
        found = _estimated(family, schedule, *stages)
        if found[1].fits:
            return found
    return None


def _least_s(family: Family, space: StageSpace, chosen: Sequence[StageChoice]) -> float:
    """What a plan of these stages takes at least, with what follows its last micro-batch."""
    pipeline_s = (family.count - 1) * max(stage.time for stage in chosen) + sum(stage.time - stage.relief for stage in chosen)
    after = [family.after_s(space.costs[stage.option].option)[stage.first : stage.last] for stage in chosen]
    return pipeline_s + max(float(times.sum()) for times in after)


def _stages(
    family: Family, blocks: Blocks, part: Pass, schedule: str, share: float, known_s: float
) -> tuple[StageSpace, tuple[StageChoice, ...]] | None:
    """The programme's best stages with this share of the memory; None where nothing can be faster than `known_s`."""
    pools = tuple(replace(pool, memory_limit=share * pool.memory_limit) for pool in family.pools)
    machine = Machine(pools, 1.0, 0.0, idle=len(pools) > 1)
    longest, zero_bubble = known_s / family.count, SCHEDULES[schedule].splits_backward

    def space_of(costs: Sequence[OptionCosts], cuts: np.ndarray | None) -> StageSpace:
        levels = None if zero_bubble else [family.levels(c.option, blocks) for c in costs]
        recompute: Recompute = "never" if zero_bubble else "needed"
        return build_space(
            costs, blocks, machine, max_stages=part.max_stages, longest=longest, cuts=cuts, recompute=recompute, levels=levels,
            in_flight=min(part.max_stages, family.count) if zero_bubble else 0,
        )  # fmt: skip

    costs = option_costs(family, part, schedule, family.costs)
    stride = -(-(len(blocks.start) - 1) // COARSE_CUTS)
    cuts = np.append(blocks.start[:-1:stride], blocks.start[-1])
    space = space_of(costs, cuts[[0, -1]] if part.max_stages == 1 else None if part.fine else cuts)
    # Cuts between ops make a stage shorter by less than the blocks between two coarse cuts.
    slack_s = 0.0 if part.fine else (family.count - 1 + part.max_stages) * min(_longest_step_s(c, space.cuts) for c in costs)
    found = best_partition(space, family.count, known_s + slack_s, TOLERANCE if part.fine else COARSE_TOLERANCE)
    if not found.stages or part.fine:
        return (space, found.stages) if found.stages else None
    stages = found.stages
    for cuts_near in [_blocks_near] * (stride > 1) + [_ops_near]:
        used = sorted({stage.option for stage in stages})
        space = space_of([space.costs[option] for option in used], cuts_near(stages, blocks, stride))
        found = best_cuts(space, [replace(stage, option=used.index(stage.option)) for stage in stages], family.count)
        if not found.stages:
            return None
        stages = found.stages
    return (space, stages) if found.time < known_s else None


def _longest_step_s(costs: OptionCosts, cuts: np.ndarray) -> float:
    return float(np.add.reduceat(costs.compute, cuts[:-1]).max())


def equal_pipeline(family: Family, blocks: Blocks, option: StageOption, known_s: float) -> tuple[Plan, Estimate] | None:
    """The fastest plan whose stages all have one option and whole blocks, with nothing recomputed, if it is faster than `known_s`."""
    depth = family.num_devices // option.num_devices
    space = build_space(
        [family.costs(option)], blocks, Machine(family.pools, 1.0, 0.0), max_stages=depth, longest=known_s / family.count,
        cuts=blocks.start, recompute="never",
    )  # fmt: skip
    found = best_partition(space, family.count, known_s)
    plan = _estimated(family, DEFAULT_SCHEDULE, space, found.stages) if found.stages else None
    return plan if plan is not None and plan[1].fits and plan[1].time_s < known_s else None


def option_costs(family: Family, part: Pass, schedule: str, of: Callable[[StageOption], OptionCosts]) -> list[OptionCosts]:
    """The costs of a pass's options; under a zero-bubble schedule with what of them does not count when the pipeline fills."""
    costs = [of(option) for option in part.options]
    if SCHEDULES[schedule].fill_relief:
        costs = [replace(c, relief=np.maximum(c.compute - family.filling(c.option), 0.0)) for c in costs]
    return costs


def bound_of_pass(
    family: Family, blocks: Blocks, part: Pass, schedule: str, known_s: float, least_s: float, good_s: float
) -> tuple[float, list[tuple[Plan, Estimate]]]:
    """What no plan of a pass under one schedule that is faster than `known_s` can be below, and plans met on the way that fit.

    Zero-bubble schedules recompute nothing, and every stage holds as many micro-batches as there are stages.
    """
    found = [
        _bound(family, blocks, replace(part, max_stages=most), schedule, _in_flight(family, schedule, fewer), known_s, least_s, good_s)
        for most, fewer in pairwise(_depths(part, schedule))
    ]
    return min(bound for bound, _ in found), [plan for _, plans in found for plan in plans]


def _bound(
    family: Family, blocks: Blocks, part: Pass, schedule: str, in_flight: int, known_s: float, least_s: float, good_s: float
) -> tuple[float, list[tuple[Plan, Estimate]]]:
    """The same where every stage of a zero-bubble schedule holds at least `in_flight` micro-batches.

    A very long chain is cut between blocks alone, and each stage but the first is let off its first blocks.
    """
    least_s = max(least_s, pass_bound(family, part, known_s, schedule, in_flight).time_s)
    if least_s >= good_s:
        return min(least_s, known_s), []
    zero_bubble, long_chain = SCHEDULES[schedule].splits_backward, int(blocks.start[-1]) > LONG_CHAIN
    stride = -(-(len(blocks.start) - 1) // BOUND_CUTS)
    cuts = np.append(blocks.start[:-1:stride], blocks.start[-1])
    space = build_space(
        option_costs(family, part, schedule, family.least_costs), blocks, Machine(family.pools, 1.0, 0.0), max_stages=part.max_stages,
        longest=known_s / family.count, recompute="never" if zero_bubble else "bounded",
        cuts=blocks.start[[0, -1]] if part.max_stages == 1 else cuts if long_chain else None,
        levels=None if zero_bubble else [family.levels(option, blocks) for option in part.options],
        in_flight=in_flight if zero_bubble else 0,
    )  # fmt: skip
    answer = Priced(family, part, space.inner() if long_chain and part.max_stages > 1 else space, known_s).solve(least_s, good_s)
    if not answer.stages or answer.time_s >= known_s:
        return answer.bound_s, []
    found = _estimated(family, schedule, space, answer.stages)
    return answer.bound_s, [found] if found[1].fits else []


def _blocks_near(stages: Sequence[StageChoice], blocks: Blocks, window: int) -> np.ndarray:
    """The edges of so many blocks on both sides of each cut."""
    last = len(blocks.start) - 1
    at = np.searchsorted(blocks.start, [stage.first for stage in stages[1:]])
    near = {0, last, *(n for block in at for n in range(max(int(block) - window, 0), min(int(block) + window, last) + 1))}
    return np.asarray(blocks.start[sorted(near)])


def _ops_near(stages: Sequence[StageChoice], blocks: Blocks, window: int) -> np.ndarray:
    """Every op of the two blocks at each cut."""
    cuts = {0, int(blocks.start[-1])}
    for stage in stages[1:]:
        block = int(np.searchsorted(blocks.start, stage.first))
        cuts.update(range(int(blocks.start[max(block - 1, 0)]), int(blocks.start[min(block + 1, len(blocks.start) - 1)]) + 1))
    return np.array(sorted(cuts))


def _estimated(family: Family, schedule: str, space: StageSpace, chosen: Sequence[StageChoice]) -> tuple[Plan, Estimate]:
    """The plan of these stages in the better of two orders of ranks."""
    schedule = schedule if len(chosen) > 1 else DEFAULT_SCHEDULE
    plans = [
        replace(_plan(family, space, chosen, together), schedule=schedule)
        for together in ((False, True) if family.replicas > 1 else (False,))
    ]
    estimates = [(plan, family.request.estimator.estimate(plan)) for plan in plans]
    return min(estimates, key=lambda pair: (not pair[1].fits, pair[1].time_s))


def _plan(family: Family, space: StageSpace, chosen: Sequence[StageChoice], together: bool) -> Plan:
    stages = []
    for stage in chosen:
        option = space.costs[stage.option].option
        again = np.flatnonzero(recompute_flags(space, stage)) + stage.first
        pattern = join_ranges((int(op), int(op) + 1) for op in again)
        stages.append(Stage(
            stage.first, stage.last, devices=family.ranks(option, stage.start, together), degrees=Degrees(option.tp, option.dp),
            recompute=(pattern,) if pattern else (), zero=option.zero if option.dp * family.replicas > 1 else 0,
            sequence_parallel=option.sequence,
        ))  # fmt: skip
    frame = family.request.frame
    batching = replace(frame.micro_batching, samples=family.samples)
    return replace(frame, stages=tuple(stages), num_replicas=family.replicas, micro_batching=batching)


def blocks_of(model: Model) -> Blocks:
    """The model's blocks; those beside the layers are never recomputed."""
    found = Blocks.of(model, [True] * model.num_ops)
    beside = np.array([model.ops[int(start)].block in BESIDE for start in found.start[:-1]])
    kind = np.where(beside, -1, found.kind)
    used = {int(old): new for new, old in enumerate(sorted(set(kind.tolist()) - {-1}))}
    return replace(found, kind=np.array([used.get(int(old), -1) for old in kind]))
