"""Time and money: the best plan of every cluster that can be bought from a pool of nodes, and which of them are worth having.

A cluster is some nodes of each kind of the pool. One is dominated if another is no slower and no dearer, and better in one of these:
devices are paid for by the hour, so that fewer of them are no merit of their own. A cluster whose bound is dominated is not searched, and
in others no plan is looked for that would be: clusters of one kind, which are searched in a moment, come first. What has no offer is left
out, with the reason.

Clusters are searched in waves, those of one wave by several processes and without knowing of each other:

    1  1  2  4  8  16  16  16 …

Each wave is as large as all before it, so that rivals are at hand early, and has a size of its own whatever the number of processes, so
that they make no difference to the answer. Those that are worth having are then searched once more as `penstock search` does, which meets
other plans while it proves: both give one answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from typing import TypeAlias

from penstock.clusters import Cluster
from penstock.errors import InfeasibleError, InputError
from penstock.processes.team import Team
from penstock.search.choice import FORMULA_OFF, Choice
from penstock.search.engine import Outcome, search
from penstock.search.space.request import Request

__all__ = ["LeftOut", "Objective", "Offer", "chosen", "clusters_of", "num_steps", "offers"]

MAX_CLUSTERS = 2000
_WAVE, _SHARED = 16, 8
"""Clusters of a wave at most, and at least where processes share them, each of which takes a second to start."""
_Item: TypeAlias = "tuple[Cluster, Sequence[Offer] | None]"
"""A cluster, and the offers that its plan would have to be worth having beside; None to search it whatever there is."""
_OBJECTIVE = re.compile(r"(time|cost)(?:@(time|cost)<=([0-9.eE+]+))?")


@dataclass(frozen=True)
class Objective:
    """What to make small, `time` or `cost`, and the most of the other, in hours or USD for the whole training."""

    goal: str = "time"
    limit: float = math.inf

    @classmethod
    def parse(cls, text: str) -> Objective:
        """`time`, `cost`, `time@cost<=USD` or `cost@time<=HOURS`."""
        found = _OBJECTIVE.fullmatch(text.replace(" ", ""))
        if not found or found[1] == found[2]:
            raise InputError(f"--objective is '{text}'; expected time, cost, time@cost<=USD or cost@time<=HOURS.")
        try:
            return cls(found[1], float(found[3]) if found[3] else math.inf)
        except ValueError:
            raise InputError(f"--objective is '{text}'; '{found[3]}' is not a number.") from None

    @property
    def is_time(self) -> bool:
        """Whether speed alone counts, so that the whole cluster is used."""
        return self.goal == "time" and self.limit == math.inf


@dataclass(frozen=True)
class Offer:
    """A cluster with its best plan and what the training then takes."""

    cluster: Cluster
    choice: Choice
    bound_s: float
    hours: float
    """For all steps."""
    usd: float
    dominated_by: str = ""
    """The cluster that is better in time or money and no worse in the other, if there is one."""

    @property
    def num_devices(self) -> int:
        """Devices that are paid for."""
        return self.cluster.num_devices

    def beats(self, hours: float, usd: float) -> bool:
        """Whether this offer is no worse in time and money and better in one of them."""
        mine, its = (self.hours, self.usd), (hours, usd)
        return all(a <= b * (1 + 1e-9) for a, b in zip(mine, its, strict=True)) and any(
            a < b * (1 - 1e-9) for a, b in zip(mine, its, strict=True)
        )


def num_steps(request: Request, steps: int | None, tokens: float | None) -> int:
    """Iterations to train for, given or from a number of tokens; one if neither is given."""
    if steps is not None and tokens is not None:
        raise InputError("--steps and --tokens say the same thing; give one of them.")
    if tokens is not None:
        per_step = request.frame.global_batch * (request.frame.seq_length + request.frame.dec_length)
        if not per_step:
            raise InputError(f"--tokens means nothing for {request.model.name}, which works on images; use --steps.")
        return math.ceil(tokens / per_step)
    return 1 if steps is None else steps


def clusters_of(pool: Cluster) -> Iterator[Cluster]:
    """Every choice of nodes, those of few kinds first, then small ones, so that parts of one come before it; the pool's kinds keep their
    order."""
    if any(run.node.price_usd_per_h is None for run in pool.runs):
        unknown = next(run.node.name for run in pool.runs if run.node.price_usd_per_h is None)
        raise InputError(f"node '{unknown}' has no price; give one in a cluster file (`price_usd_per_h`) or use an instance name.")
    count = math.prod(run.count + 1 for run in pool.runs) - 1
    if count > MAX_CLUSTERS:
        raise InputError(f"the pool has {count:,} choices of nodes; at most {MAX_CLUSTERS} are compared. Give fewer nodes or kinds.")
    choices = product(*(range(run.count + 1) for run in pool.runs))
    for counts in sorted(choices, key=lambda counts: (sum(map(bool, counts)), sum(counts), counts)):
        runs = tuple(replace(run, count=number) for run, number in zip(pool.runs, counts, strict=True) if number)
        if runs:
            yield Cluster("+".join(f"{run.count}x{run.node.name}" for run in runs), runs)


@dataclass(frozen=True)
class LeftOut:
    """A cluster without an offer."""

    cluster: Cluster
    reason: str
    status: str
    """`bounded out` (beaten even at its bound), `dominated` (no faster than a part of it), `out of memory`, `no plan` for other reasons."""


def offers(
    request: Request, steps: int, watch: Callable[[str, int, int], None] = lambda text, done, count: None, workers: int = 1
) -> tuple[list[Offer], list[LeftOut]]:
    """The best plan of every cluster of the request's pool that is not dominated from the start, each with what dominates it; and all
    others. `watch` is told each cluster that is begun, how many were before it, and how many there are; with more than one of `workers`,
    as many processes may search."""
    found: list[Offer] = []
    left: list[LeftOut] = []
    clusters, begun = list(clusters_of(request.cluster)), count()
    with Team(partial(_searched, request, steps), min(workers, _WAVE), _SHARED) as team:
        for wave in _waves(clusters):
            known = tuple(found)
            items: list[_Item] = [(cluster, known) for cluster in wave]
            answers = team.each(items, lambda item: watch(item[0].name, next(begun), len(clusters)))
            for answer in answers:
                settled = _settled(answer, found, steps) if isinstance(answer, Offer) else answer
                if isinstance(settled, Offer):
                    found.append(settled)
                else:
                    left.append(settled)
        found = _as_searched(found, team)
    if not found:
        raise InfeasibleError(
            f"no choice of nodes from {request.cluster.describe()} can train {request.model.name} with a global batch of "
            f"{request.frame.global_batch}. Use more or larger nodes, or smaller micro-batches."
        )
    return [replace(offer, dominated_by=_dominator(offer, found)) for offer in found], left


def _as_searched(found: Sequence[Offer], team: Team[_Item, Offer | LeftOut]) -> list[Offer]:
    """The offers, those that none beats with the plans that a search of their clusters alone finds."""
    offers, looked = {offer.cluster.name: offer for offer in found}, set[str]()
    while new := [offer for name, offer in offers.items() if name not in looked and not _dominator(offer, [*offers.values()])]:
        answers = team.each([(offer.cluster, None) for offer in new])
        offers.update((answer.cluster.name, answer) for answer in answers if isinstance(answer, Offer))
        looked.update(offer.cluster.name for offer in new)
    return list(offers.values())


def _waves(clusters: Sequence[Cluster]) -> Iterator[Sequence[Cluster]]:
    """Clusters that are searched without knowing of each other's plans, in their order."""
    first = 0
    while first < len(clusters):
        last = first + min(max(first, 1), _WAVE)
        yield clusters[first:last]
        first = last


