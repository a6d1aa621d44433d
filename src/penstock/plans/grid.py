"""Plans that other systems can express: equal degrees everywhere, ranks in one order, cuts between layers.

`grid_of` finds what such a plan says or refuses it, naming the stage, what is odd about it and what to change. The exporters to
Megatron-LM, torchtitan, DeepSpeed and FASOP share it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.plans.build import BESIDE, block_ranges
from penstock.plans.ranks import stage_ranks
from penstock.plans.texts import format_ops, format_ranks
from penstock.plans.validity import require_valid

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan, Stage

__all__ = ["BlockPart", "Grid", "grid_of", "refusal", "whole_layers"]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A block in a stage: `layers.3`, its ops and those of them that are recomputed."""

    name: str
    kind: str
    ops: tuple[str, ...]
    recomputed: tuple[str, ...] = ()

    @property
    def is_layer(self) -> bool:
        """Whether it is one of the blocks that repeat, not an end of the model."""
        return self.kind not in BESIDE


@dataclass(frozen=True, slots=True)
class Grid:
    """A plan of equal degrees: ranks number tp first, then data parallel, then pipeline."""

    tp: int
    pp: int
    dp: int
    """Ranks that hold the same weights: replicas × the stages' dp."""
    chunks: int
    """Stages on each pipeline rank."""
    micro_batch: int
    """Samples of one rank."""
    num_micro_batches: int
    zero: int
    sequence_parallel: bool
    parts: tuple[tuple[BlockPart, ...], ...]
    """The blocks of each stage."""

    @property
    def num_layers(self) -> tuple[int, ...]:
        """Layers of each stage."""
        return tuple(sum(block.is_layer for block in part) for part in self.parts)


def refusal(target: str, stage: int, what: str, hint: str) -> InputError:
    """The error of a stage that has something the target has no word for."""
    return InputError(f"{target} cannot express stage {stage}: {what}. {hint}")


def grid_of(plan: Plan, target: str, schedules: Collection[str], model: Model, cluster: Cluster, *, mixed: bool = False) -> Grid:
    """What a valid plan of equal degrees says; refused, in the name of `target`, where it is not one. `mixed` allows several kinds."""
    require_valid(plan, model, cluster)
    if plan.micro_batching.layout != "padded":
        raise InputError(f"{target} cannot express packed micro-batches (micro_batching.layout). Plan for padded ones.")
    if plan.micro_batching.policy != "fixed":
        raise InputError(f"{target} cannot express micro-batches that differ from batch to batch. Set micro_batching.policy to 'fixed'.")
    if len(set(plan.micro_batching.per_replica)) > 1:
        raise InputError(f"{target} cannot express replicas with unequal numbers of micro-batches (micro_batching.per_replica). Drop it.")
    if plan.schedule not in schedules:
        raise InputError(f"{target} cannot express the schedule '{plan.schedule}'. It has {', '.join(schedules)}.")
    first, samples = plan.stages[0], plan.micro_batching.samples or 0
    degrees = first.degrees
    for index, stage in enumerate(plan.stages):
        _require_like_first(target, index, stage, first)
        _require_rank_order(target, index, stage, plan)
        if not mixed:
            _require_one_kind(target, index, stage, plan, cluster)
    dp = plan.num_replicas * degrees.dp
    return Grid(
        tp=degrees.tp, pp=plan.num_groups, dp=dp, chunks=plan.num_chunks, micro_batch=samples // degrees.dp,
        num_micro_batches=plan.num_micro_batches or 0, zero=first.zero if dp > 1 else 0,
        sequence_parallel=first.sequence_parallel and degrees.tp > 1,
        parts=tuple(_parts(target, index, stage, model) for index, stage in enumerate(plan.stages)),
    )  # fmt: skip


def _require_like_first(target: str, index: int, stage: Stage, first: Stage) -> None:
    for name, own, usual in (
        ("tp", stage.degrees.tp, first.degrees.tp),
        ("dp", stage.degrees.dp, first.degrees.dp),
        ("zero", stage.zero, first.zero),
        ("sequence_parallel", stage.sequence_parallel, first.sequence_parallel),
    ):
        if own != usual:
            raise refusal(target, index, f"{name} is {own}, in stage 0 it is {usual}", "Give all stages the same.")
    if stage.runs:
        ops = format_ops(*((run.first, run.last) for run in stage.runs))
        raise refusal(target, index, f"ops {ops} have degrees or a split of their own", "Drop the stage's runs.")
    if len(stage.recompute) > 1:
        raise refusal(target, index, f"it has {len(stage.recompute)} recomputation patterns", "Keep one.")


def _require_rank_order(target: str, index: int, stage: Stage, plan: Plan) -> None:
    size = stage.num_devices
    usual = stage_ranks(index % plan.num_groups * size, size, plan.num_replicas)
    for replica, (ranks, expected) in enumerate(zip(stage.devices, usual, strict=True)):
        if ranks != expected:
            what = f"replica {replica} is on ranks {format_ranks(ranks)}, where ranks count tp first, then replicas, then stages"
            raise refusal(target, index, what, f"Number them {format_ranks(expected)}.")


def _require_one_kind(target: str, index: int, stage: Stage, plan: Plan, cluster: Cluster) -> None:
    usual = cluster.device(plan.stages[0].devices[0][0]).name
    kinds = {cluster.device(rank).name for ranks in stage.devices for rank in ranks} - {usual}
    if kinds:
        raise refusal(target, index, f"it uses {min(kinds)} beside the {usual} of stage 0", "Plan for one kind of device.")


def _parts(target: str, index: int, stage: Stage, model: Model) -> tuple[BlockPart, ...]:
    """The blocks of a stage, all of them whole."""
    again, found = stage.recomputed(), []
    seen: dict[str, int] = {}
    for kind, (first, last) in block_ranges(model):
        number = seen[kind] = seen.get(kind, -1) + 1
        if last <= stage.first or first >= stage.last:
            continue
        name = kind if kind in BESIDE else f"{kind}.{number}"
        if first < stage.first:
            what = f"it starts at op {stage.first} '{model.ops[stage.first].name}', inside '{name}'"
            raise refusal(target, index, what, f"Cut between layers, at op {first} or {last}.")
        inside = model.ops[first : min(last, stage.last)]
        ops = tuple(placed.op.name for placed in model.ops[first:last])
        found.append(BlockPart(name, kind, ops, tuple(p.op.name for p in inside if p.index - stage.first in again)))
    return tuple(found)


def whole_layers(grid: Grid, target: str) -> list[list[bool]]:
    """For each stage, which of its layers are recomputed; a layer in part or an end of the model is refused."""
    for index, part in enumerate(grid.parts):
        for block in part:
            if block.recomputed and (not block.is_layer or block.recomputed != block.ops):
                what = f"it recomputes {', '.join(block.recomputed)} of '{block.name}'"
                raise refusal(target, index, what, "Recompute whole layers, or none.")
    return [[bool(block.recomputed) for block in part if block.is_layer] for part in grid.parts]
