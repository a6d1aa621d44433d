"""What else there is: why the plans next to one lost, and how fast the best plan would be if one limit were relaxed.

Both search again, quickly: without proof, and each search within a budget of seconds if one is given. What a plan could do before a limit
was relaxed it can do after, so that known plans are tried there as well, and no relaxation seems to make training slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.clusters import DEVICES, Cluster, Device, Link, LinkOverride, Node, NodeRun
from penstock.errors import InfeasibleError, ProfileMissingError
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import check_plan
from penstock.schedules.rules import DEFAULT_SCHEDULE
from penstock.search.choice import Choice
from penstock.search.engine import search
from penstock.search.replicas.shares import rebalanced
from penstock.search.space.request import Request, micro_batch_sizes
from penstock.search.uniform import plans_of_grid
from penstock.timing.estimate import Estimator
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.costs.source import CostSource

__all__ = ["BUDGET_S", "Relaxed", "Rival", "found_beside", "next_device", "relaxations", "relaxed", "request_of", "rivals"]

BUDGET_S = 5.0
"""For each search, where a person waits."""
_GRID_DEVICES, _GRID_OPS = 64, 1000
"""Uniform plans are cheap to try up to these sizes."""
_FACTOR = 2
"""Twice as much of what limits."""
_WORTH = 1.5
"""A device is larger if it has this many times the memory or the arithmetic, and no less of anything."""
_RIVALS = 3
"""Other plans that are shown."""
_NOTHING = "no plan was found that fits"

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Rival:
    """A plan of another kind, beside the one explained."""

    choice: Choice
    slower: float
    """Relative to the plan explained; below 0 where the rival is faster."""
    parts_s: tuple[tuple[str, float], ...]
    """Where its time differs, by the parts of `Estimate.shares`; the sum is the difference of both times."""


@dataclass(frozen=True)
class Relaxed:
    """The best plan known with one limit relaxed."""

    change: str
    choice: Choice | None
    """None where no plan was found."""
    gain: float | None
    """The share of the time without the change that is saved."""
    note: str = ""
    """Why there is no plan."""

    @property
    def time_s(self) -> float | None:
        """Seconds of one iteration, if a plan was found."""
        return None if self.choice is None else self.choice.estimate.time_s


def request_of(plan: Plan, source: CostSource) -> Request:
    """What a search would be asked to find such a plan: its model, cluster, batch, lengths and precision."""
    model, cluster = model_of(plan), cluster_of(plan)
    frame = replace(
        plan, stages=(Stage(0, model.num_ops, devices=((0,),)),), micro_batching=MicroBatching(plan.micro_batching.layout, "fixed", 1),
        num_replicas=1, schedule=DEFAULT_SCHEDULE, predicted=None, notes=(),
    )  # fmt: skip
    shapes = {share_shape(frame, samples) for samples in micro_batch_sizes(plan.global_batch, 1, ())}
    return Request(model, cluster, frame, Estimator(model, cluster, source, shapes=shapes), (), float("inf"))


def found_beside(request: Request, budget_s: float = math.inf, tell: Tell = lambda text: None) -> list[Choice]:
    """Plans that fit, best first: of a quick search, and uniform ones where those are cheap to try."""
    try:
        outcome = search(request, prove=False, time_budget_s=budget_s, watch=lambda text, best_s, bound_s: tell(text))
        found = list(outcome.choices)
    except InfeasibleError:
        found = []
    if request.cluster.num_devices <= _GRID_DEVICES and request.model.num_ops <= _GRID_OPS:
        deadline = time.monotonic() + budget_s
        for plan in plans_of_grid(request):
            if time.monotonic() > deadline:
                break
            tell("uniform plans")
            estimate = request.estimator.estimate(plan)
            if estimate.fits:
                found.append(Choice.of(plan, estimate).clocked())
    return sorted(found, key=lambda choice: (choice.estimate.time_s, choice.estimate.peak_bytes))


def rivals(own: Choice, found: Sequence[Choice]) -> list[Rival]:
    """The best plan of each other way to divide the devices, and the best with other micro-batches on the same; best first."""
    mine = _kind(own)
    best: dict[tuple[object, ...], Choice] = {}
    for choice in sorted(found, key=lambda choice: choice.estimate.time_s):
        kind = _kind(choice)
        if kind != mine:
            best.setdefault(kind[:-1], choice)
    return [_rival(own, choice) for choice in list(best.values())[:_RIVALS]]


def _kind(choice: Choice) -> tuple[object, ...]:
    """(stages, tp, copies of the weights, samples that a rank works on at once); replicas and samples divided in a stage are alike."""
    plan = choice.plan
    copies = tuple(dict.fromkeys(plan.num_replicas * stage.degrees.dp for stage in plan.stages))
    shares = tuple(dict.fromkeys(choice.estimate.samples / stage.degrees.dp for stage in plan.stages))
    return plan.num_groups, choice.tp, copies, shares


def _rival(own: Choice, choice: Choice) -> Rival:
    mine = dict(own.estimate.shares())
    parts = tuple((name, time_s - mine[name]) for name, time_s in choice.estimate.shares())
    return Rival(choice, choice.estimate.time_s / own.estimate.time_s - 1, parts)


def relaxed(request: Request, known: Sequence[Choice], budget_s: float = math.inf, tell: Tell = lambda text: None) -> list[Relaxed]:
    """The best plan as things are, then with each limit relaxed alone; `known` are plans on the request's own cluster."""
    best = min((choice for choice in known if choice.estimate.fits), key=lambda choice: choice.estimate.time_s, default=None)
    rows = [Relaxed("as it is", best, None if best is None else 0.0, "" if best else _NOTHING)]
    for change, there in relaxations(request):
        tell(change)
        rows.append(_relaxed(change, there, known, best, budget_s))
    return rows


