"""The search: families in order of promise, each solved while it can still beat the best plan; then the bound is made sharp.

Everything is deterministic but for the time budget: what is found before it ends, or before Ctrl-C, is the answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from penstock.costs.source import CostSource
from penstock.errors import InfeasibleError, InputError
from penstock.plans.plan import Plan
from penstock.plans.validity import require_valid
from penstock.schedules.rules import DEFAULT_SCHEDULE, SEARCHED_SCHEDULES, unchunked
from penstock.search.bounds.by_ops import Bound, family_bound, promise_s
from penstock.search.bounds.crossing import crossing_bound_s
from penstock.search.choice import Choice
from penstock.search.interleaved.ways import Interleaving, best_interleaved, divides_evenly, interleavings, sharper_bound_s
from penstock.search.op_degrees.mixed_plans import free_bound_s, mixed_plans
from penstock.search.partition.pipelines import best_pipeline, blocks_of, bound_of_pass
from penstock.search.refine import refined
from penstock.search.replicas.replica_families import ReplicaFamily, replica_families
from penstock.search.replicas.shares import rebalanced
from penstock.search.request import Request
from penstock.search.reschedule import rescheduled
from penstock.search.space.families import Family, Pass, families
from penstock.search.uniform import uniform_choices

__all__ = ["Outcome", "ProofLine", "Watch", "search", "search_plans"]

Watch = Callable[[str, float, float], None]
"""Told what is being done, the best time so far and the bound so far, in seconds."""


def _unwatched(text: str, best_s: float, bound_s: float) -> None:
    """Nobody is told."""


GOOD_GAP = 0.03
"""A bound this near is not made sharper."""
_CAPS = (1.3, 3.0, math.inf)
"""Multiples of the best promise below which plans are looked for in turn: little is tabulated as long as plans are short."""
MAX_HOPS = 7
"""Changes in a row by which a plan is refined."""
_TRIED_WAYS, _TRIED_RANKS = 24, 200_000
"""Ways to interleave that are looked at, and about the ranks of all of them together."""
_GRID_DEVICES = 256
"""Clusters up to this size are also tried with all uniform plans, to show beside the best,"""
_GRID_OPS = 2000
"""for chains up to this length, which are also refined."""


@dataclass(frozen=True)
class ProofLine:
    """How far one pass of a family was excluded."""

    replicas: int
    micro_batch: int
    part: Pass
    by_ops_s: float
    """From ops and devices alone."""
    by_stages_s: float | None
    """With whole ops, cuts and memory; None where the first was enough."""

    @property
    def bound_s(self) -> float:
        """The sharper of both."""
        return self.by_ops_s if self.by_stages_s is None else max(self.by_ops_s, self.by_stages_s)


@dataclass(frozen=True)
class Outcome:
    """The best plans, what no plan of the space can be faster than, and why."""

    choices: tuple[Choice, ...]
    bound_s: float
    proof: tuple[ProofLine, ...] = ()
    stopped: str = ""
    """`time budget` or `interrupted` where the search did not end by itself."""

    @property
    def gap(self) -> float:
        """How much slower than the bound the best plan is."""
        return self.choices[0].estimate.time_s / self.bound_s - 1


@dataclass
class _State:
    """What was found so far."""

    watch: Watch
    deadline: float
    known_s: float = math.inf
    """The time of a plan that is known from elsewhere."""
    choices: list[Choice] = field(default_factory=list)
    bound_s: float = 0.0
    stopped: str = ""

    @property
    def best_s(self) -> float:
        return min((choice.estimate.time_s for choice in self.choices), default=self.known_s)

    def tell(self, text: str) -> None:
        self.watch(text, self.best_s, min(self.bound_s, self.best_s))

    def out_of_time(self) -> bool:
        if time.monotonic() > self.deadline:
            self.stopped = "time budget"
        return bool(self.stopped)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends what runs inside, if there is an answer already."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.choices:
                raise
            self.stopped = "interrupted"


def search_plans(
    model_ref: str, cluster_ref: str, global_batch: int, *, costs: str | CostSource = "roofline", seq_length: int | None = None,
    micro_batches: Sequence[int] = (), memory_limit_bytes: float = math.inf, schedules: Sequence[str] = SEARCHED_SCHEDULES, top: int = 5,
    time_budget_s: float = math.inf, watch: Watch = _unwatched, max_hops: int = MAX_HOPS,
) -> Outcome:  # fmt: skip
    """The fastest plans that fit, best first, with a bound on the time of all plans of the space.

    >>> outcome = search_plans("gpt-1.3b", "4xa100-40gb", 64, top=1)
    >>> outcome.bound_s <= outcome.choices[0].estimate.time_s
    True
    """
    request = Request.of(model_ref, cluster_ref, global_batch, costs, seq_length, micro_batches, memory_limit_bytes, schedules)
    return search(request, top=top, time_budget_s=time_budget_s, watch=watch, max_hops=max_hops)


def search(
    request: Request, *, top: int = 5, time_budget_s: float = math.inf, watch: Watch = _unwatched, prove: bool = True,
    max_hops: int = MAX_HOPS, known_s: float = math.inf, worth: Callable[[float], bool] = lambda bound_s: True,
) -> Outcome:  # fmt: skip
    """The same for a request that was read already; without `prove` the bound is the first one and uniform plans are not tried.
    The best 1F1B plan is refined by up to `max_hops` changes. Without `prove`, only plans faster than `known_s` are looked for, and none
    if one that takes as long as the first bound would not be `worth` it."""
    if top < 1:
        raise InputError(f"top is {top}; 1 or more was expected.")
    state = _State(watch, time.monotonic() + time_budget_s, known_s)
    found = [(family_bound(family), family) for family in families(request)]
    ranked = sorted(found, key=lambda pair: (pair[0].time_s, pair[1].replicas, pair[1].samples))
    unequal = sorted(replica_families(request), key=lambda family: family.bound_s)
    state.bound_s = min(ranked[0][0].time_s if ranked else math.inf, unequal[0].bound_s if unequal else math.inf)
    if not worth(state.bound_s):
        raise InfeasibleError(f"no plan of {request.model.name} on {request.cluster.describe()} can be good enough.")
    lines: list[ProofLine] = []
    with state.interruptible():
        none_fits = _uniform(request, state, top) if prove else None
        _uneven(request, state, ranked)
        _unequal(request, state, unequal)
        mixed = _mixed(request, state, ranked)
        ways = _interleaved(request, state, ranked)
        _refine(request, state, max_hops)
        _other_schedules(request, state)
        _rebalance(request, state)
        if not state.choices:
            raise none_fits or _nothing_divides(request)
        lines = [*(_prove(request, state, ranked) if prove else []), *mixed]
        lines += _prove_interleaved(state, ways, min((line.bound_s for line in lines), default=math.inf) if prove else 0.0)
        lines += _prove_unequal(request, state, unequal, min((line.bound_s for line in lines), default=math.inf)) if prove else []
        lines.sort(key=lambda line: line.bound_s)
        state.bound_s = min(state.bound_s, *(line.bound_s for line in lines), math.inf)
    ranked_choices = sorted(state.choices, key=lambda choice: (choice.estimate.time_s, choice.estimate.peak_bytes))
    choices = list({_likeness(choice): choice for choice in reversed(ranked_choices)}.values())[::-1][:top]
    require_valid(choices[0].plan, request.model, request.cluster, where="the plan found")
    bound_s = min(state.bound_s, choices[0].estimate.time_s)
    plans = [replace(c, plan=_with_bound(c, bound_s)) for c in choices]
    return Outcome(tuple(plans), bound_s, tuple(lines), state.stopped)


def _likeness(choice: Choice) -> tuple[object, ...]:
    """Equal for plans that do the same under two names, such as replicas instead of samples divided within a stage."""
    plan, estimate = choice.plan, choice.estimate
    return plan.schedule, plan.num_stages, choice.tp, round(estimate.time_s, 12), round(estimate.peak_bytes)


def _with_bound(choice: Choice, bound_s: float) -> Plan:
    assert choice.plan.predicted is not None
    return replace(choice.plan, predicted=replace(choice.plan.predicted, lower_bound_s=bound_s))


def _uniform(request: Request, state: _State, top: int) -> InfeasibleError | None:
    """All uniform plans of a cluster of moderate size; what is missing if none of them fits."""
    if request.cluster.num_devices > _GRID_DEVICES or request.model.num_ops > _GRID_OPS:
        return None
    try:
        state.choices += uniform_choices(request, top, lambda: state.tell("uniform plans"))
    except InfeasibleError as error:
        return error
    return None


def _uneven(request: Request, state: _State, ranked: list[tuple[Bound, Family]]) -> None:
    """Stages of any size, family by family, those first that promise most: a short plan makes the rest quick."""
    blocks = blocks_of(request.model)
    promises = ((max(promise_s(family), bound.time_s), bound.time_s, family) for bound, family in ranked)
    promising = sorted(promises, key=lambda entry: entry[:2])
    least_s = promising[0][0] if promising and math.isfinite(promising[0][0]) else state.bound_s
    for cap in _CAPS if state.best_s == math.inf else (math.inf,):
        limit_s = min(state.best_s, cap * least_s)
        for _, bound_s, family in promising:
            if state.out_of_time():
                break
            if bound_s >= limit_s:
                continue
            state.tell(f"{family.replicas} replicas, micro-batches of {family.samples}")
            found = best_pipeline(family, blocks, limit_s)
            if found is not None:
                state.choices.append(Choice.of(*found, "exact"))
                limit_s = min(limit_s, state.best_s)
        if state.stopped or state.best_s <= cap * least_s:
            return


def _unequal(request: Request, state: _State, ranked: list[ReplicaFamily]) -> None:
    """Replicas of unequal speed, each with its own number of micro-batches, family by family."""
    blocks = blocks_of(request.model)
    for family in ranked:
        if family.bound_s >= state.best_s or state.out_of_time():
            return
        state.tell(f"{len(family.replicas)} replicas of unequal shares, micro-batches of {family.family.samples}")
        found = family.best(blocks, state.best_s)
        state.choices += [Choice.of(*found, "exact")] if found is not None else []


def _prove_unequal(request: Request, state: _State, ranked: list[ReplicaFamily], weakest_s: float) -> list[ProofLine]:
    """Bounds on replicas of unequal speed, made sharp as far as they would be the weakest of all."""
    blocks, lines, enough_s = blocks_of(request.model), [], min(state.best_s / (1 + GOOD_GAP), weakest_s)
    for family in ranked:
        if family.bound_s >= state.best_s:
            break
        sharper = None
        if family.bound_s < enough_s and not state.out_of_time():
            state.tell(f"bound: {len(family.replicas)} replicas of unequal shares, micro-batches of {family.family.samples}")
            sharper = family.sharper_bound_s(blocks, state.best_s)
        line = ProofLine(len(family.replicas), family.family.samples, family.part, family.bound_s, sharper)
        enough_s = min(enough_s, line.bound_s)
        lines.append(line)
    return lines


def _rebalance(request: Request, state: _State) -> None:
    """The best plans so far, with shares that suit the speeds of their replicas."""
    for choice in sorted(state.choices, key=lambda choice: choice.estimate.time_s)[:5]:
        plan = rebalanced(request.estimator, choice.plan)
        if plan.micro_batching != choice.plan.micro_batching and (estimate := request.estimator.estimate(plan)).fits:
            state.choices.append(Choice.of(plan, estimate, choice.kind))


def _mixed(request: Request, state: _State, ranked: list[tuple[Bound, Family]]) -> list[ProofLine]:
    """Stages whose ops have degrees of their own, in families where that may be faster than the best plan so far; and their bounds."""
    lines = []
    for _, family in ranked:
        if (free_s := free_bound_s(family)) >= state.best_s:
            continue
        every = Pass(family.options, family.num_devices, fine=True, mixed=True)
        if state.out_of_time():
            lines.append(ProofLine(family.replicas, family.samples, every, free_s, None))
            continue
        state.tell(f"degrees of each op: {family.replicas} replicas, micro-batches of {family.samples}")
        for plans in mixed_plans(family, state.best_s):
            part = replace(every, max_stages=plans.max_stages)
            lines.append(ProofLine(family.replicas, family.samples, part, free_s, plans.bound_s))
            found = plans.best(state.best_s) if plans.bound_s < state.best_s else None
            state.choices += [Choice.of(*found, "mixed")] if found is not None else []
    return [line for line in lines if line.bound_s < state.best_s]


def _interleaved(request: Request, state: _State, ranked: list[tuple[Bound, Family]]) -> list[Interleaving]:
    """Chunks with cuts of their own, the most promising ways first; returns all ways that might be faster than the best plan before."""
    blocks = blocks_of(request.model)
    every = (way for _, family in ranked for way in interleavings(family))
    ways = sorted((way for way in every if way.bound_s < state.best_s and divides_evenly(way)), key=lambda way: way.bound_s)
    for way in ways[: min(_TRIED_WAYS, max(_TRIED_RANKS // request.cluster.num_devices, 4))]:
        if state.out_of_time() or way.bound_s >= state.best_s:
            break
        state.tell(f"interleaved: {way.family.replicas} replicas, micro-batches of {way.family.samples}, {way.chunks} chunks")
        found = best_interleaved(way, blocks, state.best_s)
        state.choices += [Choice.of(*found, "exact")] if found is not None else []
    return ways


def _prove_interleaved(state: _State, ways: list[Interleaving], weakest_s: float) -> list[ProofLine]:
    """Bounds on interleaved plans, made sharp as far as they would be the weakest of all."""
    lines, enough_s = [], min(state.best_s / (1 + GOOD_GAP), weakest_s)
    for way in ways:
        if way.bound_s < state.best_s:
            sharper_s = sharper_bound_s(way) if way.bound_s < enough_s and not state.out_of_time() else None
            part = Pass((way.option,), way.groups * way.chunks, fine=True, equal=True)
            lines.append(ProofLine(way.family.replicas, way.family.samples, part, way.bound_s, sharper_s))
            enough_s = min(enough_s, lines[-1].bound_s)
    return lines


def _refine(request: Request, state: _State, max_hops: int) -> None:
    """The best 1F1B plans, which the formulas cannot tell apart, by the simulator."""
    default = [choice for choice in state.choices if choice.plan.schedule == DEFAULT_SCHEDULE]
    plain = sorted(default, key=lambda choice: choice.estimate.time_s)
    for choice in [c for c in plain if c.estimate.time_s <= 1.01 * state.best_s][:2]:
        if not state.out_of_time() and max_hops and request.model.num_ops <= _GRID_OPS:
            state.tell("refining")
            better = refined(request, choice, max_hops, state.out_of_time)
            state.choices += [better] if better is not choice else []


def _other_schedules(request: Request, state: _State) -> None:
    """The best plans so far under the other schedules."""
    for choice in sorted(state.choices, key=lambda choice: choice.estimate.time_s)[:3]:
        for plan in rescheduled(request, choice.plan):
            if state.out_of_time():
                return
            estimate = request.estimator.estimate(plan)
            if estimate.fits:
                state.choices.append(Choice.of(plan, estimate, choice.kind))


def _prove(request: Request, state: _State, ranked: list[tuple[Bound, Family]]) -> list[ProofLine]:
    """Makes the bound sharp, the weakest pass first, until it is near everywhere or time is up."""
    blocks, best_s = blocks_of(request.model), state.best_s
    good_s = best_s / (1 + GOOD_GAP)
    weak = sorted((
        (bound, family, part) for early, family in ranked if early.time_s < best_s
        for part in family.passes if (bound := crossing_bound_s(family, part, best_s)) < best_s
    ), key=lambda entry: entry[0])  # fmt: skip

    lines, enough_s = [], good_s
    for bound, family, part in weak:
        sharper = None
        if bound < enough_s and not state.out_of_time():
            state.tell(f"bound: {family.replicas} replicas, micro-batches of {family.samples}")
            found = [bound_of_pass(family, blocks, part, name, best_s, bound, enough_s) for name in unchunked(request.schedules)]
            sharper = min(proven for proven, _ in found)
            state.choices += [Choice.of(*plan, "exact") for _, plans in found for plan in plans]
        lines.append(ProofLine(family.replicas, family.samples, part, bound, sharper))
        enough_s = min(enough_s, lines[-1].bound_s)  # no line needs to be better than the worst
        state.bound_s = max(state.bound_s, min(enough_s, *(entry[0] for entry in weak[len(lines) :]), best_s))
    state.bound_s = min((line.bound_s for line in lines), default=state.best_s)
    return sorted(lines, key=lambda line: line.bound_s)


def _nothing_divides(request: Request) -> InfeasibleError:
    batch, sizes = request.frame.global_batch, request.micro_batches
    return InfeasibleError(
        f"no plan of {request.model.name} fits on {request.cluster.describe()} with a global batch of {batch}"
        + (f" in micro-batches of {', '.join(map(str, sizes))}" if sizes else "")
        + ". Use more or larger devices, shorter sequences, or smaller micro-batches."
    )
