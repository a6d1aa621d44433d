"""The search: a list of searchers, each of one part of the space of plans, then improvers, then the proof.

    1  each searcher bounds its part from the ops alone                     `bound`
    2  each adds plans that are faster than the best so far                  `best`
    3  the best plans are improved: simulator, schedule, shares              `improvers`
    4  each sharpens its bound where that would be the weakest of all        `prove`
    5  the best by formula, and the best of each simpler kind, are timed by the clock, which ranks them
    6  the simplest that is as fast as costs can tell is the one to offer       `simplicity`

A good plan early makes everything after it quick, since whatever cannot beat it is left out; so the order of the list matters for time,
and for the answer only where time runs out. All that was found so far is in `Progress`: what is there when the time budget ends, or at
Ctrl-C, is the answer, and everything else is deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.costs.source import CostSource
from penstock.errors import InfeasibleError, InputError
from penstock.plans.plan import Plan
from penstock.plans.validity import require_valid
from penstock.schedules.rules import SEARCHED_SCHEDULES
from penstock.search.beside_idle import BesideIdle
from penstock.search.choice import FORMULA_OFF, Choice
from penstock.search.improvers import other_schedules, rebalanced_shares, refined_by_simulator
from penstock.search.interleaved.interleaved_plans import InterleavedPlans
from penstock.search.op_degrees.per_op_degrees import PerOpDegrees
from penstock.search.partition.partitions import Partitions
from penstock.search.progress import Progress, ProofLine, Searcher, Watch, unwatched
from penstock.search.refine import MAX_HOPS
from penstock.search.replicas.unequal import UnequalReplicas
from penstock.search.simplicity import fastest_of_each, simplest
from penstock.search.space.families import families
from penstock.search.space.request import Request
from penstock.search.uniform import UniformPlans

__all__ = ["Outcome", "search", "search_plans"]

_MOST_PER_SAMPLE = 128
"""Devices that can share the work on one sample with any use: eight in a tensor-parallel group, sixteen such stages."""
_CLOCKED = 24
"""Plans, the best by formula, that are timed by the clock; formulas are a few percent off, most of all with few micro-batches."""
_CLOCKED_ACTIONS = 1_000_000
"""Passes of all of them together, beyond which only as many are timed as are shown: long pipelines of thousands of micro-batches."""


@dataclass(frozen=True)
class Outcome:
    """The best plans, what no plan of the space can be faster than, and why."""

    choices: tuple[Choice, ...]
    """Timed by the clock, as `penstock simulate` would show them; the fastest first."""
    bound_s: float
    """What no plan of the space can be below by closed formula, where no message is hidden behind compute."""
    formula_s: float
    """The least time by formula of all plans that were found."""
    offered: Choice
    """The simplest of all plans found that are as fast as the first, as far as the costs can tell; often the first itself."""
    error: float = 0.0
    """How far the costs are off by what they say of themselves, as a share."""
    proof: tuple[ProofLine, ...] = ()
    stopped: str = ""
    """`time budget` or `interrupted` where the search did not end by itself."""

    @property
    def gap(self) -> float:
        """How much slower than the bound the best plan is, both by formula."""
        return self.formula_s / self.bound_s - 1

    @property
    def simple_first(self) -> tuple[Choice, ...]:
        """As many plans as `choices`, with the one that is offered first."""
        others = (choice for choice in self.choices if choice is not self.offered)
        return (self.offered, *others)[: len(self.choices)]

    def as_part_of(self, request: Request, note: str) -> Outcome:
        """This outcome with its plans on the first devices of a larger cluster."""

        def placed(choice: Choice) -> Choice:
            plan = replace(choice.plan, cluster=request.frame.cluster, notes=(*choice.plan.notes, note))
            return replace(choice, plan=plan, estimate=replace(choice.estimate, notes=(*choice.estimate.notes, note)))

        moved = {id(choice): placed(choice) for choice in (*self.choices, self.offered)}
        return replace(self, choices=tuple(moved[id(choice)] for choice in self.choices), offered=moved[id(self.offered)])


def search_plans(
    model_ref: str, cluster_ref: str, global_batch: int, *, costs: str | CostSource = "roofline", seq_length: int | None = None,
    micro_batches: Sequence[int] = (), memory_limit_bytes: float = math.inf, schedules: Sequence[str] = SEARCHED_SCHEDULES, top: int = 5,
    time_budget_s: float = math.inf, watch: Watch = unwatched, max_hops: int = MAX_HOPS, precision: str | None = None,
    gradients: str | None = None,
) -> Outcome:  # fmt: skip
    """The fastest plans that fit, best first, with a bound on the time of all plans of the space; `simple_first` has them in the order in
    which `penstock search` offers them.

    >>> outcome = search_plans("gpt-1.3b", "4xa100-40gb", 64, top=1)
    >>> outcome.bound_s <= outcome.formula_s  # the clock hides messages behind compute: `estimate.time_s` may be below both
    True
    """
    request = Request.of(
        model_ref, cluster_ref, global_batch, costs, seq_length, micro_batches, memory_limit_bytes, schedules, precision, gradients
    )
    return search(request, top=top, time_budget_s=time_budget_s, watch=watch, max_hops=max_hops)


def search(
    request: Request, *, top: int = 5, time_budget_s: float = math.inf, watch: Watch = unwatched, prove: bool = True,
    max_hops: int = MAX_HOPS, known_s: float = math.inf, worth: Callable[[float], bool] = lambda bound_s: True,
) -> Outcome:  # fmt: skip
    """Search a parsed `Request`.

    top          plans that are returned
    prove        False skips tightening the bound, and the grid of uniform plans, which is there to be shown beside the best
    max_hops     changes by which the best 1F1B plans are refined
    known_s      time of a plan known from elsewhere, as of a cheaper cluster (`money`): only faster ones are looked for
    worth        asked with the first bound, by `money` again: InfeasibleError where not even such a plan would be of use
    """
    if top < 1:
        raise InputError(f"top is {top}; 1 or more was expected.")
    part = _part_with_work(request)
    progress = Progress(watch, time.monotonic() + time_budget_s, known_s)
    outcome = _searched(part, progress, top, prove, max_hops, worth)
    if outcome is None and part.narrows and known_s == math.inf and not progress.stopped:
        part, progress = part.narrowed(), Progress(watch, progress.deadline)
        outcome = _searched(part, progress, top, prove, max_hops, worth)
    if outcome is None:
        raise progress.reason or _nothing_found(part, progress)
    if part.cluster is request.cluster:
        return outcome
    most = f"a global batch of {request.frame.global_batch} has work for {part.cluster.num_devices}"
    return outcome.as_part_of(request, f"{most} of the {request.cluster.num_devices} devices at most; the others idle.")


def _searched(
    request: Request, progress: Progress, top: int, prove: bool, max_hops: int, worth: Callable[[float], bool]
) -> Outcome | None:  # fmt: skip
    """What the searchers find, improved and proven, all devices being of use; None where they find nothing."""
    grid, unequal = UniformPlans(request, max(_CLOCKED, 3 * top)), UnequalReplicas(request)
    partitions = Partitions(list(families(request)))
    per_op, interleaved = PerOpDegrees(partitions.families), InterleavedPlans(partitions.families)
    searchers: list[Searcher] = [*([grid] if prove else []), partitions, BesideIdle(request), unequal, per_op, interleaved]
    if request.asynchronous:  # one replica, one stage on each group, the same degrees for all of its ops
        searchers = [partitions, BesideIdle(request)]
    progress.bound_s = min(searcher.bound() for searcher in searchers)
    if not worth(progress.bound_s):
        raise InfeasibleError(f"no plan of {request.model.name} on {request.cluster.describe()} can be good enough.")

    with progress.interruptible():
        for searcher in searchers:
            searcher.best(progress)
        partitions.anneal(progress)  # last, since what is found here would keep the others from plans that the clock prefers
        if not request.asynchronous:
            refined_by_simulator(request, progress, max_hops)
            other_schedules(request, progress)
            rebalanced_shares(request, progress)
            partitions.look_by_clock(progress)
        # The proof for unequal replicas takes longest, so it comes last, when some weak line may already make it needless.
        for searcher in sorted(searchers, key=lambda searcher: searcher is unequal) if prove and progress.choices else ():
            searcher.prove(progress)
    return _outcome(request, progress, min(searcher.bound() for searcher in searchers), top) if progress.choices else None


def _part_with_work(request: Request) -> Request:
    """The request for as many of the first nodes as a batch has work for. The others would only hide good plans, since stages come in the
    coarser steps the more devices there are."""
    cluster, most = request.cluster, _MOST_PER_SAMPLE * request.frame.global_batch
    if request.every_node or len(cluster.kinds) > 1 or cluster.overrides:
        return request
    part = cluster.first_nodes(most)
    return request.on(part) if part.num_devices < cluster.num_devices else request


def _outcome(request: Request, progress: Progress, bound_s: float, top: int) -> Outcome:
    """The best plans that differ, by the clock, each with the bound written into it, and the weakest lines of the proof first."""
    ranked = sorted(progress.choices, key=_by_time)
    formula_s, error = ranked[0].estimate.formula_s, request.estimator.source.error
    bound_s = min(bound_s, formula_s)
    different = list({_likeness(choice): choice for choice in reversed(ranked)}.values())[::-1]
    first = different[: max(_CLOCKED, 3 * top)]
    others = {id(choice) for choice in different[len(first) :] if _is_near(choice, formula_s, error)}
    simple = [choice for choice in fastest_of_each(different) if id(choice) in others]
    timed = sorted((*_timed(first, top), *_timed(simple, 0), *progress.clocked), key=_by_time)
    choices = [replace(choice, plan=_with_bound(choice, bound_s)) for choice in timed]
    offered = choices[simplest([choice.plan for choice in choices], [choice.estimate.time_s for choice in choices], error)]
    for choice in (choices[0], offered):
        require_valid(choice.plan, request.model, request.cluster, where="the plan found")
    lines = sorted(progress.lines, key=lambda line: line.bound_s)
    return Outcome(tuple(choices[:top]), bound_s, formula_s, offered, error, tuple(lines), progress.stopped)


def _is_near(choice: Choice, formula_s: float, error: float) -> bool:
    """Whether the clock might find a plan as fast as the best by formula, as far as costs can tell."""
    return error > 0 and choice.estimate.formula_s <= formula_s * (1 + error) * (1 + FORMULA_OFF)


def _timed(choices: Sequence[Choice], top: int) -> Iterator[Choice]:
    """The first of some plans as the clock times them: `top` at least, more while that is quick."""
    left = _CLOCKED_ACTIONS
    for number, choice in enumerate(choices):
        if number >= top and left <= 0:
            return
        left -= 2 * choice.plan.num_stages * choice.estimate.num_micro_batches
        yield choice.clocked()


def _by_time(choice: Choice) -> tuple[float, float]:
    return choice.estimate.time_s, choice.estimate.peak_bytes


def _likeness(choice: Choice) -> tuple[object, ...]:
    """Equal for plans that do the same under two names, such as replicas instead of samples divided within a stage."""
    plan, estimate = choice.plan, choice.estimate
    return plan.schedule, plan.num_stages, choice.tp, round(estimate.time_s, 12), round(estimate.peak_bytes)


def _with_bound(choice: Choice, bound_s: float) -> Plan:
    assert choice.plan.predicted is not None
    return replace(choice.plan, predicted=replace(choice.plan.predicted, lower_bound_s=bound_s))


def _nothing_found(request: Request, progress: Progress) -> InfeasibleError:
    if progress.stopped:
        return InfeasibleError(f"no plan of {request.model.name} on {request.cluster.describe()} was found in time. Allow more of it.")
    if progress.known_s < math.inf:
        return InfeasibleError(f"no plan of {request.model.name} on {request.cluster.describe()} is faster than {progress.known_s:.4g} s.")
    batch, sizes, devices = request.frame.global_batch, request.micro_batches, request.cluster.num_devices
    if devices > _MOST_PER_SAMPLE * batch:
        return InfeasibleError(
            f"no plan gives {devices} devices ({request.cluster.describe()}) work on a global batch of {batch}: each sample would be "
            f"divided among {devices // batch} of them. Use at most {_MOST_PER_SAMPLE * batch} devices, or a larger batch."
        )
    return InfeasibleError(
        f"no plan of {request.model.name} fits on {request.cluster.describe()} with a global batch of {batch}"
        + (f" in micro-batches of {', '.join(map(str, sizes))}" if sizes else "")
        + ". Use more or larger devices, shorter sequences, or smaller micro-batches."
    )
