"""What every option of a family costs: times of ops, memory, messages, and what follows the last micro-batch.

N are the ops of the chain, O the distinct ones. What is named `least_…` is a bound: no plan is below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.costs.collectives import BUCKET_BYTES, group_of, sync_gradients_s
from penstock.costs.memory import bytes_per_parameter
from penstock.costs.table import CostTable, Floats
from penstock.models.segments import pieces
from penstock.models.shapes import Shape
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES
from penstock.search.space.levels import Levels, levels_of
from penstock.search.space.stage_costs import DevicePool, Ints, OptionCosts, StageOption
from penstock.timing.pass_times import OpPasses, op_passes, rerun
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.search.space.device_kinds import Kind
    from penstock.search.space.request import Request

__all__ = ["FamilyPrices", "step_s_per_weight"]

_LARGE = 1e9
"""Weights of an optimizer step in which the time to start it no longer counts."""

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def _remembered(method: Callable[Concatenate[FamilyPrices, Given], Answer]) -> Callable[Concatenate[FamilyPrices, Given], Answer]:
    """The method, with each answer worked out once for a family."""

    @wraps(method)
    def answer(prices: FamilyPrices, /, *given: Given.args, **named: Given.kwargs) -> Answer:
        key = (method.__name__, *given)
        if key not in prices._known:
            prices._known[key] = method(prices, *given, **named)
        found: Answer = prices._known[key]
        return found

    return answer


def step_s_per_weight(request: Request, device: str) -> float:
    """Optimizer time for one more weight on a device, without what starting the step takes."""
    frame, step_s = request.frame, request.estimator.source.optimizer_s
    once, twice = (step_s(n * _LARGE, device, frame.precision, frame.optimizer, gradients=frame.gradients) for n in (1, 2))
    return (twice - once) / _LARGE


@dataclass(frozen=True)
class FamilyPrices:
    """Costs of options where a number of replicas run micro-batches of so many samples."""

    request: Request
    kinds: tuple[Kind, ...]
    pools: tuple[DevicePool, ...]
    replicas: int
    samples: int

    @cached_property
    def _known(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def _common(self, name: str, key: tuple[Any, ...], make: Callable[[], Answer]) -> Answer:
        """What other families of the request have as well."""
        known = self.request.common
        if (name, *key) not in known:
            known[name, *key] = make()
        found: Answer = known[name, *key]
        return found

    @cached_property
    def bounded(self) -> dict[tuple[StageOption, ...], object]:
        """What bounds have put together for sets of options."""
        return {}

    @property
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

    @property
    def num_devices(self) -> int:
        """Devices of one replica."""
        return sum(pool.num_devices for pool in self.pools)

    @cached_property
    def chain(self) -> tuple[Ints, Ints]:
        """[N] number of each op among the distinct ones, and the first op of each number."""

        def numbered() -> tuple[Ints, Ints]:
            index = {op.signature: number for number, op in enumerate(self.request.model.distinct_ops)}
            numbers = np.array([index[place.op.signature] for place in self.request.model.ops])
            return numbers, np.unique(numbers, return_index=True)[1]

        return self._common("chain", (), numbered)

    @cached_property
    def copies(self) -> Ints:
        """[O] how often each distinct op occurs."""
        return np.bincount(self.chain[0], minlength=len(self.request.model.distinct_ops))

    @_remembered
    def leanest(self, option: StageOption) -> StageOption:
        """The option with sequence parallelism if it can have that."""
        return replace(option, sequence=option.tp > 1 and self.request.estimator.divides_tokens)

    # Times of ops

    def times(self, option: StageOption, algo: int = 0) -> tuple[Floats, Floats]:
        """[N] forward time and forward + backward time of every op, collectives included; infinite where it cannot be divided so."""
        forward, both = self.op_times(option, algo) if algo else self.op_times(option)
        return forward[self.chain[0]], both[self.chain[0]]

    def filling(self, option: StageOption) -> Floats:
        """[N] what each op adds at least to filling and draining the pipeline under any schedule of the request but the interleaved."""
        return self.op_filling(option)[self.chain[0]]

    def table(self, option: StageOption) -> tuple[CostTable, Shape]:
        """The op costs of an option, and the shape of its ranks' share of a micro-batch."""
        frame = self.request.frame
        shape = self._common("shape", (self.samples, option.dp), lambda: share_shape(frame, self.samples, option.dp))
        return self.request.estimator.table(shape, option.tp, option.sequence), shape

    def _device(self, option: StageOption) -> str:
        return self.kinds[option.pool].device.name

    def _op_passes(self, option: StageOption, algo: int = 0) -> OpPasses:
        """[O] passes of the distinct ops under one of their splits, ZeRO apart."""
        (table, shape), device = self.table(option), self._device(option)
        return self._common(
            "passes", (shape, option.tp, option.sequence, device, algo),
            lambda: op_passes(self.request.model, table, shape, device=device, tp=option.tp, algos=algo),
        )  # fmt: skip

    @_remembered
    def op_times(self, option: StageOption, algo: int = 0) -> tuple[Floats, Floats]:
        """[O] `times` of the distinct ops; under ZeRO-2 and 3 with what every micro-batch sends of weights and gradients."""
        passes = self._op_passes(option, algo)
        forward, both = passes.forward_pass_s, passes.both_s
        if option.zero > 1:
            summed, gathered = self._sent_s(option)
            once = {2: summed, 3: summed + 2 * gathered}[option.zero]
            # What is sent once an iteration is in `op_after_s`, so that only the other micro-batches' share counts here.
            both = both + (once - (summed + (gathered if option.zero == 3 else 0.0)) / self.count) * self._least_weights(option)
        if self.request.asynchronous:  # every micro-batch ends with an update
            both = both + self._update_s(option)
        return forward / self.window, both / self.window

    @_remembered
    def op_filling(self, option: StageOption) -> Floats:
        """[O] `filling` of the distinct ops."""
        time = self.op_times(option)[1]
        relief = max(SCHEDULES[name].fill_relief for name in (DEFAULT_SCHEDULE, *self.request.schedules))
        relief = min(relief, self.count)  # with one micro-batch only the drain can be filled
        return np.maximum(time - relief * self._op_passes(option).weight_s, 0.0) if relief else time

    @_remembered
    def least_times(self, option: StageOption) -> Floats:
        """[O] forward + backward time of the distinct ops, the better of with and without sequence parallelism."""
        rows = self.leanest(option)
        return np.asarray(np.minimum(self.op_times(rows)[1], self.op_times(replace(rows, sequence=False))[1]))

    @_remembered
    def least_filling(self, option: StageOption) -> Floats:
        """[O] `op_filling`, the better of with and without sequence parallelism."""
        rows = self.leanest(option)
        return np.asarray(np.minimum(self.op_filling(rows), self.op_filling(replace(rows, sequence=False))))

    # After the last micro-batch

    def after_s(self, option: StageOption) -> Floats:
        """[N] least time per op of gradient sync and optimizer step after the last micro-batch, wherever the replicas lie."""
        return self.op_after_s(option)[self.chain[0]]

    @_remembered
    def op_after_s(self, option: StageOption) -> Floats:
        """[O] `after_s` of the distinct ops."""
        if self.request.asynchronous:
            return np.zeros(len(self.copies))
        return self._update_s(option)

    def _update_s(self, option: StageOption) -> Floats:
        """[O] least time to sum the gradients of the distinct ops and to change their weights."""
        step_s = step_s_per_weight(self.request, self._device(option)) / (self.replicas * option.dp if option.zero else 1)
        return np.asarray(self._least_weights(option) * (step_s + sum(self._sent_s(option))))

    @_remembered
    def side_by_side_s(self, option: StageOption) -> Floats:
        """[N] gradient sync and optimizer step where a replica's stages lie side by side: those of a node share its network."""
        kind, own = self.kinds[option.pool], self.pools[option.pool].num_devices
        lanes = [kind.ranks[replica * own + i * option.tp] for replica in range(self.replicas) for i in range(option.dp)]
        step_s = step_s_per_weight(self.request, self._device(option)) / len(lanes)
        if len(lanes) > 1:
            sharing = option.tp * max(1, min(own, kind.per_node) // option.num_devices)
            step_s += sum(self._group_s(lanes, sharing))
        return np.asarray(self._least_weights(option) * step_s)[self.chain[0]]

    @_remembered
    def ends_s(self, option: StageOption) -> float:
        """Time to add up the gradients of a weight that the first op shares with a later one, if a stage of this option has one of both
        and another such stage in another node the other."""
        kind, cluster, (user, shared_bytes) = self.kinds[option.pool], self.request.estimator.cluster, self.shared
        apart = next((rank for rank in kind.ranks if cluster.node_index(rank) != cluster.node_index(kind.ranks[0])), None)
        if user < 0 or apart is None:
            return 0.0
        own = self.pools[option.pool].num_devices
        sharing = min(option.num_devices * max(1, kind.per_node // own), kind.per_node)
        return sync_gradients_s(shared_bytes, cluster, (kind.ranks[0], apart), sharing=sharing)  # whole, unless both ends divide it

    @cached_property
    def shared(self) -> tuple[int, float]:
        """The last op that shares a weight with the first one and the bytes of its gradient; -1 where there is none."""

        def found() -> tuple[int, float]:
            model = self.request.model
            users = [place for place in model.ops if place.op.tied_to == model.ops[0].name]
            if not users:
                return -1, 0.0
            count = users[-1].op.parameters.at(Shape(1)) - float(users[-1].op.config.get("untied_parameters", 0))
            return users[-1].index, count * self._per_weight[1]

        return self._common("shared", (), found)

    def ends_between_s(self, first: StageOption, last: StageOption) -> float:
        """Time to add up the gradients of the weight that the first op shares with a later one, between stages of two options in
        different nodes; they divide the weight if both options do."""
        cluster, tp, (user, shared_bytes) = self.request.estimator.cluster, min(first.tp, last.tp), self.shared
        pairs = max(first.num_devices, last.num_devices)
        sharing = max(self._flows(option, pairs) for option in (first, last))
        ranks = self.kinds[first.pool].ranks[0], self.kinds[last.pool].ranks[-1]

        def summed_s() -> float:
            if user < 0 or ranks[0] == ranks[1]:
                return 0.0
            return sync_gradients_s(shared_bytes / tp, cluster, ranks, sharing=sharing)

        return self._common("ends", (ranks, tp, sharing), summed_s)

    def least_after_s(self, options: Sequence[StageOption]) -> float:
        """What follows the last micro-batch of a plan of these options at least: the average over devices, every op under its best one."""
        each = np.stack([option.num_devices / self.num_devices * self.op_after_s(option) for option in options])
        return float(each.min(axis=0)[self.chain[0]].sum())

    @_remembered
    def _sent_s(self, option: StageOption) -> tuple[float, float]:
        """Time per weight to sum gradients among the ranks that hold it, each keeping a part, and to gather it from them."""
        kind, holders = self.kinds[option.pool], self.replicas * option.dp
        if holders == 1:
            return 0.0, 0.0

        def sent_s() -> tuple[float, float]:
            lanes = [kind.ranks[i * option.tp] for i in range(holders) if i * option.tp < len(kind.ranks)]
            if not option.zero:
                group = group_of(self.request.estimator.cluster, lanes, option.tp)
                return group.time_s("all_reduce", BUCKET_BYTES) / BUCKET_BYTES * self._per_weight[1], 0.0
            return self._group_s(lanes, option.tp)

        return self._common("sent", (kind.device.name, holders, option.tp, option.zero > 0), sent_s)

    def _group_s(self, lanes: Sequence[int], sharing: int) -> tuple[float, float]:
        """Time per weight to sum gradients among some ranks, each keeping a part, and to gather the weight, with so many groups at once."""
        group = group_of(self.request.estimator.cluster, lanes, sharing)
        weight, gradient, _, _ = self._per_weight
        summed, gathered = (group.time_s(name, BUCKET_BYTES) / BUCKET_BYTES for name in ("reduce_scatter", "all_gather"))
        return summed * gradient, gathered * weight

    @property
    def _per_weight(self) -> tuple[int, int, int, int]:
        """Bytes of a weight, its gradient, its master copy and its moments."""
        frame = self.request.frame
        return bytes_per_parameter(frame.precision, frame.optimizer, frame.gradients)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Bytes of a weight and of its gradient."""
        return self._per_weight[0], self._per_weight[1]

    def op_weights(self, option: StageOption) -> Floats:
        """[O] trained weights of the distinct ops on one rank at least."""
        return self._least_weights(option)

    def _least_weights(self, option: StageOption) -> Floats:
        """[O] weights on one rank; those that a distinct op shares with another count there alone, as if one stage held both."""
        shared = [op.config.get("untied_parameters", 0) / option.tp if op.tied_to else np.inf for op in self.request.model.distinct_ops]
        return np.minimum(self.table(option)[0].parameters[:, 0, 0], shared)

    # Memory

    @_remembered
    def op_memory(self, option: StageOption) -> tuple[Floats, Floats, Floats]:
        """Shares of a device's memory that hold [O] the state of each distinct op at least and [O, P] what it keeps of one micro-batch,
        and [O, P] the time to bring that back at least."""
        recovery, limit = self.request.recovery[option.sequence], self.pools[option.pool].memory_limit
        shape, state = self.table(option)[1], self._least_weights(option) * self.state_bytes(option)
        return state / limit, recovery.bytes_at(shape, option.tp) / limit, recovery.least_s(self.op_times(option)[0])

    def state_bytes(self, option: StageOption) -> float:
        """Bytes that a weight, its gradient and what the optimizer keeps for it take on one device."""
        weight, gradient, master, moments = self._per_weight
        holders = option.dp * self.replicas if option.zero else 1
        return weight / (holders if option.zero > 2 else 1) + gradient / (holders if option.zero > 1 else 1) + (master + moments) / holders

    def levels(self, option: StageOption) -> Levels:
        """What recomputation can save under one option; how its weights are divided does not matter."""
        return self._levels(replace(option, zero=min(option.zero, 1)))

    @_remembered
    def _levels(self, option: StageOption) -> Levels:
        key = (self.table(option)[1], option.tp, option.sequence, self._device(option), self.count if self.request.asynchronous else 0)
        return self._common("levels", key, lambda: levels_of(self.costs(option), self.request.blocks))

    # All of it, op by op, as the programmes read it

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
        kept, passed = self._common("kept", (shape, option.tp, option.sequence), lambda: self._kept(option))
        parameters, entering = np.ascontiguousarray(table.parameters[ops, 0, 0]), entering.copy()
        if option.zero > 1:  # nothing enters the only stage, but the weights and gradients of two blocks at a time
            entering[0] += self._block_bytes(option, parameters)
        state_bytes = self.state_bytes(option)
        if self.request.asynchronous:  # each micro-batch under way keeps the weights that it used, the newest of them those of the state
            kept, state_bytes = kept + parameters * self._per_weight[0], state_bytes - self._per_weight[0]
        parameters *= state_bytes
        light = self._common("light", (option.sequence,), lambda: self._light(option.sequence))
        return OptionCosts(
            option, forward, compute, kept, parameters, workspace, backward_workspace, entering, enter, leave, passed=passed, light=light
        )

    def _kept(self, option: StageOption) -> tuple[Floats, Floats]:
        """[N] bytes that ops keep of a micro-batch, and what of it the next stage keeps instead."""
        recovery, shape = self.request.recovery[option.sequence], self.table(option)[1]
        made, passed = (np.array([size.at(shape, option.tp) for size in sizes]) for sizes in (recovery.made, recovery.passed))
        return made[self.chain[0]], passed[self.chain[0]]

    def _light(self, sequence: bool) -> NDArray[np.bool_]:
        """[N] ops that need not run again at the end of a recomputed run."""
        model = self.request.estimator.model_under(sequence)
        return np.array([not rerun([model.ops[first]], [0]) for first in self.chain[1]])[self.chain[0]]

    def hiding(self, costs: OptionCosts) -> OptionCosts:
        """The costs under a zero-bubble schedule, which hides weight gradients in the fill and drain of the pipeline."""
        return replace(costs, hidden_fill_s=np.maximum(costs.compute - self.filling(costs.option), 0.0))

    def _block_bytes(self, option: StageOption, parameters: Floats) -> float:
        """Gradients of a block twice, as they were made and on their way, and under ZeRO-3 its weights twice too."""
        weight, gradient, _, _ = self._per_weight
        starts = [piece.start for piece in pieces(self.request.model, 0, len(parameters))]
        largest = float(np.add.reduceat(parameters, starts).max())
        return (weight + gradient + (2 * weight if option.zero == 3 else 0)) * largest

    def least_costs(self, option: StageOption) -> OptionCosts:
        """Costs that no stage of this option can be below, with or without sequence parallelism."""
        own = self.costs(self.leanest(option))
        if not own.option.sequence:
            return own
        other = self.costs(replace(own.option, sequence=False))
        names = ("forward", "compute", "forward_reserve", "backward_reserve", "enter", "leave")
        return replace(own, **{name: np.minimum(getattr(own, name), getattr(other, name)) for name in names})

    # Messages between stages

    def _messages(self, option: StageOption, sizes: Floats) -> Floats:
        """[2, sizes] times of messages inside a node and across nodes, where all lanes of the stage send at once."""
        lines = self._lines(option.pool, min(option.num_devices, self.kinds[option.pool].per_node))
        return np.stack([latency_s + sizes / bandwidth for latency_s, bandwidth in lines]) / self.window

    @_remembered
    def _lines(self, pool: int, lanes: int) -> list[tuple[float, float]]:
        """Latency and bandwidth of a message inside a node, and of one of so many across nodes; no time where there is none."""
        cluster, kind = self.request.estimator.cluster, self.kinds[pool]
        first = kind.ranks[0]
        home = cluster.node_index(first)
        inside = next((rank for rank in kind.ranks[1:] if cluster.node_index(rank) == home), None)
        # A replica that has no more than a node of this kind sends to other kinds where it sends to other nodes.
        own = () if len(self.kinds) > 1 and self.pools[pool].num_devices <= kind.per_node else kind.ranks
        others = (*own, *(rank for other in self.kinds for rank in other.ranks[:1]))
        across = next((rank for rank in others if cluster.node_index(rank) != home), None)
        ends, none = ((inside, 1), (across, lanes)), (0.0, np.inf)
        return [
            (cluster.link(first, rank).latency_s, cluster.flow_bandwidth_bytes_per_s(first, rank, sharing)) if rank is not None else none
            for rank, sharing in ends
        ]

    def messages_between(self, before: StageOption, after: StageOption, across: bool) -> tuple[Floats, Floats]:
        """[N + 1] times of the message there and of the one back, at each op, between stages of two options that lie side by side."""
        latency_s, there_s, back_s = self.link_between(before, after, across)
        return latency_s + there_s * self.cut_bytes(after)[0], latency_s + back_s * self.cut_bytes(before)[1]

    @_remembered
    def cut_bytes(self, option: StageOption) -> tuple[Floats, Floats]:
        """[N + 1] what a rank of a stage gets that begins at each op, and what it gets back if it ends there."""
        table, shape = self.table(option)
        got, back, at = np.zeros(len(table.chain) + 1), np.zeros(len(table.chain) + 1), table.shape_index(shape)
        got[1:-1], back[1:-1] = table.input_bytes[table.chain[1:], at, 0, 0], table.output_bytes[table.chain[:-1], at, 0, 0]
        return got, back

    def link_between(self, before: StageOption, after: StageOption, across: bool) -> tuple[float, float, float]:
        """Latency of messages between stages of two options that lie side by side, and seconds for each byte that a rank gets there, and
        back; a rank of the smaller stage serves several of the larger one in turn."""
        cluster, wider = self.request.estimator.cluster, after.num_devices / before.num_devices
        sender, receiver = self.kinds[before.pool].ranks[0], self.kinds[after.pool].ranks[-1]
        if across:
            sharing = max(self._flows(option, max(before.num_devices, after.num_devices)) for option in (before, after))
            latency_s, bandwidth = cluster.link(sender, receiver).latency_s, cluster.flow_bandwidth_bytes_per_s(sender, receiver, sharing)
        else:
            link = cluster.node_of(sender).intra
            latency_s, bandwidth = link.latency_s, link.bandwidth_bytes_per_s
        per_byte_s = 1 / bandwidth / self.window
        return latency_s / self.window, max(1.0, wider) * per_byte_s, max(1.0, 1 / wider) * per_byte_s

    def _flows(self, option: StageOption, pairs: int) -> int:
        """Messages over the network of a node of a stage, if so many leave the stage at once in every replica."""
        kind, own = self.kinds[option.pool], self.pools[option.pool].num_devices
        return math.ceil(pairs * min(1.0, kind.per_node / option.num_devices)) * max(1, kind.per_node // own)

    def least_sent_bytes(self, option: StageOption) -> Floats:
        """[2] of the smallest message that a stage may get, and of the smallest that it may send; infinite in a chain of one op."""
        table, shape = self.table(option)
        s, ops = table.shape_index(shape), table.chain
        entering, leaving = table.input_bytes[ops[1:], s, 0, 0], table.output_bytes[ops[:-1], s, 0, 0]
        return np.array([entering.min(initial=np.inf), leaving.min(initial=np.inf)])

    @_remembered
    def least_messages_s(self, option: StageOption) -> Floats:
        """[2] what a stage with others before and behind it spends at least on the message it gets and the one it sends."""
        sizes = self.least_sent_bytes(option)
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
