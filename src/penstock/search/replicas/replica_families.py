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
from itertools import pairwise

import numpy as np

from penstock.plans.plan import Plan
from penstock.plans.ranks import Replica, packed_replicas
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, unchunked
from penstock.search.assemble import assembled, estimated, first_fitting, stage_of
from penstock.search.choice import Choice
from penstock.search.partition.flags import recompute_flags
from penstock.search.partition.stage_space import Machine, Recompute, StageChoice, StageSpace, build_space
from penstock.search.replicas.common_cuts import TOLERANCE, CommonCuts, ReplicaClass, best_common_cuts
from penstock.search.replicas.replica_layout import ReplicaLayout, node_choices
from penstock.search.replicas.shares import least_time_s, rebalanced
from penstock.search.space.device_kinds import kinds_of
from penstock.search.space.families import FINE_OPS, MAX_STAGES, PlanFamily, Subspace, powers
from penstock.search.space.prices import FamilyPrices
from penstock.search.space.request import Request, micro_batch_sizes
from penstock.search.space.stage_costs import Ints, StageOption

__all__ = ["ReplicaFamily", "replica_families"]

MAX_DEVICES = 1024
"""Clusters up to this size are looked at in this way."""
COARSE_CUTS = 128
_ROUGH = 1e-3
"""A bound need not be nearer than this."""
_COARSE = 2.0
"""Cuts between any two ops are looked at where cuts between blocks take at most this many times as long as the best plan so far."""


