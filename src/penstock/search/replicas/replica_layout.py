"""Where replicas lie that need not be equal: which nodes are in use, and which ranks each stage of each replica has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.collectives import BUCKET_BYTES, group_of
from penstock.costs.memory import bytes_per_parameter, rank_parameters
from penstock.costs.table import Floats
from penstock.plans.plan import Degrees, Stage
from penstock.plans.ranks import Replica
from penstock.search.replicas.common_cuts import Afterwards, ReplicaClass
from penstock.search.space.device_kinds import Kind
from penstock.search.space.request import Request
from penstock.search.space.update_prices import step_s_per_weight
from penstock.timing.messages import gradient_sharing

if TYPE_CHECKING:
    from penstock.clusters import Device, Node

__all__ = ["ReplicaLayout", "node_choices"]

MAX_KINDS = 4
"""Of more kinds of nodes than this not all choices are looked at, but the fastest one, the fastest two, …"""


def node_choices(request: Request) -> list[tuple[tuple[int, ...], ...]]:
    """Which nodes to use, all that are equal or none of them: for each choice the ranks of each kind, the fastest first."""
    nodes: dict[Node, list[int]] = {}
    first = 0
    for run in request.cluster.runs:
        nodes.setdefault(run.node, []).extend(range(first, first + run.num_devices))
        first += run.num_devices
    ranked = sorted(nodes, key=lambda node: (-node.device.peak_flops_per_s(request.model.dtype), -node.num_devices))
    subsets: list[tuple[Node, ...]] = [tuple(ranked[:count]) for count in range(len(ranked), 0, -1)]
    if len(ranked) <= MAX_KINDS:
        subsets = [subset for count in range(len(ranked), 0, -1) for subset in combinations(ranked, count)]
    found = []
    for subset in subsets[:1] if request.every_node else subsets:
        by_kind: dict[Device, tuple[int, ...]] = {}
        for node in subset:
            by_kind[node.device] = (*by_kind.get(node.device, ()), *nodes[node])
        found.append(tuple(by_kind.values()))
    return found


@dataclass(frozen=True)
class ReplicaLayout:
    """Where the replicas lie, whatever they run."""

    request: Request
    all_kinds: tuple[Kind, ...]
    tp: int
    replicas: tuple[Replica, ...]

    @cached_property
    def classes(self) -> tuple[ReplicaClass, ...]:
        """Replicas that are alike, in the order in which they come; options are kinds."""
        cluster, kind_of = self.request.cluster, self._kind_of
        copies: dict[tuple[tuple[int, ...], tuple[bool, ...]], int] = {}
        for replica in self.replicas:
            nodes = [cluster.node_index(ranks[0]) for ranks in replica]
            key = tuple(kind_of[ranks[0]] for ranks in replica), tuple(a != b for a, b in pairwise(nodes))
            copies[key] = copies.get(key, 0) + 1
        return tuple(ReplicaClass(*key, number) for key, number in copies.items())

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The kinds in use, as positions among all."""
        return tuple(sorted({kind for own in self.classes for kind in own.options}))

    @cached_property
    def _kind_of(self) -> dict[int, int]:
        return {rank: index for index, kind in enumerate(self.all_kinds) for rank in kind.ranks}

    @cached_property
    def afterwards(self) -> Afterwards:
        """Gradient sync and optimizer step, without what each message or kernel takes to start."""
        request, frame, number = self.request, self.request.frame, len(self.replicas)
        cluster, places = request.estimator.cluster, range(len(self.replicas[0]))
        stages = tuple(Stage(at, at + 1, tuple(own[at] for own in self.replicas), Degrees(self.tp)) for at in places)
        (weight, gradient, _, _), per_weight = bytes_per_parameter(frame.precision, frame.optimizer, frame.gradients), []
        for stage, sharing in zip(stages, gradient_sharing(cluster, replace(frame, stages=stages)), strict=True):
            devices = {self.all_kinds[self._kind_of[ranks[0]]].device.name for ranks in stage.devices}
            time_s = max(step_s_per_weight(request, device) for device in devices) / number
            if number > 1:
                group = group_of(cluster, [ranks[0] for ranks in stage.devices], sharing)
                sent = (("reduce_scatter", gradient), ("all_gather", weight))
                time_s += sum(group.time_s(kind, BUCKET_BYTES) / BUCKET_BYTES * item for kind, item in sent)
            per_weight.append(time_s)
        return Afterwards(np.array(per_weight), _weights(request, self.tp))

    @cached_property
    def after_s(self) -> float:
        """Gradient sync and optimizer step at least, whatever the cuts: every stage has as many weights as make all end at once."""
        if not self.afterwards.per_weight.all():
            return 0.0
        return float(self.afterwards.weights.sum() / (1 / self.afterwards.per_weight).sum())


def _weights(request: Request, tp: int) -> Floats:
    """[N] trained weights of each op on one rank."""
    counts = rank_parameters(request.model.ops, tp)
    return np.array([count if op.trainable else 0.0 for op, count in counts])
