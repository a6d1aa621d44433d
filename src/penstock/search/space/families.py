"""All ways to divide a cluster into equal replicas and a batch into micro-batches, and what a stage may then be made of.

A family is a number of replicas and a micro-batch size. Within it each kind of devices is a pool, of which every replica has the same
share; an option is a way to run a stage on some devices of one pool.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.costs.collectives import BUCKET_BYTES, group_of, point_to_point_s
from penstock.costs.memory import CUDA_CONTEXT_BYTES, SLACK, bytes_per_parameter
from penstock.costs.table import CostTable, Floats
from penstock.models.segments import pieces
from penstock.models.shapes import Shape
from penstock.plans.ranks import stage_ranks
from penstock.schedules.rules import SCHEDULES
from penstock.search.partition.stages import Blocks, Ints, Levels, OptionCosts, Pool, StageOption, levels_of
from penstock.search.request import Request, micro_batch_sizes
from penstock.timing.pass_times import OpPasses, op_passes, rerun
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.clusters import Cluster, Device

__all__ = ["Family", "Kind", "Pass", "families", "kinds_of"]

MAX_STAGES = 16
"""Stages of a pipeline whose stages may differ in size."""
MAX_DEPTH = 128
"""Stages of a pipeline of equal groups of devices."""
CHUNKS = (2, 3, 4)
"""Stages per device group of an interleaved schedule that are tried."""
FINE_OPS = 600
"""Chains up to this many ops are cut between any two of them at once."""
STATES = 500
"""Ways to have taken devices of several pools that a programme may tell apart."""
_LARGE = 1e9
"""An amount at which latencies no longer count."""


@dataclass(frozen=True)
class Kind:
    """All devices of one kind."""

    device: Device
    ranks: tuple[int, ...]
    per_node: int
    """Devices that are in one node wherever a run of so many begins."""


@dataclass(frozen=True)
class Pass:
    """Options that are looked at together, and how deep their pipelines may be."""

    options: tuple[StageOption, ...]
    max_stages: int
    fine: bool
    """Whether the cuts between any two ops are looked at from the start."""
    equal: bool = False
    """Whether all stages have as many devices, so that there are exactly `max_stages` of them."""
    divided: bool = False
    """Whether its one stage divides gradients, or weights, among ranks that hold the same."""
    mixed: bool = False
    """Whether each op of a stage may have an option of its own on the same devices."""


def kinds_of(cluster: Cluster) -> list[Kind]:
    """The kinds of a cluster with their ranks; nodes of unequal sizes count as several of their common divisor."""
    found = []
    for device, _ in cluster.kinds:
        ranks: list[int] = []
        sizes: list[int] = []
        first = 0
        for run in cluster.runs:
            if run.node.device == device:
                ranks += range(first, first + run.num_devices)
                sizes.append(run.node.num_devices)
            first += run.num_devices
        found.append(Kind(device, tuple(ranks), math.gcd(*sizes)))
    return found


def families(request: Request) -> Iterator[Family]:
    """Every family in which each replica has a device of some kind and a whole number of micro-batches."""
    kinds, batch = kinds_of(request.cluster), request.frame.global_batch
    largest = max(len(kind.ranks) for kind in kinds)
    for replicas in range(1, largest + 1):
        if batch % replicas or (len(kinds) == 1 and largest % replicas):
            continue
        if len(kinds) > 1 and not any(len(kind.ranks) % replicas == 0 for kind in kinds):
            continue
        for samples in micro_batch_sizes(batch, replicas, request.micro_batches):
            yield Family(request, tuple(kinds), replicas, samples)


Answer = TypeVar("Answer")


def _remembered(method: Callable[[Family, StageOption], Answer]) -> Callable[[Family, StageOption], Answer]:
    """The method, with each option's answer worked out once for a family."""

    @wraps(method)
    def answer(family: Family, option: StageOption) -> Answer:
        key = (method.__name__, option)
        if key not in family._known:
            family._known[key] = method(family, option)
        found: Answer = family._known[key]
        return found

    return answer


