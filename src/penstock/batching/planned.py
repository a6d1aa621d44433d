"""A plan and any source of costs in the form that batches are planned from.

Times depend on token positions t and on the mean length a that a position attends to, in both layouts: padded rows of length L are
t = rows · L and a = L, packed sequences t = Σ Lᵢ and a = Σ Lᵢ² / t. Sources are asked on a grid, where curves are nearly straight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.batching.chunks import grouped
from penstock.batching.costs import QUANTITIES, Floats, LayoutCosts, PipelineCosts
from penstock.costs.memory import SLACK, GradientRoom, activation_timeline, gradient_room, rank_parameters, stage_memory
from penstock.costs.table import CostTable
from penstock.errors import InputError
from penstock.models.shapes import Layout, Shape, feature_matrix
from penstock.plans.degrees import DegreeRun, algos_of, parts_of, recomputed_in
from penstock.timing.estimate import Estimator
from penstock.timing.messages import cut_times_s, slowdown, tp_group_of
from penstock.timing.pass_times import OpSlice, pass_grid_s
from penstock.timing.pipeline import dp_shares
from penstock.timing.recorded import FewShapes, is_recorded

if TYPE_CHECKING:
    from penstock.clusters import Cluster, Device
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan, Stage

__all__ = ["planned_costs", "planned_hops", "with_recompute_choices"]

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
_PROBE_ROWS = (1, 64)
_CLOSE = 1.03
"""By how much fitted memory may be raised."""


def planned_costs(
    plan: Plan, model: Model, cluster: Cluster, source: CostSource, longest: int, longest_dec: int = 0, *,
    layouts: Sequence[Layout] = (), memory_limit_bytes: float = math.inf,
) -> PipelineCosts:  # fmt: skip
    """Costs of micro-batches with samples up to these lengths; `layouts` are those of the plan unless given."""
    if not model.seq_length:
        raise InputError(f"model '{model.name}' takes images, which have no lengths to plan by.")
    wanted = tuple(layouts) or (("packed", "padded") if plan.micro_batching.layout == "packed" else ("padded",))
    chosen: list[Layout] = [layout for layout in wanted if layout in model.layouts]
    if not chosen:
        raise InputError(f"model '{model.name}' takes {', '.join(model.layouts)} batches, not {' or '.join(wanted)}.")
    asked = _StageGrids(plan, model, source.links_of(cluster), source)
    costs = asked.costs(chosen, longest, longest_dec, memory_limit_bytes)
    return grouped(costs, plan.num_groups, asked.group_state_bytes()) if plan.num_chunks > 1 else costs


def planned_hops(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> Floats:
    """What messages take from stage to stage, as `PipelineCosts.hops` has it, or `ChunkCosts.hops` where the plan is interleaved."""
    return _StageGrids(plan, model, source.links_of(cluster), source).hops()


def with_recompute_choices(plan: Plan, model: Model) -> Plan:
    """The plan with three patterns on every stage: nothing, every second repeated block, all of them."""
    repeated = {block.name for block, copies in model.runs if copies > 1}
    stages = []
    for stage in plan.stages:
        places = [place for place in model.ops[stage.first : stage.last] if place.block in repeated]
        patterns = [
            tuple((place.index, place.index + 1) for place in places if part == 1 or place.copy % 2 == 0) for part in (2, 1)
        ]  # fmt: skip
        stages.append(dataclasses.replace(stage, recompute=((), *map(_joined, patterns))))
    return dataclasses.replace(plan, stages=tuple(stages))


def _joined(ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Neighbouring ranges made one."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    return tuple(joined)


def _knots(longest: int, ratio: float) -> Floats:
    """Multiples of 8 in a nearly geometric series up to `longest`."""
    knots = [8]
    while knots[-1] < longest:
        knots.append(max(knots[-1] + 8, 8 * round(knots[-1] * ratio / 8)))
    return np.array(knots, dtype=np.float64)


class _StageGrids:
    """Asks a source of costs about every stage of one plan, at the points of a grid of micro-batches."""

    def __init__(self, plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> None:
        self.plan, self.model, self.cluster, self.source = plan, model, cluster, source
        self._estimator = Estimator(model, cluster, source)
        self._tables: dict[tuple[tuple[Shape, ...], int, bool], CostTable] = {}

    def costs(self, layouts: Sequence[Layout], longest: int, longest_dec: int, limit: float) -> PipelineCosts:
        plan, modes = self.plan, max(len(stage.recompute) or 1 for stage in self.plan.stages)
        classes: list[tuple[object, Stage, int]] = []
        stage_class = np.empty((plan.num_replicas, plan.num_stages), dtype=np.int64)
        for r, s in np.ndindex(stage_class.shape):
            key = self._key(plan.stages[s], r)
            known = [held for held, _, _ in classes]
            if key not in known:
                classes.append((key, plan.stages[s], r))
                known.append(key)
            stage_class[r, s] = known.index(key)
        grids = {layout: self._grid(layout, [(stage, r) for _, stage, r in classes], modes, longest, longest_dec) for layout in layouts}
        state = np.array([[self._state_bytes([stage], r) for stage in plan.stages] for r in range(plan.num_replicas)])
        limits = np.array([[self._limit_bytes(stage, r, limit) for stage in plan.stages] for r in range(plan.num_replicas)])
        estimate = self._estimator.estimate(plan)
        return PipelineCosts(
            self.source.name, grids, stage_class, state, limits, self.hops(), tuple(f"pattern {m}" for m in range(modes)),
            round_to=8, has_decoder=bool(self.model.dec_length), fixed_s=estimate.time_s - estimate.pipeline_s,
            max_length=min((op.config["max_positions"] for op in self.model.distinct_ops if op.config.get("max_positions")), default=2**31),
            max_samples=_cap(plan, plan.micro_batching.samples, 2**31), max_tokens=_cap(plan, plan.micro_batching.max_tokens, 2**40),
            few_shapes=self._few_shapes(),
        )  # fmt: skip

    def _few_shapes(self) -> FewShapes | None:
        """What micro-batches are brought to where passes of all stages are played from recordings, which GPUs have; of samples of many
        lengths there is one stage."""
        plan, stage = self.plan, self.plan.stages[0]
        on_gpus = "cpu" not in {self.cluster.device(rank).name for rank in plan.ranks}
        recorded = all(is_recorded(plan, stage, self.model, ragged=bool(self.model.seq_length)) for stage in plan.stages)
        return FewShapes.of(self.model.ops, plan, stage) if on_gpus and recorded else None

    def _key(self, stage: Stage, replica: int) -> object:
        """What the costs of a stage depend on: its ops, degrees, patterns, and the kinds and links of its devices."""
        ops = [place.op.signature for place in self.model.ops[stage.first : stage.last]]
        patterns = [sorted(stage.recomputed(m)) for m in range(len(stage.recompute) or 1)]
        ranks = stage.devices[replica]
        groups = [tp_group_of(self.cluster, ranks, part.tp) for part in parts_of(stage)]
        runs = [(run.first - stage.first, run.last - stage.first, run.tp, run.dp, run.algo) for run in stage.runs]
        kinds, shares = sorted({device.name for device in self._kinds(ranks)}), dp_shares(self.plan, replica, stage.degrees.dp)
        return ops, patterns, stage.degrees, stage.sequence_parallel, runs, kinds, groups, shares

    def _kinds(self, ranks: Sequence[int]) -> list[Device]:
        return list({device.name: device for device in map(self.cluster.device, ranks)}.values())

    def _grid(self, layout: Layout, stages: Sequence[tuple[Stage, int]], modes: int, longest: int, longest_dec: int) -> LayoutCosts:
        if layout == "padded":
            x, y = np.array(_ROWS, dtype=np.float64), _knots(longest, 1.2)
            z = _knots(longest_dec, 1.35) if self.model.dec_length else np.zeros(1)
        else:
            x, y, z = _knots(2**21, 1.25), _knots(longest, 1.6), np.zeros(1)
        values = np.full((len(x), len(y), len(z), len(stages), modes, len(QUANTITIES)), np.inf)
        points = [tuple(map(float, point)) for point in np.stack(np.meshgrid(x, y, z, indexing="ij"), axis=-1).reshape(-1, 3)]
        for c, (stage, replica) in enumerate(stages):
            for m in range(len(stage.recompute) or 1):
                found = self._stage(stage, replica, m, layout, points)
                values[..., c, m, :] = found.reshape(*values.shape[:3], len(QUANTITIES))
        return LayoutCosts((x, y, z), np.moveaxis(values, 0, 2).copy())

    def _stage(self, stage: Stage, replica: int, mode: int, layout: Layout, points: Sequence[tuple[float, ...]]) -> Floats:
        """[points, quantities] of a stage under one pattern, on the slowest and fullest of its device kinds."""
        ranks = stage.devices[replica]
        worst = np.zeros((len(points), len(QUANTITIES)))
        for device in self._kinds(ranks):
            total = np.zeros_like(worst)
            for part in parts_of(stage):
                own, algos = recomputed_in(stage, part, mode), algos_of(stage, part)
                shapes = [_share(layout, self._parts(stage, part, replica, device), *point) for point in points]
                sequence = self._estimator.by_rows(stage, part.tp)
                model = self._estimator.model_under(sequence)
                recorded = is_recorded(self.plan, stage, model, ragged=bool(model.seq_length))
                ops = OpSlice(model, part.first, part.last, device.name, part.tp, algos, own, recorded)
                total[:, :2] += self._times(ops, shapes, device, ranks, sequence)
                room = self._gradient_room(part, stage.zero)
                held, up, down = self._bytes(part, shapes, algos, own, device, sequence, room).T * (1 + SLACK)
                total[:, 3] = np.maximum(total[:, 3], total[:, 2] + up)
                total[:, 5] = np.maximum(total[:, 5], total[:, 2] + down)
                total[:, 2] += held
            worst = np.maximum(worst, total)
        return worst

    def _parts(self, stage: Stage, part: DegreeRun, replica: int, device: Device) -> float:
        """Into how many parts, as large as the largest of a device of this kind, ranks divide the samples."""
        shares = dp_shares(self.plan, replica, part.dp)
        ranks = enumerate(stage.devices[replica])
        own = [shares[at // part.tp] for at, rank in ranks if self.cluster.device(rank) == device] if shares else []
        return sum(shares) / max(own) if own else part.dp

    def _times(self, ops: OpSlice, shapes: list[Shape], device: Device, ranks: Sequence[int], sequence: bool) -> Floats:
        """[shapes, 2] forward and backward times, collectives and waiting for the host included."""
        distinct, table = self._table(shapes, ops.tp, sequence)
        slower = slowdown(self.cluster, device, ops, distinct[-1], tp_group_of(self.cluster, ranks, ops.tp))
        times = pass_grid_s(table, ops, slower)
        where = {shape: at for at, shape in enumerate(distinct)}
        return np.asarray(times[[where[shape] for shape in shapes]])

    def _table(self, shapes: list[Shape], tp: int, sequence: bool) -> tuple[list[Shape], CostTable]:
        """The distinct shapes and their costs, asked once."""
        distinct = tuple(dict.fromkeys(shapes))
        if (distinct, tp, sequence) not in self._tables:
            model, cluster = self._estimator.model_under(sequence), dataclasses.replace(self.cluster, at_work=len(self.plan.ranks))
            self._tables[distinct, tp, sequence] = self.source.table(model, list(distinct), [tp], cluster)
        return list(distinct), self._tables[distinct, tp, sequence]

    def _bytes(
        self, part: DegreeRun, shapes: list[Shape], algos: tuple[int, ...], again: frozenset[int], device: Device, sequence: bool,
        room: GradientRoom,
    ) -> Floats:  # fmt: skip
        """[shapes, 3] held between passes and the peaks of both, messages included, and in the backward one what gradients take.

        Replaying every shape op by op would take seconds. What is held is a line in the features of a shape, and peaks nearly are:
        they are fitted to a few replays and raised until none of these is above them. Where that is not close, lines between the
        replays serve instead; peaks bend upwards only, so that they are safe as well.
        """
        rows, length, dec_length = (np.array(column) for column in zip(*map(_as_rows, shapes), strict=True))
        y = _knots(int(length.max()), 4.0)
        z = _knots(int(dec_length.max()), 4.0) if dec_length.any() else np.zeros(1)
        layout = shapes[0].layout
        grid = [[[dataclasses.replace(Shape.padded(count, int(n), int(m)), layout=layout) for count in _PROBE_ROWS] for m in z] for n in y]
        probes = [shape for plane in grid for line in plane for shape in line]
        model = self._estimator.model_under(sequence)
        values = np.array([self._replay(model, part, shape, algos, again, device) for shape in probes])
        between = LayoutCosts((np.array(_PROBE_ROWS, dtype=np.float64), y, z), values.reshape(len(y), len(z), len(_PROBE_ROWS), 1, 1, 4))
        found = between.at(rows, length, dec_length)[:, 0, 0]
        features, wanted = feature_matrix(probes), feature_matrix(shapes)
        for q in range(4):
            if not values[:, q].all():  # a stage of an embedding alone keeps nothing, and a stage alone sends nothing
                continue
            line, *_ = np.linalg.lstsq(features / values[:, q, None], np.ones(len(probes)), rcond=None)
            raised = float((values[:, q] / (features @ line)).max())
            if 1.0 - 1e-9 <= raised <= _CLOSE:
                found[:, q] = raised * (wanted @ line)
        held, forward, backward, messages = found.T
        # The optimizer's step comes after the last backward pass; as if it were part of each, it finds its room whatever the batch is.
        backward = np.maximum(backward + room.cast_bytes, max(room.late_cast_bytes, room.step_bytes))
        return np.stack([held, forward + messages, backward + messages], axis=1)

    def _gradient_room(self, part: DegreeRun, zero: int) -> GradientRoom:
        plan, counts = self.plan, rank_parameters(self.model.ops[part.first : part.last], part.tp)
        return gradient_room(counts, plan.precision, plan.optimizer, zero, part.dp * plan.num_replicas, plan.gradients)

    def _replay(self, model: Model, part: DegreeRun, shape: Shape, algos: tuple[int, ...], again: frozenset[int], device: Device) -> Floats:
        """What one micro-batch holds between its passes, the peaks of both, and its messages."""
        bytes_of, _ = self.source.memory_of(device.name, self.model.dtype)
        timeline = activation_timeline(model, part.first, part.last, shape, part.tp, algos, again, bytes_of)
        cuts = [cut for cut in (part.first, part.last) if 0 < cut < model.num_ops]
        messages = sum(2 * model.boundary_bytes(cut).at(shape, part.tp) for cut in cuts)
        return np.array([timeline.held_bytes, timeline.forward_peak_bytes, timeline.backward_peak_bytes, messages])

    def group_state_bytes(self) -> Floats:
        """[R, groups] of all chunks of a device group together."""
        plan = self.plan
        chunks = [plan.stages[group :: plan.num_groups] for group in range(plan.num_groups)]
        return np.array([[self._state_bytes(own, r) for own in chunks] for r in range(plan.num_replicas)])

    def _state_bytes(self, stages: Sequence[Stage], replica: int) -> float:
        """Weights, optimizer state and all else that is there before any micro-batch, of stages on one device group."""
        totals = []
        for device in self._kinds(stages[0].devices[replica]):
            total = context = 0.0
            for zero, part in ((stage.zero, part) for stage in stages for part in parts_of(stage)):
                memory = stage_memory(
                    self.model, part.first, part.last, Shape(1), tp=part.tp, dp=part.dp * self.plan.num_replicas, zero=zero,
                    precision=self.plan.precision, gradients=self.plan.gradients, optimizer=self.plan.optimizer, device=device.name,
                )  # fmt: skip
                total += memory.state_bytes + memory.buffers_bytes
                context = memory.context_bytes
            base = self.source.memory_of(device.name, self.model.dtype).base_bytes
            totals.append((total + base) * (1 + SLACK) + context)
        return max(totals)

    def _limit_bytes(self, stage: Stage, replica: int, limit: float) -> float:
        return min(limit, *(float(device.memory_bytes) for device in self._kinds(stage.devices[replica])))

    def hops(self) -> Floats:
        """[R, 2, S - 1, 3]: lines through the times of a small and a large micro-batch."""
        plan, samples = self.plan, math.lcm(*(stage.degrees.dp for stage in self.plan.stages))
        hops = np.zeros((plan.num_replicas, 2, plan.num_stages - 1, 3))
        decoder = bool(self.model.dec_length)

        def times(cut: int, length: int, dec_length: int) -> Floats:
            asked = dataclasses.replace(plan, seq_length=length, dec_length=dec_length if decoder else 0)
            return np.array(cut_times_s(self._estimator.described, self.cluster, asked, samples, cut))

        for cut in range(plan.num_stages - 1):
            small, long, long_dec = times(cut, 128, 128), times(cut, 1152, 128), times(cut, 128, 1152)
            per_token, per_dec = (long - small) / (1024 * samples), (long_dec - small) / (1024 * samples)
            latency = np.maximum(small - 128 * samples * (per_token + (per_dec if decoder else 0.0)), 0.0)
            hops[:, :, cut, 0], hops[:, :, cut, 1] = latency, per_token
            hops[:, :, cut, 2] = per_dec if decoder else 0.0
        return hops


def _cap(plan: Plan, size: int | None, most: int) -> int:
    """What a dynamic micro-batch may have at most; the size of fixed ones says nothing about others."""
    return size if size and plan.micro_batching.policy == "dynamic" else most


def _as_rows(shape: Shape) -> tuple[float, float, float]:
    """(rows, length, decoder length) of rows of one length that have the same tokens and squares."""
    length, dec_length = shape.squares / max(shape.tokens, 1), shape.dec_squares / max(shape.dec_tokens, 1)
    return shape.tokens / max(length, 1), length, dec_length


def _share(layout: Layout, parts: float, x: float, y: float, z: float) -> Shape:
    """What a rank gets of the micro-batch at a point of the grid that is divided into so many parts."""
    if layout == "padded":
        return Shape.padded(math.ceil(x / parts - 1e-9), int(y), int(z))
    tokens, length = max(1, round(x / parts)), max(1, round(y))
    return Shape(max(1, round(tokens / length)), tokens, tokens * length, layout="packed")
