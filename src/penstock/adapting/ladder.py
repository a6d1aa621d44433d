"""What could be done about slow devices, cheapest first, each with the plan it leads to, its time at measured speeds and what moving costs.

    nothing         the present plan
    shares          other parts of the samples for each replica, and for the dp ranks of each stage; no state moves
    cuts            other ops for each device group
    recomputation   other ops recomputed, with cuts that fit
    order           the slow group at another place of the pipeline
    eviction        the slow group, or the replica it is in, is left out
    addition        devices that are free take part, or take the slow ones' place; plans that were left may come back
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from penstock.adapting.holdings import Layouts
from penstock.adapting.moves import Moves, moves
from penstock.adapting.split_moves import split_moves
from penstock.batching.misplanning import misplanned
from penstock.clusters import Cluster
from penstock.costs.source import CostSource
from penstock.costs.speeds import OpClass, SlowedCosts, Speeds
from penstock.models.ops import Model
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Plan, Stage
from penstock.plans.ranks import pairs_of
from penstock.plans.validity import check_plan
from penstock.schedules.rules import SCHEDULES
from penstock.search.present_cuts import with_cuts, with_present_cuts
from penstock.timing.estimate import Estimator
from penstock.timing.iteration_estimate import Estimate
from penstock.timing.pipeline import at_plan_speeds, micro_batches
from penstock.timing.planned import clocked

__all__ = ["Ladder", "Remedy", "Rung", "rung_between"]

PAUSE_STEPS, PAUSE_LINK = 1.0, 1.5
"""A move stops training for so many steps, and for so many times what the busiest link needs."""
_DIVIDED = 8
"""Samples for each of several dp ranks, of which they can have unequal parts."""
_SLOW = 1.05
"""From here on a device is one that others could relieve."""


class Rung(StrEnum):
    """Kinds of steps, cheapest first."""

    NOTHING = "nothing"
    SHARES = "shares"
    CUTS = "cuts"
    RECOMPUTATION = "recomputation"
    ORDER = "order"
    EVICTION = "eviction"
    ADDITION = "addition"


@dataclass(frozen=True)
class Remedy:
    """One thing that could be done."""

    rung: Rung
    plan: Plan
    time_s: float
    """One iteration at the measured speeds, by the clock."""
    pause_s: float = 0.0
    """How long training would stand still for it."""
    moved_bytes: int = 0
    refused: str = ""
    """Why it cannot be done; empty if it can."""


def rung_between(old: Plan, new: Plan) -> Rung:
    """The kind of step that leads from one plan to the other."""
    before, after = set(old.ranks), set(new.ranks)
    if after - before:
        return Rung.ADDITION
    if before - after:
        return Rung.EVICTION
    if [stage.devices for stage in old.stages] != [stage.devices for stage in new.stages]:
        return Rung.ORDER
    cuts = [[stage.first for stage in plan.stages] for plan in (old, new)]
    patterns = [[op for stage in plan.stages for pattern in stage.recompute for op in pattern] for plan in (old, new)]
    if cuts[0] != cuts[1]:
        # Patterns of stages change with their cuts; ops recomputed in one plan alone are another kind of step.
        same = {op for a, b in patterns[0] for op in range(a, b)} == {op for a, b in patterns[1] for op in range(a, b)}
        return Rung.CUTS if same else Rung.RECOMPUTATION
    if patterns[0] != patterns[1]:
        return Rung.RECOMPUTATION
    return Rung.SHARES if old.micro_batching != new.micro_batching else Rung.NOTHING


class Ladder:
    """Finds options for plans of one model on one cluster; `source` has the costs of devices that nothing slows."""

    def __init__(self, model: Model, cluster: Cluster, source: CostSource, devices: Sequence[int] | None = None) -> None:
        """`devices` are those that could take part; all of the cluster if not given."""
        self.model, self.cluster, self.source = model, cluster, source
        self.devices = range(cluster.num_devices) if devices is None else devices
        self.layouts = Layouts(model)
        self._estimators: dict[str, Estimator] = {}

    def estimator(self, speeds: Speeds) -> Estimator:
        """The estimator at these speeds; the last few are kept."""
        key = repr((sorted(speeds.ranks.items()), sorted(speeds.links.items())))
        if key not in self._estimators:
            while len(self._estimators) >= 8:
                del self._estimators[next(iter(self._estimators))]
            self._estimators[key] = Estimator(self.model, self.cluster, SlowedCosts(self.source, speeds))
        return self._estimators[key]

    def time_s(self, plan: Plan, speeds: Speeds) -> float:
        """Seconds of one iteration of a plan while devices have these speeds."""
        return self._timed(plan, speeds).time_s

    def _timed(self, plan: Plan, speeds: Speeds) -> Estimate:
        """Estimates a plan by the clock; it takes longer where its micro-batches are chosen for other links than there are."""
        found = _timed(plan, self.estimator(speeds))
        if plan.micro_batching.policy == "fixed" or plan.micro_batching.slower_links == _links_of(plan, speeds):
            return found
        believed = at_plan_speeds(self.source, _with_batching(plan, slower=()))
        longer = misplanned(plan, self.model, self.cluster, SlowedCosts(self.source, speeds), believed)
        return found.with_times(longer * found.time_s, longer * found.pipeline_s)

    def options(self, plan: Plan, speeds: Speeds, known: Iterable[Plan] = ()) -> tuple[Remedy, ...]:
        """The best plan of each kind of step, cheapest kind first; `known` are plans that the run has had."""
        estimator = self.estimator(speeds)
        present = self._timed(plan, speeds)
        best: dict[Rung, tuple[float, Plan, Estimate]] = {}
        candidates = (plan, *_candidates(plan, present, estimator, speeds, self.devices), *known)
        for candidate in (one for each in candidates for one in _planned_for(each, speeds)):
            rung = rung_between(plan, candidate)
            if rung is Rung.NOTHING:
                continue
            found = self._timed(candidate, speeds)
            rank = found.time_s if found.fits else math.inf
            if rung not in best or rank < best[rung][0]:
                best[rung] = rank, candidate, found
        taken = [self._option(plan, rung, *best[rung][1:], estimator, present.time_s) for rung in Rung if rung in best]
        return (Remedy(Rung.NOTHING, plan, present.time_s), *taken)

    def _option(self, plan: Plan, rung: Rung, new: Plan, found: Estimate, estimator: Estimator, step_s: float) -> Remedy:
        problems = [*check_plan(new, self.model, self.cluster), *unsupported(new, self.model)]
        if rung is Rung.SHARES or problems:
            return Remedy(rung, new, found.time_s, refused=problems[0] if problems else _unfit(found))
        made = moves(plan, new, layouts=self.layouts, cluster=self.cluster)
        pause_s = PAUSE_STEPS * step_s + PAUSE_LINK * self._standing_s(plan, new, made, estimator.cluster)
        refused = _unfit(found) or made.unfit(self.cluster)
        return Remedy(rung, new, found.time_s, pause_s, made.num_bytes, refused)

    def _standing_s(self, old: Plan, new: Plan, made: Moves, cluster: Cluster) -> float:
        """Seconds for which training stands still while state travels: all of it, or what cannot travel while a step runs."""
        return min(made.time_s(cluster), split_moves(old, new, made, self.layouts).pause_s(made, cluster))


def _timed(plan: Plan, estimator: Estimator) -> Estimate:
    """Estimates a plan by the clock. Of dynamic micro-batches it is known only that they could have one sample: dp ranks are timed with
    some more, which can be divided."""
    found, dp = clocked(plan, estimator.estimate(plan)), max(stage.degrees.dp for stage in plan.stages)
    if plan.micro_batching.policy == "fixed" or dp == 1 or found.samples >= _DIVIDED * dp:
        return found
    wider = _with_batching(plan, samples=_DIVIDED * dp, max_tokens=None)
    timed = clocked(wider, estimator.estimate(wider))
    return found.with_times(timed.time_s, timed.pipeline_s)


def _unfit(found: Estimate) -> str:
    for stage in found.stages:
        if not stage.fits:
            return f"stage {stage.index} would hold {stage.memory.total_bytes / 1e9:.1f} GB of {stage.limit_bytes / 1e9:.1f} GB"
    return ""


def _candidates(plan: Plan, present: Estimate, estimator: Estimator, speeds: Speeds, devices: Sequence[int]) -> Iterator[Plan]:
    """Plans of all kinds of steps."""
    shared = list(_with_shares(plan, estimator))
    yield from shared
    for start in (plan, *shared):
        yield from with_present_cuts(start, present, estimator)
    if SCHEDULES[plan.schedule].recomputes:
        for ops in (range(0), range(estimator.model.num_ops)):
            yield from with_present_cuts(plan, present, estimator, ops)
    slow = [number for number, stage in enumerate(plan.stages) if any(_is_slow(speeds, ranks) for ranks in stage.devices)]
    yield from _reordered(plan, slow, estimator)
    yield from _without(plan, slow, speeds, estimator)
    yield from _with_free_devices(plan, speeds, estimator, devices)


def _is_slow(speeds: Speeds, ranks: Sequence[int]) -> bool:
    return any(speeds.factor(rank, op_class) >= _SLOW for rank in ranks for op_class in OpClass)


def _planned_for(plan: Plan, speeds: Speeds) -> Iterator[Plan]:
    """The plan with micro-batches chosen, and divided among dp ranks, for these speeds. Fixed ones may as well be divided evenly: parts are
    the same on all stages, of which perhaps one alone has a slow rank."""
    divides = any(stage.degrees.dp > 1 for stage in plan.stages)
    ranks = [rank for rank in plan.ranks if rank in speeds.ranks]
    a, b, c = OpClass
    slower = tuple((rank, (speeds.factor(rank, a), speeds.factor(rank, b), speeds.factor(rank, c))) for rank in ranks)
    dynamic = plan.micro_batching.policy == "dynamic"
    links = _links_of(plan, speeds) if dynamic else ()
    for own in [slower] if dynamic else [(), slower] if divides and slower else [()]:
        same = (own, links) == (plan.micro_batching.slower, plan.micro_batching.slower_links)
        yield plan if same else _with_batching(plan, slower=own, slower_links=links)


def _links_of(plan: Plan, speeds: Speeds) -> tuple[tuple[int, int, float], ...]:
    """The slow ones among the links that a plan sends over."""
    return tuple((*pair, factor) for pair in pairs_of(plan) if (factor := speeds.link_factor(*pair)) != 1.0)


def _with_batching(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, micro_batching=replace(plan.micro_batching, **fields), predicted=None)


def _with_shares(plan: Plan, estimator: Estimator) -> Iterator[Plan]:
    """Micro-batches dealt out one by one, each to the replica that would be done first."""
    samples, counts = micro_batches(plan)
    batching = plan.micro_batching
    if batching.policy != "fixed" or not batching.samples or plan.num_replicas == 1 or sum(counts) < plan.num_replicas:
        return
    paces = estimator.paces(plan)
    shares = [1] * plan.num_replicas

    def ends_s(replica: int, count: int) -> float:
        pace = paces[replica]
        return SCHEDULES[plan.schedule].pipeline_s(pace.times_s, count, plan.num_chunks, pace.weight_s)

    for _ in range(plan.global_batch // samples - plan.num_replicas):
        first = min(range(plan.num_replicas), key=lambda replica: ends_s(replica, shares[replica] + 1))
        shares[first] += 1
    yield _with_batching(plan, per_replica=tuple(shares))


def _reordered(plan: Plan, slow: Sequence[int], estimator: Estimator) -> Iterator[Plan]:
    """The slow group changes places with each other group of the same degrees."""
    for number in slow:
        for other in range(plan.num_stages):
            one, its = plan.stages[number], plan.stages[other]
            if other != number and (one.degrees, one.zero) == (its.degrees, its.zero):
                stages = list(plan.stages)
                stages[number], stages[other] = replace(one, devices=its.devices), replace(its, devices=one.devices)
                swapped = replace(plan, stages=tuple(stages), predicted=None)
                yield swapped
                yield from with_present_cuts(swapped, estimator.estimate(swapped), estimator)


def _without(plan: Plan, slow: Sequence[int], speeds: Speeds, estimator: Estimator) -> Iterator[Plan]:
    """The plan without what is slow: without its slow replicas where there are several, else without the slow device group."""
    if plan.num_replicas > 1:
        kept = [r for r in range(plan.num_replicas) if not any(_is_slow(speeds, stage.devices[r]) for stage in plan.stages)]
        if kept and len(kept) < plan.num_replicas:
            stages = tuple(replace(stage, devices=tuple(stage.devices[r] for r in kept)) for stage in plan.stages)
            batching = replace(plan.micro_batching, per_replica=())
            fewer = replace(plan, stages=stages, num_replicas=len(kept), micro_batching=batching, predicted=None)
            yield fewer
            yield from _with_shares(fewer, estimator)
        return
    if plan.num_groups != plan.num_stages or any(stage.runs for stage in plan.stages):
        return
    for number in slow if plan.num_stages > max(1, SCHEDULES[plan.schedule].min_groups) else ():
        stages = tuple(stage for at, stage in enumerate(plan.stages) if at != number)
        cuts = [0, *(stage.last for stage in stages[:-1]), plan.stages[-1].last]
        shorter = with_cuts(replace(plan, stages=stages), cuts, {op for stage in plan.stages for op in _recomputed(stage)})
        yield shorter
        yield from with_present_cuts(shorter, estimator.estimate(shorter), estimator)


def _recomputed(stage: Stage) -> Iterator[int]:
    return (op for first, last in stage.pattern() for op in range(first, last))


def _with_free_devices(plan: Plan, speeds: Speeds, estimator: Estimator, devices: Sequence[int]) -> Iterator[Plan]:
    """Free devices in place of slow ones of their kind, those of the same node first."""
    cluster = estimator.cluster
    free = [rank for rank in devices if rank not in set(plan.ranks) and not _is_slow(speeds, [rank])]
    instead: dict[int, int] = {}
    for rank in plan.ranks:
        if _is_slow(speeds, [rank]):
            fitting = [other for other in free if cluster.device(other).kind == cluster.device(rank).kind]
            if fitting:
                instead[rank] = min(fitting, key=lambda other: (cluster.node_index(other) != cluster.node_index(rank), other))
                free.remove(instead[rank])
    if instead:
        taken = [tuple(tuple(instead.get(rank, rank) for rank in ranks) for ranks in stage.devices) for stage in plan.stages]
        stages = tuple(replace(stage, devices=own) for stage, own in zip(plan.stages, taken, strict=True))
        yield replace(plan, stages=stages, predicted=None)