@dataclass(frozen=True)
class Family:
    """Plans with one number of replicas and one micro-batch size."""

    request: Request
    kinds: tuple[Kind, ...]
    replicas: int
    samples: int

    @property
    def count(self) -> int:
        """Micro-batches of a replica."""
        return self.request.frame.global_batch // self.replicas // self.samples

    @cached_property
    def chain(self) -> tuple[Ints, Ints]:
        """[N] number of each op among the distinct ones, and the first op of each number."""
        index = {op.signature: number for number, op in enumerate(self.request.model.distinct_ops)}
        numbers = np.array([index[place.op.signature] for place in self.request.model.ops])
        return numbers, np.unique(numbers, return_index=True)[1]

    @cached_property
    def pools(self) -> tuple[Pool, ...]:
        """What one replica has of each kind."""
        pools = []
        for kind in self.kinds:
            count = len(kind.ranks) // self.replicas
            node = kind.per_node if count % kind.per_node == 0 else math.gcd(count, kind.per_node)
            limit = min(self.request.memory_limit_bytes, kind.device.memory_bytes)
            context = 0.0 if kind.device.name.startswith("cpu") else CUDA_CONTEXT_BYTES
            pools.append(Pool(count, max(node, 1), (limit - context) / (1 + SLACK)))
        return tuple(pools)

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return sum(pool.num_devices for pool in self.pools)

    @cached_property
    def options(self) -> tuple[StageOption, ...]:
        """Tensor-parallel groups stay in a node; a stage is part of a node or, where kinds are mixed, whole nodes."""
        found = []
        most_tp = self.request.model.max_tp()
        for index, pool in enumerate(self.pools):
            most = pool.num_devices if len(self.pools) > 1 else min(pool.num_devices, pool.per_node)
            for tp in _powers(min(pool.per_node, most_tp)):
                sizes = {*_powers(most // tp), *(n // tp for n in range(pool.per_node, most + 1, pool.per_node) if n % tp == 0)}
                for dp in sorted(sizes):
                    size = tp * dp
                    if self.samples % dp == 0 and size <= most and (size <= pool.per_node or size % pool.per_node == 0):
                        found.append(StageOption(size, tp, dp, index))
        return tuple(found)

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Stages of any sizes as far as the number of states allows, and pipelines of equal groups that are deeper than those."""
        options = [variant for option in self.options for variant in self.variants(option)]
        mixed, unit, num_ops = len(self.pools) > 1, 1, self.request.model.num_ops
        while math.prod(pool.num_devices // unit + 1 for pool in self.pools) > (STATES if mixed else 65):
            unit *= 2
        free = tuple(option for option in options if option.num_devices % unit == 0)
        depth = min(self.num_devices, MAX_STAGES)
        found = [Pass(free, depth, not mixed and num_ops <= FINE_OPS and self.num_devices <= 64)] if free else []
        for size in sorted({option.num_devices for option in options}) if not mixed else ():
            deep = self.num_devices // size
            if self.num_devices % size == 0 and depth < deep <= min(MAX_DEPTH, num_ops):
                found.append(Pass(tuple(option for option in options if option.num_devices == size), deep, False, True))
        alone = [option for option in options if option.dp * self.replicas > 1 and (mixed or option.num_devices == self.num_devices)]
        divided = tuple(replace(option, zero=level) for option in alone for level in (2, 3))
        return (*found, Pass(divided, 1, True, divided=True)) if divided else tuple(found)

    def variants(self, option: StageOption) -> tuple[StageOption, ...]:
        """With or without sequence parallelism, or both: it never holds more, so that it stands alone where it is not slower, and is of
        no use where it is slower and everything fits."""
        if not np.isfinite(self.op_times(option)[1]).all():
            return ()
        rows = self.leanest(option)
        if rows == option or self.copies @ self.op_times(rows)[1] <= self.copies @ self.op_times(option)[1]:
            return (rows,)
        depth = max(self.pools[option.pool].num_devices // option.num_devices, 1)
        state, kept, _ = self.op_memory(option)
        return (option, rows) if self.copies @ (state + min(depth, self.count) * kept.sum(axis=1)) > depth else (option,)

    @cached_property
    def copies(self) -> Ints:
        """[O] how often each distinct op occurs."""
        return np.bincount(self.chain[0], minlength=len(self.request.model.distinct_ops))

    def leanest(self, option: StageOption) -> StageOption:
        """The option with sequence parallelism if it can have that."""
        return replace(option, sequence=option.tp > 1 and self.request.estimator.divides_tokens)

    def least_times(self, option: StageOption) -> Floats:
        """[O] forward + backward time of the distinct ops, the better of with and without sequence parallelism."""
        rows = self.leanest(option)
        return np.minimum(self.op_times(rows)[1], self.op_times(replace(rows, sequence=False))[1])

    def least_filling(self, option: StageOption) -> Floats:
        """[O] the same of `filling`."""
        rows = self.leanest(option)
        return np.minimum(self.op_filling(rows), self.op_filling(replace(rows, sequence=False)))

    def times(self, option: StageOption) -> tuple[Floats, Floats]:
        """[N] forward time and forward + backward time of every op, collectives included; infinite where it cannot be."""
        forward, both = self.op_times(option)
        return forward[self.chain[0]], both[self.chain[0]]

    def filling(self, option: StageOption) -> Floats:
        """[N] what each op adds at least to filling and draining the pipeline under any schedule of the request but the interleaved."""
        return self.op_filling(option)[self.chain[0]]

    def after_s(self, option: StageOption) -> Floats:
        """[N] least time per op of gradient sync and optimizer step after the last micro-batch, wherever the replicas lie."""
        return self.op_after_s(option)[self.chain[0]]

    @cached_property
    def _known(self) -> dict[tuple[str, StageOption], Any]:
        return {}

    def table(self, option: StageOption) -> tuple[CostTable, Shape]:
        """The op costs of an option, and the shape of its ranks' share of a micro-batch."""
        shape = share_shape(self.request.frame, self.samples, option.dp)
        return self.request.estimator.table(shape, option.tp, option.sequence), shape

    def op_passes(self, option: StageOption, algo: int = 0) -> OpPasses:
        """[O] passes of the distinct ops under one of their splits, ZeRO apart."""
        (table, shape), device = self.table(option), self.kinds[option.pool].device.name
        return op_passes(self.request.model, table, shape, device=device, tp=option.tp, algos=algo)

    @_remembered
    def op_times(self, option: StageOption) -> tuple[Floats, Floats]:
        """[O] `times` of the distinct ops; under ZeRO-2 and 3 with what every micro-batch sends of weights and gradients."""
        passes = self.op_passes(option)
        forward, both = passes.forward_pass_s, passes.both_s
        if option.zero > 1:
            summed, gathered = self._sent_s(option)
            once = {2: summed, 3: summed + 2 * gathered}[option.zero]
            both = both + (once - (summed + (gathered if option.zero == 3 else 0.0)) / self.count) * self._least_weights(option)
        return forward, both

    @_remembered
    def _sent_s(self, option: StageOption) -> tuple[float, float]:
        """Time per weight to sum gradients among the ranks that hold it, each keeping a part, and to gather it from them."""
        frame, kind, holders = self.request.frame, self.kinds[option.pool], self.replicas * option.dp
        if holders == 1:
            return 0.0, 0.0
        lanes = [kind.ranks[i * option.tp] for i in range(holders) if i * option.tp < len(kind.ranks)]
        group = group_of(self.request.estimator.cluster, lanes, option.tp)
        item = bytes_per_parameter(frame.precision, frame.optimizer)[1] / BUCKET_BYTES
        return group.time_s("reduce_scatter", BUCKET_BYTES) * item, group.time_s("all_gather", BUCKET_BYTES) * item

    @_remembered
    def op_filling(self, option: StageOption) -> Floats:
        """[O] `filling` of the distinct ops."""
        time = self.op_times(option)[1]
        if not any(SCHEDULES[name].fill_relief for name in self.request.schedules):
            return time
        return np.maximum(time - 2 * self.op_passes(option).weight_s, 0.0)  # weight gradients fill both ends

    @_remembered
    def op_after_s(self, option: StageOption) -> Floats:
        """[O] `after_s` of the distinct ops."""
        frame, kind, request = self.request.frame, self.kinds[option.pool], self.request
        holders = self.replicas * option.dp
        step = [request.estimator.source.optimizer_s(n * _LARGE, kind.device.name, frame.precision, frame.optimizer) for n in (1, 2)]
        per_weight = (step[1] - step[0]) / _LARGE / holders + sum(self._sent_s(option))
        return np.asarray(self._least_weights(option) * per_weight)

    def _least_weights(self, option: StageOption) -> Floats:
        """[O] weights on one rank; those that a distinct op shares with another count there alone, as if one stage held both."""
        shared = [op.config.get("untied_parameters", 0) / option.tp if op.tied_to else np.inf for op in self.request.model.distinct_ops]
        return np.minimum(self.table(option)[0].parameters[:, 0, 0], shared)

    def least_after_s(self, part: Pass) -> float:
        """What follows the last micro-batch of a plan of a pass at least: the average over devices, every op under its best option."""
        each = np.stack([option.num_devices / self.num_devices * self.op_after_s(option) for option in part.options])
        return float(each.min(axis=0)[self.chain[0]].sum())

    @_remembered
    def op_memory(self, option: StageOption) -> tuple[Floats, Floats, Floats]:
        """Shares of a device's memory that hold [O] the state of each distinct op at least and [O, P] what it keeps of one micro-batch,
        and [O, P] the time to bring that back at least."""
        recovery, limit = self.request.recovery[option.sequence], self.pools[option.pool].memory_limit
        shape, state = self.table(option)[1], self._least_weights(option) * self.state_bytes(option)
        return state / limit, recovery.bytes_at(shape, option.tp) / limit, recovery.least_s(self.op_times(option)[0])

    def state_bytes(self, option: StageOption) -> float:
        """Bytes that a weight, its gradient and what the optimizer keeps for it take on one device."""
        weight, gradient, master, moments = bytes_per_parameter(self.request.frame.precision, self.request.frame.optimizer)
        holders = option.dp * self.replicas
        return weight / (holders if option.zero > 2 else 1) + gradient / (holders if option.zero > 1 else 1) + (master + moments) / holders

    @cached_property
    def _known_levels(self) -> dict[StageOption, Levels]:
        return {}

    def levels(self, option: StageOption, blocks: Blocks) -> Levels:
        """What recomputation can save under one option; how its weights are divided does not matter."""
        plain = replace(option, zero=1)
        if plain not in self._known_levels:
            self._known_levels[plain] = levels_of(self.costs(plain), blocks)
        return self._known_levels[plain]

    @_remembered
    def costs(self, option: StageOption) -> OptionCosts:
        """Costs of the chain's ops under one option, from the estimator's own table."""
        forward, compute = self.times(option)
        table, shape = self.table(option)
        s, ops = table.shape_index(shape), table.chain
        entering, leaving = table.input_bytes[ops, s, 0, 0], table.output_bytes[ops, s, 0, 0]
        enter, leave = np.zeros((2, len(ops) + 1)), np.zeros((2, len(ops) + 1))
        enter[:, 1:-1], leave[:, 1:-1] = self._messages(option, entering[1:]), self._messages(option, leaving[:-1])
        columns = (table.workspace_bytes, table.backward_workspace_bytes)
        workspace, backward_workspace = (np.ascontiguousarray(x[ops, s, 0, 0]) for x in columns)
        recovery = self.request.recovery[option.sequence]
        kept, passed = (np.array([size.at(shape, option.tp) for size in sizes])[ops] for sizes in (recovery.made, recovery.passed))
        parameters, entering = np.ascontiguousarray(table.parameters[ops, 0, 0]), entering.copy()
        if option.zero > 1:  # nothing enters the only stage, but the weights and gradients of two blocks at a time
            entering[0] += self._block_bytes(option, parameters)
        parameters *= self.state_bytes(option)
        model = self.request.estimator.model_under(option.sequence)
        light = np.array([not rerun([model.ops[first]], [0]) for first in self.chain[1]])[self.chain[0]]
        return OptionCosts(
            option, forward, compute, kept, parameters, workspace, backward_workspace, entering, enter, leave, passed=passed, light=light
        )

    def _block_bytes(self, option: StageOption, parameters: Floats) -> float:
        """Gradients of a block twice, as they were made and on their way, and under ZeRO-3 its weights twice too."""
        weight, gradient, _, _ = bytes_per_parameter(self.request.frame.precision, self.request.frame.optimizer)
        starts = [piece.start for piece in pieces(self.request.model, 0, len(parameters))]
        largest = float(np.add.reduceat(parameters, starts).max())
        return 2 * (gradient + (weight if option.zero == 3 else 0)) * largest

    def least_costs(self, option: StageOption) -> OptionCosts:
        """Costs that no stage of this option can be below, with or without sequence parallelism."""
        own = self.costs(self.leanest(option))
        if not own.option.sequence:
            return own
        other = self.costs(replace(own.option, sequence=False))
        names = ("forward", "compute", "forward_reserve", "backward_reserve", "enter", "leave")
        return replace(own, **{name: np.minimum(getattr(own, name), getattr(other, name)) for name in names})

    def _messages(self, option: StageOption, sizes: Floats) -> Floats:
        """[2, sizes] times of messages inside a node and across nodes, where all lanes of the stage send at once."""
        cluster, kind = self.request.estimator.cluster, self.kinds[option.pool]
        first = kind.ranks[0]
        home = cluster.node_index(first)
        inside = next((rank for rank in kind.ranks[1:] if cluster.node_index(rank) == home), None)
        others = (*kind.ranks, *(rank for other in self.kinds for rank in other.ranks[:1]))
        across = next((rank for rank in others if cluster.node_index(rank) != home), None)
        distinct, where = np.unique(sizes, return_inverse=True)
        rows = []
        for rank, sharing in ((inside, 1), (across, min(option.num_devices, kind.per_node))):
            times = [0.0 if rank is None else point_to_point_s(float(size), cluster, first, rank, sharing) for size in distinct]
            rows.append(np.array(times)[where])
        return np.stack(rows)

    @_remembered
    def least_messages_s(self, option: StageOption) -> Floats:
        """[2] what a stage with others before and behind it spends at least on the message it gets and the one it sends."""
        table, shape = self.table(option)
        s, ops = table.shape_index(shape), table.chain
        sizes = np.array(
            [table.input_bytes[ops[1:], s, 0, 0].min(initial=np.inf), table.output_bytes[ops[:-1], s, 0, 0].min(initial=np.inf)]
        )
        inside, across = self._messages(option, np.where(np.isfinite(sizes), sizes, 0.0))
        edges = self.edges(option)
        if edges == 0:
            return np.asarray(np.minimum(inside, across))
        if edges == 2:
            return np.asarray(across)
        near, far = np.minimum(inside, across), np.maximum(inside, across)
        return np.array(min([(near[0], far[1]), (far[0], near[1])], key=sum))

    def edges(self, option: StageOption) -> int:
        """How many of the two messages of a stage between others cross nodes at least."""
        node = self.pools[option.pool].per_node
        if len(self.pools) > 1 or 2 * option.num_devices < node:
            return 0
        return 2 if option.num_devices >= node else 1

    def ranks(self, option: StageOption, start: int, together: bool) -> tuple[tuple[int, ...], ...]:
        """The ranks of a stage in every replica; `together` puts its replicas, otherwise all stages of a replica, side by side."""
        ranks = self.kinds[option.pool].ranks
        places = stage_ranks(start, option.num_devices, self.replicas, None if together else self.pools[option.pool].num_devices)
        return tuple(tuple(ranks[at] for at in group) for group in places)


def _powers(most: int) -> list[int]:
    return [2**k for k in range(most.bit_length()) if 2**k <= most]