def replica_families(request: Request) -> Iterator[ReplicaFamily]:
    """All families but those of equal replicas with equal shares on all devices of one kind, which `families` has."""
    cluster, kinds, batch = request.cluster, tuple(kinds_of(request.cluster)), request.frame.global_batch
    if cluster.num_devices > MAX_DEVICES or request.asynchronous:
        return
    known: dict[tuple[int, int], PlanFamily] = {}  # families of one number of replicas share what they work out
    for chosen in node_choices(request):
        for tp in powers(request.model.max_tp()):
            for depth in range(1, min(MAX_STAGES, request.model.num_ops) + 1):
                replicas = packed_replicas(cluster, chosen, tp, depth)
                if not replicas:
                    break
                layouts: dict[int, ReplicaLayout] = {}
                for samples in micro_batch_sizes(batch, 1, request.micro_batches):
                    number = min(len(replicas), batch // samples)
                    if len(kinds) == 1 and (batch // samples) % number == 0 and number * tp * depth == cluster.num_devices:
                        continue
                    family = known.setdefault((number, samples), PlanFamily(request, kinds, number, samples))
                    layout = layouts.setdefault(number, ReplicaLayout(request, kinds, tp, replicas[:number]))
                    for sequence in sorted({option.sequence for option in family.variants(StageOption(tp, tp, 1))}):
                        yield ReplicaFamily(layout, family.prices, sequence)


@dataclass(frozen=True)
class ReplicaFamily:
    """Plans of given replicas with one micro-batch size."""

    layout: ReplicaLayout
    prices: FamilyPrices
    sequence: bool
    """Whether tokens are divided as well."""

    def __str__(self) -> str:
        return f"{len(self.replicas)} replicas of unequal shares, micro-batches of {self.samples}"

    @property
    def _request(self) -> Request:
        return self.layout.request

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        return self.prices.family.samples

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The ranks of each stage in every replica."""
        return self.layout.replicas

    @property
    def tp(self) -> int:
        """The tensor-parallel degree of every stage."""
        return self.layout.tp

    @property
    def depth(self) -> int:
        """Stages of a replica."""
        return len(self.replicas[0])

    @property
    def total(self) -> int:
        """Micro-batches of all replicas."""
        return self._request.frame.global_batch // self.samples

    def _option(self, kind: int) -> StageOption:
        return StageOption(self.tp, self.tp, 1, kind, self.sequence)

    @property
    def subspace(self) -> Subspace:
        """The plans of this family, as a proof names them."""
        return Subspace(tuple(self._option(kind) for kind in self.layout.kinds), self.depth, fine=True, equal=True)

    @cached_property
    def paces(self) -> tuple[tuple[float, float], ...]:
        """(first, more) of each class at least: stages of equal work, no messages, nothing recomputed."""
        found, of_kind = [], {kind: self._option(kind) for kind in self.layout.kinds}
        each = {kind: self.prices.passes.times(option)[1] for kind, option in of_kind.items()}
        for own in self.layout.classes:
            times = np.stack([each[kind] for kind in own.options])
            filling = np.stack([self.prices.passes.filling(of_kind[kind]) for kind in set(own.options)])
            speed = 1 / times.sum(axis=1)
            # An op counts on each stage by that stage's part of the speed of all, so that no way to place ops is below this.
            slowest = max(float((times * (speed / speed.sum())[:, None]).min(axis=0).sum()), float(times.min(axis=0).max()))
            found.append((max(slowest, float(filling.min(axis=0).sum())), slowest))
        return tuple(found)

    @cached_property
    def pipelines_s(self) -> float:
        """What all micro-batches take at least, from the ops alone; infinite where an op cannot be split so."""
        return least_time_s(self.total, self._each()) if all(math.isfinite(more) for _, more in self.paces) else math.inf

    @cached_property
    def bound_s(self) -> float:
        """What no plan of the family can be below: with what follows the last micro-batch."""
        return self.pipelines_s + self.layout.after_s if math.isfinite(self.pipelines_s) else math.inf

    def _each(self, without: int = -1) -> list[tuple[float, float]]:
        """The paces of all replicas, or of all but one of a class."""
        copies = [own.copies - (index == without) for index, own in enumerate(self.layout.classes)]
        return [pace for pace, number in zip(self.paces, copies, strict=True) for _ in range(number)]

    def sharper_bound_s(self, known_s: float) -> float:
        """The bound with whole ops, messages and memory, on plans faster than `known_s`.

        A replica of fewer micro-batches than stages holds fewer of them than memory is counted for. Where one is, the others run the
        rest, and memory does not count.
        """
        if self._request.model.num_ops > FINE_OPS:
            return self.bound_s
        fed, hungry = self._bound_within(1.0, known_s), self._hungry_s()
        if hungry < fed:
            hungry = max(hungry, self._bound_within(math.inf, known_s))
        return max(self.bound_s, min(fed, hungry))

    def _bound_within(self, share: float, known_s: float) -> float:
        """The bound of the programme over all cuts, with a share of the memory."""
        space = self._space(None, share, known_s, "bounded")
        return best_common_cuts(space, self._placed(), self.total, self.layout.afterwards, known_s, _ROUGH, self.bound_s).bound

    def _hungry_s(self) -> float:
        """A bound on plans in which some replica has fewer micro-batches than stages."""
        fewer = self.depth - 1
        if fewer == 0:
            return math.inf
        if len(self.replicas) == 1:
            return math.inf if self.total > fewer else self.bound_s
        rest = max(self.total - fewer, len(self.replicas) - 1)
        return min(least_time_s(rest, self._each(without)) for without in range(len(self.layout.classes))) + self.layout.after_s

    def best(self, known_s: float) -> Choice | None:
        """The fastest plan that fits, if one is faster than `known_s`."""
        best: Choice | None = None
        for schedule in unchunked({DEFAULT_SCHEDULE, *self._request.schedules}) if self.depth > 1 else (DEFAULT_SCHEDULE,):
            found = first_fitting(lambda share: self._best_with(share, schedule, known_s))  # noqa: B023
            if found is not None and found.estimate.time_s < known_s:
                best, known_s = found, found.estimate.time_s
        return best

    def _best_with(self, share: float, schedule: str, known_s: float) -> Choice | None:
        """The programme's best plan with this share of the memory; long chains are cut between blocks, then at ops near those cuts."""
        recompute: Recompute = "needed" if SCHEDULES[schedule].recomputes else "never"
        blocks, cuts = self._request.blocks, None
        if self.depth == 1:
            cuts = blocks.ends
        else:
            # A plan between blocks makes the search for the best one quick, since little is then worth a label.
            stride = blocks.stride(COARSE_CUTS)
            _, coarse = self._cut(blocks.every(stride), share, _COARSE * known_s, recompute)
            if not coarse.cuts:
                return None
            known_s = min(known_s, coarse.time * (1 + TOLERANCE))
            if self._request.model.num_ops > FINE_OPS:
                cuts = blocks.ops_near(coarse.cuts[1:-1], stride)
        space, found = self._cut(cuts, share, known_s, recompute)
        if not found.cuts:
            return None
        return estimated(self._request, rebalanced(self._request.estimator, self._plan(space, found, schedule)), "exact")

    def _cut(self, cuts: Ints | None, share: float, known_s: float, recompute: Recompute) -> tuple[StageSpace, CommonCuts]:
        """The best of some cuts, or of all."""
        space = self._space(cuts, share, known_s, recompute)
        return space, best_common_cuts(space, self._placed(), self.total, self.layout.afterwards, known_s, scale=self.bound_s)

    def _space(self, cuts: Ints | None, share: float, known_s: float, recompute: Recompute) -> StageSpace:
        """Stages on each kind in use; all must do with the memory of the smallest, since replicas recompute the same ops.

        Under a zero-bubble schedule nothing is recomputed, all stages hold as many micro-batches, and not all of a stage counts in the sum.
        """
        prices, pools = self.prices, self.prices.family.pools
        costs = [prices.costs(self._option(kind)) for kind in self.layout.kinds]
        if recompute != "needed":  # a bound is for any schedule
            costs = [prices.hiding(own) for own in costs]
        smallest = min(pools[kind].with_share(share).memory_limit for kind in self.layout.kinds)
        machine = Machine(tuple(replace(pool, memory_limit=smallest) for pool in pools), 1.0, 0.0)
        return _joined([
            build_space(
                [own], self._request.blocks, machine, max_stages=self.depth, longest=self._longest_s(kind, known_s), cuts=cuts,
                recompute=recompute, levels=[prices.levels(own.option)], in_flight=self.depth if recompute == "never" else 0,
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

    def _placed(self) -> tuple[ReplicaClass, ...]:
        """The classes with positions among the options of a space."""
        return tuple(replace(own, options=tuple(self.layout.kinds.index(kind) for kind in own.options)) for own in self.layout.classes)

    def _plan(self, space: StageSpace, found: CommonCuts, schedule: str) -> Plan:
        """All replicas recompute what the slowest kind must; it has the smallest memory of all in the space."""
        slowest = max(range(len(space.costs)), key=lambda option: float(space.costs[option].compute.sum()))
        stages = []
        for index, (first, last) in enumerate(pairwise(found.cuts)):
            flags = recompute_flags(space, StageChoice(slowest, first, last, self.depth - 1 - index, 0.0))
            stages.append(stage_of(first, last, self._option(0), tuple(replica[index] for replica in self.replicas), flags))
        return assembled(self._request.frame, stages, self.samples, schedule)


def _joined(spaces: Sequence[StageSpace]) -> StageSpace:
    """One space with the options of several, each with its own longest stage."""
    shifts = np.cumsum([0, *(space.times.shape[1] for space in spaces[:-1])])

    def stacked(name: str, axis: int = 0) -> np.ndarray:
        return np.concatenate([getattr(space, name) for space in spaces], axis=axis)

    return replace(
        spaces[0], costs=tuple(own for space in spaces for own in space.costs),
        levels=tuple(own for space in spaces for own in space.levels),
        offset=np.concatenate([space.offset + shift for space, shift in zip(spaces, shifts, strict=True)]), width=stacked("width"),
        times=stacked("times", axis=1), enter=stacked("enter"), leave=stacked("leave"), hidden_fill_s=stacked("hidden_fill_s"),
    )  # fmt: skip
