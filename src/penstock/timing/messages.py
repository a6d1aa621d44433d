"""Times of what a plan sends: activations and gradients between stages, gradients among ranks with equal weights, tied weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.clusters import Cluster
from penstock.costs.collectives import Group, collective_s, group_of, point_to_point_s, sync_gradients_s
from penstock.costs.memory import bytes_per_parameter
from penstock.costs.roofline import tp_group
from penstock.models.ops import Model
from penstock.models.shapes import Quantity, Shape
from penstock.plans.degrees import Axis, DegreeRun, Degrees
from penstock.plans.ranks import holders
from penstock.timing.pass_times import OpSlice
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.clusters import Device
    from penstock.plans.plan import Plan, Stage

__all__ = ["cut_times_s", "gradient_sharing", "reshard_s", "slowdown", "sync_s", "tied_s", "tp_group_of"]

_UNIT = Shape(1)
_PROBE_BYTES = 2.0**20


def slowdown(cluster: Cluster, device: Device, ops: OpSlice, shape: Shape, group: Group) -> float:
    """How much longer collectives of ops take in a tensor-parallel group than in one inside a node, which tables assume where it fits."""
    usual = tp_group(cluster, device, ops.tp) if ops.tp > 1 else None
    if usual is None or usual == group:
        return 1.0
    sizes = [
        (collective.kind, collective.size_bytes(shape))
        for place, algo in zip(ops.places, ops.kinds.tolist(), strict=True)
        for collective in place.op.splits[algo].collectives
    ]
    assumed = sum(usual.time_s(kind, size) for kind, size in sizes)
    return sum(group.time_s(kind, size) for kind, size in sizes) / assumed if assumed else 1.0


def tp_group_of(cluster: Cluster, ranks: Sequence[int], tp: int) -> Group:
    """The tensor-parallel group of a stage's devices that is slowest to communicate."""
    groups = {group_of(cluster, group) for group in Degrees(tp).groups(Axis.TP, ranks)}
    return max(groups, key=lambda group: group.time_s("all_reduce", _PROBE_BYTES))


def reshard_s(
    model: Model, cluster: Cluster, plan: Plan, samples: int, ranks: Sequence[int], before: DegreeRun, after: DegreeRun
) -> tuple[float, float]:
    """(forward, backward) time to hand the carry from one part of a stage to the next, which has other degrees.

    Where dp falls, ranks gather the samples of others, and their gradients need only be cut; where it rises, the reverse.
    """
    if before.dp == after.dp:
        return 0.0, 0.0
    coarse, fine = (before, after) if before.dp < after.dp else (after, before)
    size = model.boundary_bytes(after.first).at(share_shape(plan, samples, coarse.dp))
    time_s = collective_s("all_gather", size, cluster, ranks[: coarse.tp : fine.tp])
    return (time_s, 0.0) if after.dp < before.dp else (0.0, time_s)


def cut_times_s(
    described: Callable[[Stage, int], Model], cluster: Cluster, plan: Plan, samples: int, cut: int
) -> list[tuple[float, float]]:
    """For each replica, the times of the activations over the cut after stage `cut` and of their gradients back.

    Each rank of the smaller side serves several of the larger one, one after the other; all pairs send at once. What a rank gets is
    as large as the model, `described` as a stage runs one of its ops, says.
    """
    before, after = plan.stages[cut], plan.stages[cut + 1]
    senders, receivers = len(before.devices[0]), len(after.devices[0])
    sent, got = before.run_of(after.first - 1), after.run_of(after.first)
    model, sender = described(after, after.first), described(before, after.first - 1)
    there = model.boundary_bytes(after.first).at(share_shape(plan, samples, got.dp), got.tp)
    differentiable = [spec for spec in sender.carry_before(after.first) if spec.differentiable]
    gradients = sum((spec.size_bytes(sender.dtype) for spec in differentiable), Quantity())
    back = gradients.at(share_shape(plan, samples, sent.dp), sent.tp)
    there, back = there * max(1.0, receivers / senders), back * max(1.0, senders / receivers)
    pairs = [list(_pairs(a, b)) for a, b in zip(before.devices, after.devices, strict=True)]
    flows = _flows(cluster, [pair for replica in pairs for pair in replica])
    known: dict[tuple[int, ...], tuple[float, float]] = {}

    def both(a: int, b: int) -> tuple[float, float]:
        """The message between two ranks, and that back; many pairs are alike."""
        sharing = _sharing(cluster, flows, a, b)
        key = (*cluster.link_likeness(a, b), sharing)
        if key not in known:
            known[key] = point_to_point_s(there, cluster, a, b, sharing), point_to_point_s(back, cluster, b, a, sharing)
        return known[key]

    times = [[both(a, b) for a, b in replica] for replica in pairs]
    return [(max(there_s for there_s, _ in own), max(back_s for _, back_s in own)) for own in times]