def _searched(request: Request, steps: int, item: _Item) -> Offer | LeftOut:
    """The best plan of a cluster, as far as it may be worth having beside some offers; without any, as a search of it alone finds it."""
    cluster, found = item
    if found is None:
        return _offer(cluster, search(request.on(cluster), top=1), steps)
    price = cluster.price_usd_per_h or 0.0
    beaten: list[str] = []

    def worth(bound_s: float) -> bool:
        hours = bound_s * steps / 3600
        if math.isfinite(hours):
            beaten.extend([offer.cluster.name for offer in found if offer.beats(hours, hours * price)][:1])
        return not beaten

    rivals = _rivals(cluster, found, steps)
    rival = min(rivals, key=lambda one: one.formula_s, default=None)
    known_s = math.inf if rival is None else rival.formula_s
    try:
        # What leaves a node idle is as fast without it, and cheaper.
        outcome = search(request.on_all_of(cluster), top=1, prove=False, known_s=known_s, worth=worth)
    except InfeasibleError as error:
        return LeftOut(cluster, *(_reason(error, beaten) if beaten or rival is None else rival.reason()))
    return _offer(cluster, outcome, steps)


def _offer(cluster: Cluster, outcome: Outcome, steps: int) -> Offer:
    """What was found for a cluster."""
    if outcome.stopped:  # half of a search would answer for this cluster alone
        raise KeyboardInterrupt
    hours = outcome.choices[0].estimate.time_s * steps / 3600
    return Offer(cluster, outcome.choices[0], outcome.bound_s, hours, hours * (cluster.price_usd_per_h or 0.0))


