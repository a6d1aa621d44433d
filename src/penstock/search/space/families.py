"""The space of plans, enumerated: families of plans, the options of their stages, and the subspaces that are searched one by one.

    family      a number of replicas and a micro-batch size; each kind of devices is then a pool, of which every replica has the same share
    option      a way to run one stage on some devices of one pool: tp, dp, sequence parallelism, ZeRO
    subspace    options that stages may have together, and how many stages there may be

What options cost is in `prices`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from penstock.errors import plural
from penstock.plans.ranks import stage_ranks
from penstock.schedules.rules import SCHEDULES
from penstock.search.space.device_kinds import Kind, kinds_of
from penstock.search.space.prices import FamilyPrices
from penstock.search.space.request import Request, micro_batch_sizes
from penstock.search.space.stage_costs import DevicePool, StageOption

__all__ = ["CHUNKS", "FINE_OPS", "MAX_DEPTH", "MAX_STAGES", "PlanFamily", "Subspace", "families", "powers"]

MAX_STAGES = 16
"""Stages of a pipeline whose stages may differ in size."""
MAX_DEPTH = 128
"""Stages of a pipeline of equal groups of devices."""
CHUNKS = (2, 3, 4)
"""Stages per device group of an interleaved schedule that are tried."""
FINE_OPS = 600
"""Chains up to this many ops are cut between any two of them at once."""
MAX_STATES, MAX_STATES_OF_ONE_KIND = 500, 65
"""Ways to have taken devices that the partition programme may tell apart, over several pools and over one."""


@dataclass(frozen=True)
class Subspace:
    """Plans of one family with the same set of stage options, bounded and searched together."""

    options: tuple[StageOption, ...]
    max_stages: int
    fine: bool
    """Whether the cuts between any two ops are looked at from the start."""
    equal: bool = False
    """Whether all stages have as many devices, so that there are exactly `max_stages` of them."""
    divided: bool = False
    """Whether its one stage divides gradients, or weights, among ranks that hold the same (ZeRO-2 and 3)."""
    per_op: bool = False
    """Whether each op of a stage may have an option of its own on the same devices."""
    anywhere: bool = False
    """Whether the first look knows all cuts, though nearer ones are looked at after it."""


def families(request: Request) -> Iterator[PlanFamily]:
    """Every family in which each replica has a device of some kind and a whole number of micro-batches."""
    kinds, batch = kinds_of(request.cluster), request.frame.global_batch
    largest = max(len(kind.ranks) for kind in kinds)
    for replicas in range(1, largest + 1):
        if batch % replicas or (len(kinds) == 1 and largest % replicas):
            continue
        if request.asynchronous and replicas > 1:  # ranks that update together share the samples of each micro-batch
            return
        if len(kinds) > 1 and not any(len(kind.ranks) % replicas == 0 for kind in kinds):
            continue
        if request.every_node and any(kind.idle_nodes(replicas) for kind in kinds):
            continue
        for samples in micro_batch_sizes(batch, replicas, request.micro_batches):
            yield PlanFamily(request, tuple(kinds), replicas, samples)


@dataclass(frozen=True)
class PlanFamily:
    """Plans with one number of replicas and one micro-batch size."""

    request: Request
    kinds: tuple[Kind, ...]
    replicas: int
    samples: int
    """Of a micro-batch."""

    def __str__(self) -> str:
        return f"{plural(self.replicas, 'replica')}, micro-batches of {self.samples}"

    @cached_property
    def count(self) -> int:
        """Micro-batches of a replica, up to where its pipeline is drained: of all global batches of a `window`."""
        return self.window * self._of_batch

    @property
    def _of_batch(self) -> int:
        """Micro-batches of a replica in one global batch."""
        return self.request.frame.global_batch // self.replicas // self.samples

    @cached_property
    def window(self) -> int:
        """Global batches that asynchronous plans run without a break. Times are then shares of each, so that those of all micro-batches
        make the time of one global batch."""
        return max((SCHEDULES[name].window(self.num_devices, self._of_batch) for name in self.request.schedules), default=1)

    @cached_property
    def pools(self) -> tuple[DevicePool, ...]:
        """What one replica has of each kind."""
        return tuple(kind.pool(self.replicas, self.request.memory_limit_bytes) for kind in self.kinds)

    @cached_property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def mixed(self) -> bool:
        """Whether pipelines may lie on devices of several kinds."""
        return sum(pool.num_devices > 0 for pool in self.pools) > 1 and self.count > 1 and not self.request.asynchronous

    @cached_property
    def prices(self) -> FamilyPrices:
        """What the options cost."""
        return FamilyPrices(self)

    @cached_property
    def options(self) -> tuple[StageOption, ...]:
        """Tensor-parallel groups stay in a node; a stage is part of a node or, where kinds are mixed, whole nodes."""
        found = []
        most_tp = self.request.model.max_tp()
        for index, pool in enumerate(self.pools):
            most = pool.num_devices if len(self.pools) > 1 else min(pool.num_devices, pool.per_node)
            for tp in powers(min(pool.per_node, most_tp)):
                sizes = {*powers(most // tp), *(n // tp for n in range(pool.per_node, most + 1, pool.per_node) if n % tp == 0)}
                for dp in sorted(sizes):
                    size = tp * dp
                    if self.samples % dp == 0 and size <= most and (size <= pool.per_node or size % pool.per_node == 0):
                        found.append(StageOption(size, tp, dp, index, zero=0 if self.request.asynchronous else 1))
        return tuple(found)

    @cached_property
    def subspaces(self) -> tuple[Subspace, ...]:
        """Stages of any sizes; on equal devices also deeper pipelines of equal groups; and single stages under ZeRO-2 and 3."""
        options = [variant for option in self.options for variant in self.variants(option)]
        found = [*self._of_any_sizes(options), *self._of_equal_groups(options)]
        alone = [o for o in options if o.dp * self.replicas > 1 and (len(self.pools) > 1 or o.num_devices == self.num_devices)]
        divided = () if self.request.asynchronous else tuple(replace(option, zero=level) for option in alone for level in (2, 3))
        return (*found, Subspace(divided, 1, True, divided=True)) if divided else tuple(found)

    @property
    def _depth(self) -> int:
        return min(self.num_devices, MAX_STAGES)

    def _of_any_sizes(self, options: list[StageOption]) -> Iterator[Subspace]:
        # The programme's states are the devices taken of each pool, so on many devices stages take multiples of some unit.
        several, unit = len(self.pools) > 1, 1
        while math.prod(pool.num_devices // unit + 1 for pool in self.pools) > (MAX_STATES if several else MAX_STATES_OF_ONE_KIND):
            unit *= 2
        free = tuple(option for option in options if option.num_devices % unit == 0)
        if free:
            fine = not several and self.request.model.num_ops <= FINE_OPS and self.num_devices <= MAX_STATES_OF_ONE_KIND - 1
            yield Subspace(free, self._depth, fine)

    def _of_equal_groups(self, options: list[StageOption]) -> Iterator[Subspace]:
        for size in sorted({option.num_devices for option in options}) if len(self.pools) == 1 else ():
            deep = self.num_devices // size
            if self.num_devices % size == 0 and self._depth < deep <= min(MAX_DEPTH, self.request.model.num_ops):
                yield Subspace(tuple(option for option in options if option.num_devices == size), deep, fine=False, equal=True)

    def variants(self, option: StageOption) -> tuple[StageOption, ...]:
        """With or without sequence parallelism, or both: it never holds more, so that it stands alone where it is not slower, and is of
        no use where it is slower and everything fits."""
        prices = self.prices
        if not np.isfinite(prices.passes.op_times(option)[1]).all():
            return ()
        rows = prices.tables.leanest(option)
        copies = prices.tables.copies
        if rows == option or copies @ prices.passes.op_times(rows)[1] <= copies @ prices.passes.op_times(option)[1]:
            return (rows,)
        depth = max(self.pools[option.pool].num_devices // option.num_devices, 1)
        state, kept, _ = prices.memory.op_shares(option)
        return (option, rows) if copies @ (state + min(depth, self.count) * kept.sum(axis=1)) > depth else (option,)

    def ranks(self, option: StageOption, start: int, together: bool) -> tuple[tuple[int, ...], ...]:
        """The ranks of a stage in every replica; `together` puts its replicas, otherwise all stages of a replica, side by side."""
        ranks = self.kinds[option.pool].ranks
        places = stage_ranks(start, option.num_devices, self.replicas, None if together else self.pools[option.pool].num_devices)
        return tuple(tuple(ranks[at] for at in group) for group in places)


def powers(most: int) -> list[int]:
    """Powers of two up to a number."""
    return [2**k for k in range(most.bit_length()) if 2**k <= most]
