"""What one iteration of a plan takes: time, money and memory, stage by stage.

    iteration = pipeline of the slowest replica + (gradient sync + optimizer step) of the slowest stage

A stage's time for one micro-batch is that of its ops, their tensor-parallel collectives, what the device waits for the host, and
the messages it receives: activations from the stage before, gradients from the stage after. Each message is charged once, to its
receiver, so that the sum over stages is the way through the pipeline and back, and each stage pays once at each side. Nothing
is taken to be hidden behind compute; `schedules.rules` has the formula.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from penstock.clusters import Cluster
from penstock.costs.efficiency import arithmetic_dtype, op_class
from penstock.costs.memory import MemoryBreakdown, gradient_room, rank_parameters, stage_memory
from penstock.costs.replay import OpBytesSource, Replay
from penstock.costs.source import CostSource
from penstock.costs.table import CostTable
from penstock.errors import ProfileMissingError
from penstock.models.ops import Model
from penstock.models.sequence import divides_tokens, with_sequence_parallelism
from penstock.models.shapes import Shape
from penstock.plans.degrees import DegreeRun, algos_of, parts_of, recomputed_in
from penstock.plans.plan import Plan, Stage
from penstock.schedules.rules import SCHEDULES
from penstock.timing.iteration_estimate import Estimate, StageEstimate, update_s
from penstock.timing.messages import cut_times_s, gradient_sharing, reshard_s, slowdown, sync_s, tied_s, tp_group_of
from penstock.timing.pass_times import OpSlice, StagePasses, stage_passes
from penstock.timing.pipeline import micro_batches, share_rows, share_shape
from penstock.timing.recorded import is_recorded

if TYPE_CHECKING:
    from penstock.clusters import Device
    from penstock.costs.collectives import Group

__all__ = ["Estimator", "Pace", "PassBytes", "estimate"]


class PassBytes(NamedTuple):
    """Bytes of one micro-batch on one rank of a stage: held between its passes, and what each pass adds at its fullest moment."""

    held: float
    forward: float
    backward: float
    step: float
    """What the optimizer's step takes, when no micro-batch is held."""


class Pace(NamedTuple):
    """What one replica takes for one micro-batch."""

    work: list[StagePasses]
    """Of each stage."""
    times_s: list[float]
    """Of each device group, both passes and messages."""
    weight_s: list[float]
    """The part of it that is weight gradients."""

    @classmethod
    def of(cls, work: list[StagePasses], num_groups: int) -> Pace:
        """Stages s, s + groups, s + 2 · groups … are chunks of one device group."""
        own = [work[group::num_groups] for group in range(num_groups)]
        return cls(work, [sum(one.total_s for one in group) for group in own], [sum(one.weight_s for one in group) for group in own])