def _relaxed(change: str, there: Request, known: Sequence[Choice], before: Choice | None, budget_s: float) -> Relaxed:
    try:
        candidates = list(_again(there, known))
        try:
            candidates += search(there, top=1, prove=False, time_budget_s=budget_s).choices
        except InfeasibleError:
            if not candidates:
                return Relaxed(change, None, None, _NOTHING)
    except ProfileMissingError as error:
        return Relaxed(change, None, None, str(error))
    best = min(candidates, key=lambda choice: choice.estimate.time_s)
    gain = None if before is None else 1 - best.estimate.time_s / before.estimate.time_s
    return Relaxed(change, best, gain)


def _again(there: Request, known: Sequence[Choice]) -> Iterator[Choice]:
    """Known plans that are valid and fit after the change, with shares that suit their replicas' speeds then."""
    for choice in known:
        plan = replace(choice.plan, cluster=there.frame.cluster, predicted=None)
        if not check_plan(plan, there.model, there.cluster):
            for one in dict.fromkeys((plan.micro_batching, rebalanced(there.estimator, plan).micro_batching)):
                estimate = there.estimator.estimate(again := replace(plan, micro_batching=one))
                if estimate.fits:
                    yield Choice.of(again, estimate, choice.kind)


def relaxations(request: Request) -> Iterator[tuple[str, Request]]:
    """Each limit relaxed alone, with its name: memory, links, a node more, a larger device."""
    cluster = request.estimator.cluster  # with the links that were measured, if any were
    yield "twice the memory", _on(request, _with_devices(cluster, _roomier))
    if cluster.num_nodes > 1:
        yield "twice the bandwidth between nodes", _on(request, _with_faster(cluster, inside=False))
    if any(run.node.num_devices > 1 for run in cluster.runs):
        yield "twice the bandwidth inside nodes", _on(request, _with_faster(cluster, inside=True))
    for node in dict.fromkeys(run.node for run in cluster.runs):
        yield f"one more node: {node.label}", _on(request, _with_node(cluster, node))
    for device, _ in cluster.kinds:
        larger = next_device(device, request.model.dtype)
        if larger is not None:
            yield f"{larger.name} instead of {device.name}", _on(request, _with_larger(cluster, device, larger))


def _on(request: Request, cluster: Cluster) -> Request:
    there = request.on(cluster)
    there.estimator.cluster = cluster  # a profile would put the links it measured in the place of faster ones
    return there


def _roomier(device: Device) -> Device:
    return replace(device, memory_bytes=_FACTOR * device.memory_bytes)


def _with_devices(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return cluster.with_nodes(replace(run.node, device=change(run.node.device)) for run in cluster.runs)


def _faster(link: Link) -> Link:
    return replace(link, bandwidth_bytes_per_s=_FACTOR * link.bandwidth_bytes_per_s)


def _with_faster(cluster: Cluster, *, inside: bool) -> Cluster:
    """Faster links inside nodes, or between them; overrides that cover such a pair with them."""
    overrides = tuple(
        replace(override, link=_faster(override.link)) if _touches(cluster, override, inside) else override
        for override in cluster.overrides
    )
    nodes = (
        replace(run.node, intra=_faster(run.node.intra)) if inside else replace(run.node, inter=_faster(run.node.inter))
        for run in cluster.runs
    )
    return replace(cluster.with_nodes(nodes), overrides=overrides)


def _touches(cluster: Cluster, override: LinkOverride, inside: bool) -> bool:
    """Whether the override covers a pair of ranks of one node, or of two."""
    first, second = (
        {node for start, stop in side for node in range(cluster.node_index(start), cluster.node_index(stop - 1) + 1)}
        for side in (override.first, override.second)
    )
    return bool(first & second) and not override.across_nodes_only if inside else len(first | second) > 1


def _with_node(cluster: Cluster, node: Node) -> Cluster:
    """One node more, as the last, so that all ranks keep their numbers."""
    *others, last = cluster.runs
    more = (replace(last, count=last.count + 1),) if last.node == node else (last, NodeRun(node))
    return replace(cluster, runs=(*others, *more))


def next_device(device: Device, dtype: str) -> Device | None:
    """The smallest device of the same maker that is larger, and has no less of anything; None if the catalogue has none."""

    def sizes(one: Device) -> tuple[float, ...]:
        memory_gib = round(one.memory_bytes / 2**30)  # drivers report a little more or less of the same size
        return memory_gib, one.peak_flops_per_s(dtype), one.memory_bandwidth_bytes_per_s, one.intra.bandwidth_bytes_per_s

    own = sizes(device)
    larger = [
        other for other in DEVICES.values()
        if _maker(other) == _maker(device) and all(its >= mine for its, mine in zip(sizes(other), own, strict=True))
        and any(its >= _WORTH * mine for its, mine in zip(sizes(other)[:2], own[:2], strict=True))
    ]  # fmt: skip
    return min(larger, key=sizes, default=None)


def _maker(device: Device) -> str:
    """The first word of where its figures come from."""
    return device.source.partition(" ")[0]


def _with_larger(cluster: Cluster, device: Device, larger: Device) -> Cluster:
    """The larger device in all nodes that have the other, with its own links where those are faster; it has no price."""

    def node_with(node: Node) -> Node:
        if node.device != device:
            return node
        intra = max(node.intra, larger.intra, key=lambda link: link.bandwidth_bytes_per_s)
        return Node(f"{node.num_devices}x{larger.name}", larger, node.num_devices, intra, node.inter, num_rails=node.num_rails)

    return cluster.with_nodes(node_with(run.node) for run in cluster.runs)