def _pairs(senders: Sequence[int], receivers: Sequence[int]) -> Iterator[tuple[int, int]]:
    count = max(len(senders), len(receivers))
    return ((senders[i * len(senders) // count], receivers[i * len(receivers) // count]) for i in range(count))


def _flows(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> Counter[int]:
    """How many pairs use each node's network."""
    nodes = [(cluster.node_index(a), cluster.node_index(b)) for a, b in pairs]
    return Counter(node for ends in nodes if ends[0] != ends[1] for node in ends)


def _sharing(cluster: Cluster, flows: Counter[int], a: int, b: int) -> int:
    return max(1, flows[cluster.node_index(a)], flows[cluster.node_index(b)])


def gradient_sharing(cluster: Cluster, plan: Plan) -> list[int]:
    """For each stage, how many groups reduce their gradients over the same network at once."""
    crossing: Counter[int] = Counter()
    for stage in {stage.devices: stage for stage in plan.stages}.values():
        part = DegreeRun(stage.first, stage.last, stage.degrees.tp, stage.degrees.dp)
        for place in range(part.tp):
            nodes = {cluster.node_index(rank) for rank in holders(stage, part, place)}
            crossing.update(nodes if len(nodes) > 1 else ())
    touched = [{cluster.node_index(rank) for ranks in stage.devices for rank in ranks} for stage in plan.stages]
    return [max(1, *(crossing[node] for node in nodes)) for nodes in touched]


def sync_s(cluster: Cluster, plan: Plan, stage: Stage, part: DegreeRun, num_parameters: float, sharing: int) -> float:
    """Time to make the gradients of a part equal on all ranks that hold its weights; nothing of it is hidden behind compute."""
    ranks = holders(stage, part)
    if len(ranks) == 1 or not num_parameters:
        return 0.0
    weight, gradient, _, _ = bytes_per_parameter(plan.precision, plan.optimizer, plan.gradients)
    return sync_gradients_s(
        num_parameters * gradient, cluster, ranks, zero=stage.zero, micro_batches=plan.num_micro_batches or 1, sharing=sharing,
        weight_share=weight / gradient,
    )  # fmt: skip


def tied_s(model: Model, cluster: Cluster, plan: Plan) -> list[float]:
    """For each stage, the time to add up the gradients of weights that it shares with another stage."""
    home = {op: index for index, stage in enumerate(plan.stages) for op in range(stage.first, stage.last)}
    owners = {place.name: place.index for place in model.ops}
    times, seen = [0.0] * plan.num_stages, set()
    for place in model.ops:
        owner = owners.get(place.op.tied_to)
        if owner is None or home[owner] == home[place.index] or (owner, home[place.index]) in seen:
            continue
        seen.add((owner, home[place.index]))
        count = place.op.parameters.at(_UNIT) - float(place.op.config.get("untied_parameters", 0))
        ends = plan.stages[home[owner]], plan.stages[home[place.index]]
        time_s = _tied_pair_s(cluster, plan, ends, count / min(end.degrees.tp for end in ends))
        for stage in (home[owner], home[place.index]):
            times[stage] += time_s
    return times


def _tied_pair_s(cluster: Cluster, plan: Plan, ends: tuple[Stage, Stage], num_parameters: float) -> float:
    """One all-reduce between a rank of each end, while all other pairs do the same: the slowest of them, in any replica."""
    pairs = [pair for a, b in zip(ends[0].devices, ends[1].devices, strict=True) for pair in _pairs(a, b)]
    flows = _flows(cluster, pairs)
    alike = {(cluster.link_likeness(a, b), _sharing(cluster, flows, a, b)): (a, b) for a, b in pairs if a != b}
    _, gradient, _, _ = bytes_per_parameter(plan.precision, plan.optimizer, plan.gradients)
    size = num_parameters * gradient
    return max((sync_gradients_s(size, cluster, pair, sharing=sharing) for (_, sharing), pair in alike.items()), default=0.0)
