"""Plans with stages of any size: exact cuts between any two ops, degrees of each stage, and recomputation by time per byte.

For every number of replicas and micro-batch size the partition programme finds the best pipeline; what it leaves out (gradient
sync, optimizer step) and memory to the byte come from the estimate, by which the plans found are compared. Equal devices in equal
nodes only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.memory import CUDA_CONTEXT_BYTES, SLACK, bytes_per_parameter
from penstock.costs.pipeline import share_shape
from penstock.plans.build import BESIDE
from penstock.plans.plan import Degrees, OpRange, Plan, Stage
from penstock.plans.validity import check_plan
from penstock.search.grid import Request, micro_batch_sizes
from penstock.search.partition import best_partition
from penstock.search.recompute import recompute_flags
from penstock.search.stages import Blocks, Machine, OptionCosts, Pool, StageChoice, StageOption, StageSpace, build_space

if TYPE_CHECKING:
    from penstock.costs.estimate import Estimate
    from penstock.models.ops import Model

__all__ = ["exact_plans"]

MAX_PIPELINE = 64
"""Devices of one replica up to which its pipeline is solved exactly."""
MAX_STAGES = 16


def exact_plans(request: Request, known_s: float) -> Iterator[tuple[Plan, Estimate]]:
    """Plans that fit and are each faster than those before and than `known_s`, with their estimates."""
    cluster, frame = request.cluster, request.frame
    sizes = micro_batch_sizes(frame.global_batch, 1, request.micro_batches)
    per_node = next(iter(cluster.runs)).node.num_devices
    if len(cluster.kinds) > 1 or any(run.node.num_devices != per_node for run in cluster.runs):
        return
    device, _ = cluster.kinds[0]
    limit = min(request.memory_limit_bytes, device.memory_bytes)
    for replicas in [n for n in range(1, cluster.num_devices + 1) if cluster.num_devices % n == 0]:
        devices = cluster.num_devices // replicas
        if devices > MAX_PIPELINE or frame.global_batch % replicas or (devices % per_node and per_node % devices):
            continue
        for samples in [b for b in sizes if frame.global_batch // replicas % b == 0]:
            solver = _Solver(request, replicas, samples, min(per_node, devices))
            found = solver.best(limit, known_s)
            if found is not None and found[1].time_s < known_s:
                known_s = found[1].time_s
                yield found


class _Solver:
    """The search for one number of replicas and one micro-batch size."""

    def __init__(self, request: Request, replicas: int, samples: int, per_node: int) -> None:
        self.model, self.cluster, self.frame, self.estimator = request.model, request.cluster, request.frame, request.estimator
        self.replicas, self.samples, self.per_node = replicas, samples, per_node
        self.devices = self.cluster.num_devices // replicas
        self.count = self.frame.global_batch // replicas // samples
        self.blocks = _blocks(self.model)

    def best(self, limit: float, known_s: float) -> tuple[Plan, Estimate] | None:
        """The best plan that fits; where the programme's memory was too hopeful it is asked again with less."""
        degrees = [(tp, dp) for tp in self._degrees() if tp <= self.model.max_tp() for dp in self._degrees(tp)]
        costs = [c for tp, dp in degrees if (c := self._costs(tp, dp)) is not None]
        if not costs:
            return None
        fastest = np.min(np.stack([c.compute * c.option.num_devices for c in costs]), axis=0).sum() / self.devices
        if fastest * self.count >= known_s:
            return None
        context = 0.0 if self.cluster.kinds[0][0].name.startswith("cpu") else CUDA_CONTEXT_BYTES
        room, longest = (limit - context) / (1 + SLACK), known_s / self.count
        for share in (1.0, 0.97, 0.93, 0.88):
            machine = Machine((Pool(self.devices, self.per_node, share * room),), 1.0, 0.0)
            space = build_space(costs, self.blocks, machine, max_stages=min(self.devices, MAX_STAGES), longest=longest)
            found = best_partition(space, self.count, known_s)
            if not found.stages:
                return None
            plan = self._plan(space, found.stages)
            if check_plan(plan, self.model, self.cluster):
                return None
            estimate = self.estimator.estimate(plan)
            if estimate.fits:
                return plan, estimate
        return None

    def _degrees(self, taken: int = 1) -> list[int]:
        """Powers of two up to what a node has left."""
        most = self.per_node // taken
        return [2**k for k in range(most.bit_length()) if 2**k <= most]

    def _costs(self, tp: int, dp: int) -> OptionCosts | None:
        """Costs of the chain's ops under one option, from the estimator's own table."""
        if self.samples % dp:
            return None
        shape = share_shape(self.frame, self.samples, dp)
        table = self.estimator.table(shape, tp)
        s, ops = table.shape_index(shape), table.chain
        forward = (table.forward_s + table.forward_comm_s)[ops, s, 0, 0, 0]
        compute = forward + (table.backward_s + table.backward_comm_s)[ops, s, 0, 0, 0]
        if not np.isfinite(compute).all():
            return None
        weight, gradient, master, moments = bytes_per_parameter(self.frame.precision, self.frame.optimizer)
        state = weight + gradient + (master + moments) / (dp * self.replicas)
        entering, leaving = table.input_bytes[ops, s, 0, 0], table.output_bytes[ops, s, 0, 0]
        enter, leave = np.zeros((2, len(ops) + 1)), np.zeros((2, len(ops) + 1))
        for across, rank in enumerate((1, self.per_node)):
            if rank < self.cluster.num_devices:
                enter[across, 1:-1] = [self.estimator.source.transfer_s(size, self.cluster, 0, rank) for size in entering[1:]]
                leave[across, 1:-1] = [self.estimator.source.transfer_s(size, self.cluster, 0, rank) for size in leaving[:-1]]
        columns = (table.kept_bytes, table.workspace_bytes, table.backward_workspace_bytes)
        kept, workspace, backward_workspace = (np.ascontiguousarray(x[ops, s, 0, 0]) for x in columns)
        parameters = np.ascontiguousarray(table.parameters[ops, 0, 0]) * state
        option = StageOption(tp * dp, tp, dp)
        return OptionCosts(option, forward, compute, kept, parameters, workspace, backward_workspace, entering.copy(), enter, leave)

    def _plan(self, space: StageSpace, chosen: Sequence[StageChoice]) -> Plan:
        stages, rank = [], 0
        for stage in chosen:
            option = space.costs[stage.option].option
            starts = [replica * self.devices + rank for replica in range(self.replicas)]
            pattern = _ranges([int(op) + stage.first for op in np.flatnonzero(recompute_flags(space, stage))])
            stages.append(Stage(
                stage.first, stage.last,
                devices=tuple(tuple(range(start, start + option.num_devices)) for start in starts), degrees=Degrees(option.tp, option.dp),
                recompute=(pattern,) if pattern else (), zero=1 if option.dp * self.replicas > 1 else 0,
            ))  # fmt: skip
            rank += option.num_devices
        batching = replace(self.frame.micro_batching, samples=self.samples)
        return replace(self.frame, stages=tuple(stages), num_replicas=self.replicas, micro_batching=batching)


def _ranges(ops: Sequence[int]) -> tuple[OpRange, ...]:
    """Runs of neighbouring ops."""
    joined: list[OpRange] = []
    for op in ops:
        if joined and joined[-1][1] == op:
            joined[-1] = (joined[-1][0], op + 1)
        else:
            joined.append((op, op + 1))
    return tuple(joined)


def _blocks(model: Model) -> Blocks:
    """The model's blocks; those beside the layers are never recomputed."""
    found = Blocks.of(model, [True] * model.num_ops)
    beside = np.array([model.ops[int(start)].block in BESIDE for start in found.start[:-1]])
    kind = np.where(beside, -1, found.kind)
    used = {int(old): new for new, old in enumerate(sorted(set(kind.tolist()) - {-1}))}
    return replace(found, kind=np.array([used.get(int(old), -1) for old in kind]))
