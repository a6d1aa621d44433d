"""Plans whose replicas lie on different kinds of devices, each with as many micro-batches as suit its speed.

Where nodes are joined by a slow network, a replica on each kind needs no message between kinds but gradients. All replicas have the same
stages, so that cuts are sought that suit all (`common_cuts`); a family is

    tp × depth            devices of one replica, every stage on a tensor-parallel group inside a node
    the nodes in use      any kinds of them: one that holds the others up, or has too little memory, is left out
    micro-batch size      any that divides the batch: the number of replicas need not divide the number of micro-batches

with all the replicas there is room for. Groups of a node that are too few for a replica are joined with those of other nodes, first of
their own kind, then of the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.collectives import BUCKET_BYTES, group_of
from penstock.costs.memory import bytes_per_parameter, rank_parameters
from penstock.costs.table import Floats
from penstock.plans.build import join_ranges
from penstock.plans.plan import Degrees, Plan, Stage
from penstock.plans.ranks import Replica, packed_replicas
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, unchunked
from penstock.search.partition.recompute import recompute_flags
from penstock.search.partition.stages import Blocks, Ints, Machine, Recompute, StageChoice, StageOption, StageSpace, build_space
from penstock.search.replicas.common_cuts import TOLERANCE, Afterwards, CommonCuts, ReplicaClass, best_common_cuts
from penstock.search.replicas.shares import least_time_s, rebalanced
from penstock.search.request import Request, micro_batch_sizes
from penstock.search.space.families import FINE_OPS, MAX_STAGES, Family, Kind, Pass, kinds_of
from penstock.timing.messages import gradient_sharing

if TYPE_CHECKING:
    from penstock.clusters import Device, Node
    from penstock.timing.estimate import Estimate

__all__ = ["Layout", "ReplicaFamily", "replica_families"]

MAX_DEVICES = 1024
"""Clusters up to this size are looked at in this way."""
MAX_KINDS = 4
"""Of more kinds of nodes than this not all choices are looked at, but the fastest one, the fastest two, …"""
COARSE_CUTS = 128
_LARGE = 1e9
"""An amount at which latencies no longer count."""
_ROUGH = 1e-3
"""A bound need not be nearer than this."""
_COARSE = 2.0
"""Cuts between any two ops are looked at where cuts between blocks take at most this many times as long as the best plan so far."""
_SHARES = (1.0, 0.97, 0.93, 0.88)
"""Of the memory, tried in turn where the programme was too hopeful."""


def replica_families(request: Request) -> Iterator[ReplicaFamily]:
    """All families but those of equal replicas with equal shares on all devices of one kind, which `families` has."""
    cluster, kinds, batch = request.cluster, tuple(kinds_of(request.cluster)), request.frame.global_batch
    if cluster.num_devices > MAX_DEVICES:
        return
    known: dict[tuple[int, int], Family] = {}  # families of one number of replicas share what they work out
    for chosen in _choices(request):
        for tp in [2**k for k in range(request.model.max_tp().bit_length()) if 2**k <= request.model.max_tp()]:
            for depth in range(1, min(MAX_STAGES, request.model.num_ops) + 1):
                replicas = packed_replicas(cluster, chosen, tp, depth)
                if not replicas:
                    break
                layouts: dict[int, Layout] = {}
                for samples in micro_batch_sizes(batch, 1, request.micro_batches):
                    number = min(len(replicas), batch // samples)
                    if len(kinds) == 1 and (batch // samples) % number == 0 and number * tp * depth == cluster.num_devices:
                        continue
                    family = known.setdefault((number, samples), Family(request, kinds, number, samples))
                    layout = layouts.setdefault(number, Layout(request, kinds, tp, replicas[:number]))
                    for sequence in sorted({option.sequence for option in family.variants(StageOption(tp, tp, 1))}):
                        yield ReplicaFamily(layout, family, sequence)


def _choices(request: Request) -> list[tuple[tuple[int, ...], ...]]:
    """Which nodes to use, all that are equal or none: the ranks of each kind, the fastest first."""
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
    for subset in subsets:
        by_kind: dict[Device, tuple[int, ...]] = {}
        for node in subset:
            by_kind[node.device] = (*by_kind.get(node.device, ()), *nodes[node])
        found.append(tuple(by_kind.values()))
    return found


@dataclass(frozen=True)
class Layout:
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
        cluster, source = request.estimator.cluster, request.estimator.source
        places = range(len(self.replicas[0]))
        stages = tuple(Stage(at, at + 1, tuple(own[at] for own in self.replicas), Degrees(self.tp)) for at in places)
        gradient, per_weight = bytes_per_parameter(frame.precision, frame.optimizer)[1], []
        for stage, sharing in zip(stages, gradient_sharing(cluster, replace(frame, stages=stages)), strict=True):
            devices = {self.all_kinds[self._kind_of[ranks[0]]].device.name for ranks in stage.devices}
            steps = [[source.optimizer_s(n * _LARGE, device, frame.precision, frame.optimizer) for n in (1, 2)] for device in devices]
            time_s = max(two - one for one, two in steps) / _LARGE / number
            if number > 1:
                group = group_of(cluster, [ranks[0] for ranks in stage.devices], sharing)
                time_s += sum(group.time_s(kind, BUCKET_BYTES) for kind in ("reduce_scatter", "all_gather")) / BUCKET_BYTES * gradient
            per_weight.append(time_s)
        return Afterwards(np.array(per_weight), _weights(request, self.tp))

    @cached_property
    def after_s(self) -> float:
        """The same at least, whatever the cuts: every stage has as many weights as make all end at once."""
        if not self.afterwards.per_weight.all():
            return 0.0
        return float(self.afterwards.weights.sum() / (1 / self.afterwards.per_weight).sum())


def _weights(request: Request, tp: int) -> Floats:
    """[N] trained weights of each op on one rank."""
    counts = rank_parameters(request.model.ops, tp)
    return np.array([count if op.trainable else 0.0 for op, count in counts])


@dataclass(frozen=True)
class ReplicaFamily:
    """Plans of given replicas with one micro-batch size."""

    layout: Layout
    family: Family
    """Whence the costs come."""
    sequence: bool
    """Whether tokens are divided as well."""

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All of them."""
        return self.layout.replicas

    @property
    def tp(self) -> int:
        """Of every stage."""
        return self.layout.tp

    @property
    def depth(self) -> int:
        """Stages."""
        return len(self.replicas[0])

    @property
    def total(self) -> int:
        """Micro-batches of all replicas."""
        return self.family.request.frame.global_batch // self.family.samples

    def _option(self, kind: int) -> StageOption:
        return StageOption(self.tp, self.tp, 1, kind, self.sequence)

    @property
    def part(self) -> Pass:
        """What a proof says of it."""
        return Pass(tuple(self._option(kind) for kind in self.layout.kinds), self.depth, fine=True, equal=True)

    @cached_property
    def paces(self) -> tuple[tuple[float, float], ...]:
        """(first, more) of each class at least: stages of equal work, no messages, nothing recomputed."""
        found = []
        for own in self.layout.classes:
            times = np.stack([self.family.times(self._option(kind))[1] for kind in own.options])
            filling = np.stack([self.family.filling(self._option(kind)) for kind in set(own.options)])
            speed = 1 / times.sum(axis=1)
            # An op counts on each stage by that stage's part of the speed of all, so that no way to place ops is below this.
            slowest = max(float((times * (speed / speed.sum())[:, None]).min(axis=0).sum()), float(times.min(axis=0).max()))
            found.append((max(slowest, float(filling.min(axis=0).sum())), slowest))
        return tuple(found)

    @cached_property
    def bound_s(self) -> float:
        """What no plan of the family can be below, from its ops alone; infinite where an op cannot be split so."""
        if not all(math.isfinite(more) for _, more in self.paces):
            return math.inf
        return least_time_s(self.total, self._each()) + self.layout.after_s

    def _each(self, without: int = -1) -> list[tuple[float, float]]:
        """The paces of all replicas, or of all but one of a class."""
        copies = [own.copies - (index == without) for index, own in enumerate(self.layout.classes)]
        return [pace for pace, number in zip(self.paces, copies, strict=True) for _ in range(number)]

    def sharper_bound_s(self, blocks: Blocks, known_s: float) -> float:
        """The same with whole ops, messages and memory, on plans faster than `known_s`.

        A replica of fewer micro-batches than stages holds fewer of them than memory is counted for. Where one is, the others run the
        rest, and memory does not count.
        """
        if self.family.request.model.num_ops > FINE_OPS:
            return self.bound_s
        fed, hungry = self._bound_within(1.0, blocks, known_s), self._hungry_s()
        if hungry < fed:
            hungry = max(hungry, self._bound_within(math.inf, blocks, known_s))
        return max(self.bound_s, min(fed, hungry))

    def _bound_within(self, share: float, blocks: Blocks, known_s: float) -> float:
        """The bound of the programme over all cuts, with a share of the memory."""
        space = self._space(blocks, None, share, known_s, "bounded")
        return best_common_cuts(space, self._placed(space), self.total, self.layout.afterwards, known_s, _ROUGH, self.bound_s).bound

    def _hungry_s(self) -> float:
        """A bound on plans in which some replica has fewer micro-batches than stages."""
        fewer = self.depth - 1
        if fewer == 0:
            return math.inf
        if len(self.replicas) == 1:
            return math.inf if self.total > fewer else self.bound_s
        rest = max(self.total - fewer, len(self.replicas) - 1)
        return min(least_time_s(rest, self._each(without)) for without in range(len(self.layout.classes))) + self.layout.after_s

    def best(self, blocks: Blocks, known_s: float) -> tuple[Plan, Estimate] | None:
        """The fastest plan that fits, if one is faster than `known_s`."""
        best: tuple[Plan, Estimate] | None = None
        for schedule in unchunked({DEFAULT_SCHEDULE, *self.family.request.schedules}) if self.depth > 1 else (DEFAULT_SCHEDULE,):
            found = self._best_under(schedule, blocks, known_s)
            if found is not None and found[1].time_s < known_s:
                best, known_s = found, found[1].time_s
        return best

    def _best_under(self, schedule: str, blocks: Blocks, known_s: float) -> tuple[Plan, Estimate] | None:
        for share in _SHARES:
            if (plan := self._plan(schedule, blocks, share, known_s)) is None:
                return None
            estimate = self.family.request.estimator.estimate(plan)
            if estimate.fits:
                return plan, estimate
        return None

    def _plan(self, schedule: str, blocks: Blocks, share: float, known_s: float) -> Plan | None:
        """The programme's best plan with this share of the memory; long chains are cut between blocks, then at ops near those cuts."""
        recompute: Recompute = "needed" if SCHEDULES[schedule].recomputes else "never"
        if self.depth == 1:
            space, found = self._cut(np.array([0, blocks.start[-1]]), blocks, share, known_s, recompute)
        else:
            stride, long_chain = -(-(len(blocks.start) - 1) // COARSE_CUTS), self.family.request.model.num_ops > FINE_OPS
            # A plan between blocks makes the search for the best one quick, since little is then worth a label.
            _, found = self._cut(np.append(blocks.start[:-1:stride], blocks.start[-1]), blocks, share, _COARSE * known_s, recompute)
            if not found.cuts:
                return None
            near = _near(found, blocks, stride) if long_chain else None
            space, found = self._cut(near, blocks, share, min(known_s, found.time * (1 + TOLERANCE)), recompute)
        if not found.cuts:
            return None
        return rebalanced(self.family.request.estimator, replace(self._plan_of(space, found), schedule=schedule))

    def _cut(self, cuts: Ints | None, blocks: Blocks, share: float, known_s: float, recompute: Recompute) -> tuple[StageSpace, CommonCuts]:
        """The best of some cuts, or of all."""
        space = self._space(blocks, cuts, share, known_s, recompute)
        return space, best_common_cuts(space, self._placed(space), self.total, self.layout.afterwards, known_s, scale=self.bound_s)

    def _space(self, blocks: Blocks, cuts: Ints | None, share: float, known_s: float, recompute: Recompute) -> StageSpace:
        """Stages on each kind in use; all must do with the memory of the smallest, since replicas recompute the same ops.

        Under a zero-bubble schedule nothing is recomputed, all stages hold as many micro-batches, and not all of a stage counts in the sum.
        """
        costs = [self.family.costs(self._option(kind)) for kind in self.layout.kinds]
        if recompute != "needed":  # a bound is for any schedule
            costs = [replace(own, relief=own.compute - self.family.filling(own.option)) for own in costs]
        smallest = min(self.family.pools[kind].memory_limit for kind in self.layout.kinds)
        machine = Machine(tuple(replace(pool, memory_limit=share * smallest) for pool in self.family.pools), 1.0, 0.0)
        return _joined([
            build_space(
                [own], blocks, machine, max_stages=self.depth, longest=self._longest_s(kind, known_s), cuts=cuts, recompute=recompute,
                levels=[self.family.levels(own.option, blocks)], in_flight=self.depth if recompute == "never" else 0,
            )
            for kind, own in zip(self.layout.kinds, costs, strict=True)
        ])  # fmt: skip

    def _longest_s(self, kind: int, known_s: float) -> float:
        """About the longest that a stage on a kind may take in plans faster than `known_s`: the other replicas run the rest."""
        limit_s, longest_s = known_s - self.layout.after_s, 0.0
        if not math.isfinite(limit_s):
            return math.inf
        for index in [index for index, own in enumerate(self.layout.classes) if kind in own.options]:
            low, high = self.paces[index][1], limit_s
            while high - low > 0.05 * low:
                middle = (low + high) / 2
                paces = list(self.paces)
                paces[index] = (max(paces[index][0], middle), middle)
                each = [pace for pace, own in zip(paces, self.layout.classes, strict=True) for _ in range(own.copies)]
                low, high = (middle, high) if least_time_s(self.total, each) < limit_s else (low, middle)
            longest_s = max(longest_s, high)
        return longest_s

    def _placed(self, space: StageSpace) -> tuple[ReplicaClass, ...]:
        """The classes with positions among the options of a space."""
        return tuple(replace(own, options=tuple(self.layout.kinds.index(kind) for kind in own.options)) for own in self.layout.classes)

    def _plan_of(self, space: StageSpace, found: CommonCuts) -> Plan:
        slowest = max(range(len(space.costs)), key=lambda option: float(space.costs[option].compute.sum()))
        stages = []
        for index, (first, last) in enumerate(pairwise(found.cuts)):
            choice = StageChoice(slowest, first, last, self.depth - 1 - index, 0.0)
            again = np.flatnonzero(recompute_flags(space, choice)) + first
            pattern = join_ranges((int(op), int(op) + 1) for op in again)
            stages.append(Stage(
                first, last, devices=tuple(replica[index] for replica in self.replicas), degrees=Degrees(self.tp),
                recompute=(pattern,) if pattern else (), zero=1 if len(self.replicas) > 1 else 0,
                sequence_parallel=self.sequence,
            ))  # fmt: skip
        frame = self.family.request.frame
        batching = replace(frame.micro_batching, samples=self.family.samples)
        return replace(frame, stages=tuple(stages), num_replicas=len(self.replicas), micro_batching=batching)


def _joined(spaces: Sequence[StageSpace]) -> StageSpace:
    """One space with the options of several, each with its own longest stage."""
    first = spaces[0]
    shifts = np.cumsum([0, *(space.times.shape[1] for space in spaces[:-1])])
    return replace(
        first, costs=tuple(own for space in spaces for own in space.costs), levels=tuple(own for space in spaces for own in space.levels),
        offset=np.concatenate([space.offset + shift for space, shift in zip(spaces, shifts, strict=True)]),
        width=np.concatenate([space.width for space in spaces]), times=np.concatenate([space.times for space in spaces], axis=1),
        enter=np.concatenate([space.enter for space in spaces]), leave=np.concatenate([space.leave for space in spaces]),
        relief=np.concatenate([space.relief for space in spaces]),
    )  # fmt: skip


def _near(found: CommonCuts, blocks: Blocks, window: int) -> Ints:
    """Every op of the blocks around each cut."""
    last = len(blocks.start) - 1
    places = {0, int(blocks.start[-1])}
    for cut in found.cuts[1:-1]:
        block = int(np.searchsorted(blocks.start, cut))
        places.update(range(int(blocks.start[max(block - window, 0)]), int(blocks.start[min(block + window, last)]) + 1))
    return np.array(sorted(places))