def estimate(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> Estimate:
    """What one iteration of a valid plan takes."""
    from penstock.plans.validity import require_valid

    require_valid(plan, model, cluster)
    return Estimator(model, cluster, source).estimate(plan)


class Estimator:
    """Estimates plans of one model on one cluster; what several plans have in common is computed once."""

    def __init__(
        self, model: Model, cluster: Cluster, source: CostSource, memory_limit_bytes: float = math.inf, shapes: Iterable[Shape] = ()
    ) -> None:
        """`memory_limit_bytes` is the most that may be used of any device; `shapes` that will be asked for share one table."""
        self.model, self.cluster, self.source = model, source.links_of(cluster), source
        self._limit_bytes = memory_limit_bytes
        self._shapes = set(shapes)
        self._tables: dict[tuple[Shape, int, bool, bool], CostTable] = {}
        self._work: dict[tuple[object, ...], StagePasses] = {}
        self._memory: dict[tuple[object, ...], MemoryBreakdown] = {}
        self._parameters: dict[tuple[int, int, int], float] = {}
        self._replays: dict[tuple[Shape, int, bool, OpBytesSource], Replay] = {}
        self._tp_groups: dict[tuple[tuple[int, ...], int], Group] = {}
        self._kinds_of: dict[tuple[int, ...], list[Device]] = {}

    def estimate(self, plan: Plan) -> Estimate:
        """What one iteration of a valid plan takes."""
        samples, counts = micro_batches(plan)
        groups, chunks = plan.num_groups, plan.num_chunks
        paces = self.paces(plan)
        totals_s = [
            SCHEDULES[plan.schedule].pipeline_s(pace.times_s, count, chunks, pace.weight_s)
            for pace, count in zip(paces, counts, strict=True)
        ]
        replica = max(range(len(counts)), key=totals_s.__getitem__)
        pipeline, count, (work, times_s, _) = totals_s[replica], counts[replica], paces[replica]
        if not math.isfinite(pipeline):
            raise ProfileMissingError(f"costs '{self.source.name}' hold no time for the degrees of this plan. Use other degrees or costs.")
        stages = self._stages(plan, samples, counts, work, [pipeline - count * time_s for time_s in times_s], replica)
        # All groups update behind the last backward pass, beside each other; chunks of one group in turn.
        time_s = pipeline + max(sum(update_s(stages, group)) for group in range(groups))
        slowest = max(range(groups), key=lambda group: times_s[group])
        price_per_h = self.cluster.price_usd_per_h
        tokens = plan.global_batch * (plan.seq_length + plan.dec_length)
        return Estimate(
            time_s, pipeline, count, samples, plan.global_batch / time_s, tokens / time_s if tokens else None,
            None if price_per_h is None else price_per_h * time_s / 3600, price_per_h, self._mfu(plan, time_s),
            max(range(slowest, plan.num_stages, groups), key=lambda stage: work[stage].total_s),
            all(stage.fits for stage in stages), tuple(stages), self.source.name, self._notes(plan), replica, counts, time_s,
        )  # fmt: skip

    def paces(self, plan: Plan) -> list[Pace]:
        """How fast each replica of a plan is, whatever the number of its micro-batches."""
        samples, _ = micro_batches(plan)
        cuts = [cut_times_s(self.described, self.cluster, plan, samples, cut) for cut in range(plan.num_stages - 1)]
        known: dict[tuple[object, ...], Pace] = {}  # most replicas are alike
        paces = []
        for replica in range(plan.num_replicas):
            work = [self._stage_passes(plan, stage, samples, replica) for stage in plan.stages]
            key = (*work, *(times[replica] for times in cuts))
            if key not in known:
                known[key] = self._pace(plan, work, [times[replica] for times in cuts])
            paces.append(known[key])
        return paces

    def _pace(self, plan: Plan, work: list[StagePasses], messages: list[tuple[float, float]]) -> Pace:
        """The pace of a replica whose stages take `work` without messages; of each cut, `messages` are the one there and the one back."""
        work = list(work)
        if SCHEDULES[plan.schedule].asynchronous:  # a stage updates after the backward pass of every micro-batch
            steps_s = list(map(sum, self._updates_s(plan)))
            work = [dataclasses.replace(own, backward_s=own.backward_s + step_s) for own, step_s in zip(work, steps_s, strict=True)]
        # Each message counts at its receiver alone: the sum over stages is then the way through the pipeline and back.
        for cut, (there, back) in enumerate(messages):
            work[cut + 1] = dataclasses.replace(work[cut + 1], transfer_in_s=there)
            work[cut] = dataclasses.replace(work[cut], transfer_out_s=back)
        return Pace.of(work, plan.num_groups)

    def _stage_passes(self, plan: Plan, stage: Stage, samples: int, replica: int) -> StagePasses:
        """Time of a stage's ops on the slowest of its devices, and of moving the carry where degrees change inside the stage."""
        ranks, parts, recorded = stage.devices[replica], parts_of(stage), self._recorded(plan, stage, replica)
        # Groups come last: to tell them apart takes long where a plan has thousands of ranks.
        alone = len(ranks) == plan.num_replicas == 1 < self.cluster.num_devices and plan.num_groups == 1

        def passes(part: DegreeRun, device: Device) -> StagePasses:
            shape = self._share(plan, stage, part, samples, device, replica)
            return self._part_passes(stage, part, shape, device, self._tp_group(ranks, part.tp), recorded, alone)

        if len(parts) == 1:
            return max((passes(parts[0], device) for device in self._kinds(ranks)), key=lambda passes: passes.total_s)
        kinds = [sum((passes(part, device) for part in parts), StagePasses()) for device in self._kinds(ranks)]
        moves = [reshard_s(self.model, self.cluster, plan, samples, ranks, a, b) for a, b in pairwise(parts)]
        moved = StagePasses(forward_tp_s=sum(there for there, _ in moves), backward_tp_s=sum(back for _, back in moves))
        return max(kinds, key=lambda passes: passes.total_s) + moved

    def _recorded(self, plan: Plan, stage: Stage, replica: int) -> float:
        """The share of a stage's passes that are played from recordings: not those of the micro-batch during whose backward pass gradients
        are summed."""
        if not is_recorded(plan, stage, self.model, ragged=False):
            return 0.0
        count = micro_batches(plan)[1][replica]
        return 1.0 if stage.degrees.dp * plan.num_replicas == 1 else 1.0 - 1.0 / max(count, 1)

    def _share(self, plan: Plan, stage: Stage, part: DegreeRun, samples: int, device: Device, replica: int) -> Shape:
        """The largest part of a micro-batch that a device of this kind works on."""
        if not plan.micro_batching.slower or part.dp == 1:
            return share_shape(plan, samples, part.dp)
        rows, ranks = share_rows(plan, samples, replica, part.dp), enumerate(stage.devices[replica])
        return share_shape(plan, samples, part.dp, max(rows[at // part.tp] for at, rank in ranks if self.cluster.device(rank) == device))

    def _part_passes(
        self, stage: Stage, part: DegreeRun, shape: Shape, device: Device, group: Group, recorded: float, alone: bool
    ) -> StagePasses:  # fmt: skip
        algos, again = algos_of(stage, part), recomputed_in(stage, part)
        sequence = self.by_rows(stage, part.tp)
        key = (part, shape, sequence, device.name, algos, again, group, recorded, alone)
        if key not in self._work:
            ops = OpSlice(self.model_under(sequence), part.first, part.last, device.name, part.tp, algos, again, recorded)
            slower = slowdown(self.cluster, device, ops, shape, group)
            self._work[key] = stage_passes(self.table(shape, part.tp, sequence, alone), ops, shape, slower)
        return self._work[key]

    def by_rows(self, stage: Stage, tp: int) -> bool:
        """Whether ops of a stage that have this degree run under sequence parallelism."""
        return stage.sequence_parallel and tp > 1 and self.divides_tokens

    @cached_property
    def divides_tokens(self) -> bool:
        """Whether sequence parallelism means anything for the model."""
        return divides_tokens(self.model)

    @cached_property
    def _model_by_rows(self) -> Model:
        return with_sequence_parallelism(self.model)

    def model_under(self, sequence: bool) -> Model:
        """The model, as it is under sequence parallelism if asked."""
        return self._model_by_rows if sequence else self.model

    def described(self, stage: Stage, op: int) -> Model:
        """The model as one of a stage's ops runs it."""
        return self.model_under(self.by_rows(stage, stage.run_of(op).tp))

    def table(self, shape: Shape, tp: int, sequence: bool = False, alone: bool = False) -> CostTable:
        """Op costs at one shape and degree, under sequence parallelism if asked; `alone` for a device beside which all others idle."""
        if (shape, tp, sequence, alone) not in self._tables:
            shapes = list(self._shapes) if shape in self._shapes else [shape]
            cluster = dataclasses.replace(self.cluster, at_work=1) if alone else self.cluster
            table = self.source.table(self.model_under(sequence), shapes, [tp], cluster)
            self._tables.update({(known, tp, sequence, alone): table for known in shapes})
        return self._tables[shape, tp, sequence, alone]

    def _stages(
        self, plan: Plan, samples: int, counts: tuple[int, ...], work: list[StagePasses], bubbles_s: list[float], replica: int
    ) -> list[StageEstimate]:
        """Adds to each stage's work what comes once per iteration, and memory."""
        groups = plan.num_groups
        tied = tied_s(self.model, self.cluster, plan)
        updates = [(0.0, 0.0)] * plan.num_stages if SCHEDULES[plan.schedule].asynchronous else self._updates_s(plan)
        memory = [self._group_memory(plan, group, samples, counts) for group in range(groups)]
        stages = []
        for index, stage in enumerate(plan.stages):
            group, parts = index % groups, parts_of(stage)
            used, limit = memory[group]
            sync, optimizer = updates[index]
            slowest = min(self._kinds(stage.devices[replica]), key=lambda device: device.peak_flops_per_s(self.model.dtype))
            stages.append(StageEstimate(
                index, group, stage.last - stage.first, slowest.name, stage.degrees, work[index], bubbles_s[group], tied[index] + sync,
                optimizer, used, limit, used.total_bytes <= limit, any(self.by_rows(stage, part.tp) for part in parts),
                stage.zero if max(part.dp for part in parts) * plan.num_replicas > 1 else 0,
            ))  # fmt: skip
        return stages

    def _updates_s(self, plan: Plan) -> list[tuple[float, float]]:
        """For each stage, the time of one update: to sum gradients over ranks with the same weights, and of the optimizer."""
        sharing = gradient_sharing(self.cluster, plan)
        return [
            (
                sum(sync_s(self.cluster, plan, stage, part, self._trained(part), sharing[index]) for part in parts_of(stage)),
                self._optimizer_s(plan, stage),
            )
            for index, stage in enumerate(plan.stages)
        ]

    def _tp_group(self, ranks: tuple[int, ...], tp: int) -> Group:
        """The slowest tensor-parallel group of a stage's devices."""
        if (ranks, tp) not in self._tp_groups:
            self._tp_groups[ranks, tp] = tp_group_of(self.cluster, ranks, tp)
        return self._tp_groups[ranks, tp]

    def _kinds(self, ranks: tuple[int, ...]) -> list[Device]:
        """The distinct kinds among ranks."""
        if ranks not in self._kinds_of:
            self._kinds_of[ranks] = list({device.name: device for device in map(self.cluster.device, ranks)}.values())
        return self._kinds_of[ranks]

    def _trained(self, part: DegreeRun) -> float:
        """Weights with gradients on one rank."""
        key = (part.first, part.last, part.tp)
        if key not in self._parameters:
            counts = rank_parameters(self.model.ops[part.first : part.last], part.tp)
            self._parameters[key] = sum(count for op, count in counts if op.trainable)
        return self._parameters[key]

    def _optimizer_s(self, plan: Plan, stage: Stage) -> float:
        """The step over one rank's weights, or its share of them under ZeRO; the slowest of all replicas."""
        num = sum(self._trained(part) / (part.dp * plan.num_replicas if stage.zero else 1) for part in parts_of(stage))
        kinds = self._kinds(tuple(rank for ranks in stage.devices for rank in ranks))
        tensors = stage.last - stage.first
        steps = [self.source.optimizer_s(num, device.name, plan.precision, plan.optimizer, tensors, plan.gradients) for device in kinds]
        return max(steps) if num else 0.0

    def _group_memory(self, plan: Plan, group: int, samples: int, counts: tuple[int, ...]) -> tuple[MemoryBreakdown, float]:
        """What the fullest device of a group holds, and what it may hold; of several kinds the one that is closest to its limit."""
        groups, chunks = plan.num_groups, plan.num_chunks
        stages = plan.stages[group::groups]
        most: dict[str, int] = {}  # micro-batches that a replica with such a device runs
        for count, ranks in zip(counts, stages[0].devices, strict=True):
            for device in self._kinds(ranks):
                most[device.name] = max(count, most.get(device.name, 0))
        found = []
        for device in self._kinds(tuple(rank for ranks in stages[0].devices for rank in ranks)):
            flights = SCHEDULES[plan.schedule].in_flight(groups, group, most[device.name], chunks)
            parts = [
                self._part_memory(plan, stage, part, samples, flight, device)
                for stage, flight in zip(stages, flights, strict=True)
                for part in parts_of(stage)
            ]
            found.append((_joined(parts), min(float(device.memory_bytes), self._limit_bytes)))
        return max(found, key=lambda pair: pair[0].total_bytes / pair[1])

    def _part_memory(self, plan: Plan, stage: Stage, part: DegreeRun, samples: int, flight: int, device: Device) -> MemoryBreakdown:
        shape, holders = share_shape(plan, samples, part.dp), part.dp * plan.num_replicas
        algos, again, sequence = algos_of(stage, part), recomputed_in(stage, part), self.by_rows(stage, part.tp)
        versions = flight if SCHEDULES[plan.schedule].asynchronous else 1
        key = (part, shape, sequence, flight, versions, holders, stage.zero, algos, again, plan.precision, plan.gradients,
               plan.optimizer, device.name)  # fmt: skip
        if key not in self._memory:
            bytes_of, base = self.source.memory_of(device.name, self.model.dtype)
            self._memory[key] = stage_memory(
                self.model_under(sequence), part.first, part.last, shape, in_flight=flight, versions=versions, tp=part.tp, dp=holders,
                zero=stage.zero, algos=algos, recompute=again, precision=plan.precision, optimizer=plan.optimizer, device=device.name,
                base_bytes=base, replay=self._replay(shape, part.tp, sequence, bytes_of), gradients=plan.gradients,
            )  # fmt: skip
        return self._memory[key]

    def states(self, plan: Plan, stages: Iterable[int], samples: int, count: int, device: Device) -> MemoryBreakdown:
        """What a device holds that runs these chunks of a group, with one micro-batch in flight; under asynchronous schedules, of which
        each of `count` micro-batches keeps the weights it used, with as many as there may be."""
        rules, groups, chunks, found = SCHEDULES[plan.schedule], plan.num_groups, plan.num_chunks, []
        for index in stages:
            stage = plan.stages[index]
            flight = rules.in_flight(groups, index % groups, count, chunks)[index // groups] if rules.asynchronous else 1
            found += [self._part_memory(plan, stage, part, samples, flight, device) for part in parts_of(stage)]
        return _joined(found)

    def pass_bytes(self, plan: Plan, stage: Stage, shares: Iterable[tuple[DegreeRun, Shape]], device: str) -> PassBytes:
        """What one micro-batch takes on one rank of a stage, whose parts get shares of it of these shapes, under the first of the stage's
        recomputation patterns."""
        bytes_of, base = self.source.memory_of(device, self.model.dtype)
        held, forward, backward, step = 0.0, 0.0, 0.0, 0.0
        for part, shape in shares:
            replay = self._replay(shape, part.tp, self.by_rows(stage, part.tp), bytes_of)
            line = replay.timeline(part.first, part.last, algos_of(stage, part), recomputed_in(stage, part))
            counts = rank_parameters(self.model.ops[part.first : part.last], part.tp)
            room = gradient_room(counts, plan.precision, plan.optimizer, stage.zero, part.dp * plan.num_replicas, plan.gradients)
            held += line.held_bytes
            forward = max(forward, line.forward_peak_bytes - line.held_bytes)
            backward = max(backward, max(line.backward_peak_bytes + room.cast_bytes, room.late_cast_bytes) - line.held_bytes)
            step = max(step, room.step_bytes)
        return PassBytes(held, base + forward, base + backward, base + step)

    def _replay(self, shape: Shape, tp: int, sequence: bool, bytes_of: OpBytesSource) -> Replay:
        """What replays slices at one shape and degree; one for all devices that have the same bytes, as by formulas."""
        key = (shape, tp, sequence, bytes_of)
        if key not in self._replays:
            self._replays[key] = Replay(self.model_under(sequence), shape, tp, bytes_of)
        return self._replays[key]

    def _mfu(self, plan: Plan, time_s: float) -> float:
        one = share_shape(plan, 1)
        flops: dict[str, float] = {}  # by the dtype whose rate counts: fp32 convolutions run as tf32
        for block, copies in self.model.runs:
            for op in block.ops:
                dtype = arithmetic_dtype(op_class(op.kind, op.config), self.model.dtype)
                flops[dtype] = flops.get(dtype, 0.0) + copies * op.needed_flops.at(one) * op.seen_share(one)
        devices = [self.cluster.device(rank) for rank in plan.ranks]
        at_peak_s = sum(needed / sum(device.peak_flops_per_s(dtype) for device in devices) for dtype, needed in flops.items())
        return at_peak_s * plan.global_batch / time_s

    def _notes(self, plan: Plan) -> tuple[str, ...]:
        notes = [*plan.notes, *self.source.notes(self.model)]
        lacking = [device.name for device, _ in self.cluster.kinds if not device.supports(plan.precision)]
        if lacking:
            notes.append(f"{plan.precision} is emulated at the rate of fp32 on {' and '.join(lacking)}. Search with another --precision.")
        if any(stage.sequence_parallel and stage.degrees.tp > 1 for stage in plan.stages) and not self.divides_tokens:
            notes.append(f"sequence_parallel is without effect: {self.model.name} has ops that do not work token by token.")
        if plan.micro_batching.policy == "dynamic":
            own = f"; {plan.predicted.time_s:.3g} s were predicted for the lengths that it was made for" if plan.predicted else ""
            notes.append(f"micro-batches are dynamic: estimated with samples of length {plan.seq_length}, as many as fit{own}.")
        return tuple(notes)


def _joined(parts: list[MemoryBreakdown]) -> MemoryBreakdown:
    """Memory of several runs of ops on one device: they run in turn, so that the largest workspace and buffers serve all."""
    if len(parts) == 1:
        return parts[0]
    shared = ("workspace_bytes", "buffers_bytes", "context_bytes")
    sizes = {
        field.name: (max if field.name in shared else sum)(getattr(part, field.name) for part in parts)
        for field in dataclasses.fields(MemoryBreakdown)
    }
    return MemoryBreakdown(**sizes)