def _settled(offer: Offer, found: Sequence[Offer], steps: int) -> Offer | LeftOut:
    """The offer, unless one of its rivals among those before it, also of its own wave, beats it."""
    better = [one for one in _rivals(offer.cluster, found, steps) if one.offer.beats(offer.hours, offer.usd)]
    return LeftOut(offer.cluster, *better[0].reason()) if better else offer


@dataclass(frozen=True)
class _Rival:
    """An offer that beats all plans of a cluster that are not faster than some time."""

    offer: Offer
    formula_s: float
    """That time, by formula."""
    is_part: bool
    """Whether the cluster has its nodes and more, where its plan is as fast, and dearer."""

    @classmethod
    def of(cls, offer: Offer, cluster: Cluster, steps_per_h: float) -> _Rival:
        price, estimate, is_part = cluster.price_usd_per_h or 0.0, offer.choice.estimate, _is_part(offer.cluster, cluster)
        hours = max(offer.hours, offer.usd / price if price else math.inf)
        # Hours are by the clock, which finds pipelines faster than the formula does, each by about as much, but not plans of one stage.
        beaten_s = hours * steps_per_h * estimate.formula_s / estimate.time_s
        alike = 1 + FORMULA_OFF if offer.choice.plan.num_stages == 1 else 1.0
        return cls(offer, alike * (min(estimate.formula_s, beaten_s) if is_part else beaten_s), is_part)

    def reason(self) -> tuple[str, str]:
        """Why a cluster has no offer that is not faster, in a sentence and in a word."""
        name = self.offer.cluster.name
        if self.is_part:
            return f"no plan was found that is faster than that of {name}, which is a part of it", "dominated"
        return f"no plan was found that {name} does not beat in time and money", "dominated"


def _rivals(cluster: Cluster, found: Sequence[Offer], steps: int) -> list[_Rival]:
    """All offers, if one of them is of a part of the cluster. Where no part has a plan, memory may be why, and is to be told."""
    rivals = [_Rival.of(offer, cluster, 3600 / steps) for offer in found]
    return rivals if any(one.is_part for one in rivals) else []


def _reason(error: InfeasibleError, beaten: Sequence[str]) -> tuple[str, str]:
    """Why a cluster has no offer, in a sentence and in a word."""
    if beaten:
        return f"beaten by {beaten[0]}, even if it were as fast as its bound", "bounded out"
    return str(error), "out of memory" if " fits on " in str(error) else "no plan"


def _is_part(some: Cluster, more: Cluster) -> bool:
    """Whether a choice of nodes of a pool holds no others than another does."""
    counts = {run.node: run.count for run in more.runs}
    return all(run.count <= counts.get(run.node, 0) for run in some.runs)


def _dominator(offer: Offer, found: Sequence[Offer]) -> str:
    better = [other for other in found if other.beats(offer.hours, offer.usd)]
    return min(better, key=lambda other: (other.usd, other.hours)).cluster.name if better else ""


def chosen(found: list[Offer], objective: Objective) -> Offer:
    """The best offer within the limit; where none is, says which limit binds and the least that would do."""
    by_time = objective.goal == "time"
    within = [offer for offer in found if (offer.usd if by_time else offer.hours) <= objective.limit]
    if within:
        return min(within, key=lambda offer: (offer.hours, offer.usd) if by_time else (offer.usd, offer.hours))
    if by_time:
        least = min(found, key=lambda offer: offer.usd)
        raise InfeasibleError(
            f"no plan trains for {objective.limit:,.2f} USD: the cheapest takes {least.usd:,.2f} USD in {least.hours:,.2f} hours on "
            f"{least.cluster.name}. Raise the limit to that, or train for fewer steps."
        )
    least = min(found, key=lambda offer: offer.hours)
    raise InfeasibleError(
        f"no plan trains within {objective.limit:,.2f} hours: the fastest takes {least.hours:,.2f} hours and {least.usd:,.2f} USD on "
        f"{least.cluster.name}. Raise the limit to that, add nodes, or train for fewer steps."
    )
