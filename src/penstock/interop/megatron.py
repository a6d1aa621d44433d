"""Megatron-LM: its command-line flags from a plan with the same degrees everywhere and cuts between layers.

`grid_of` finds what such a plan says, or refuses it; the exporters to systems built alike (torchtitan, DeepSpeed, FASOP) share it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError
from penstock.plans.build import block_ranges
from penstock.plans.ranks import stage_ranks
from penstock.plans.references import cluster_of, model_of
from penstock.plans.texts import format_ops, format_ranks
from penstock.plans.validity import require_valid

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan, Stage

__all__ = ["BlockPart", "Grid", "grid_of", "megatron_flags", "megatron_text", "refusal", "whole_layers"]

TARGET = "Megatron-LM"
_OUTER = ("embedding", "stem", "bridge", "head")


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
        return self.kind not in _OUTER


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
        name = kind if kind in _OUTER else f"{kind}.{number}"
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


Flags = list[tuple[str, ...]]


def megatron_flags(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> list[str]:
    """The flags as a list of words, as for `subprocess`."""
    return [word for flag in _flags(plan, model or model_of(plan), cluster or cluster_of(plan))[1] for word in flag]


def megatron_text(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> str:
    """The flags, one on each line and quoted for a shell, below remarks on how to use them."""
    model = model or model_of(plan)
    grid, flags = _flags(plan, model, cluster or cluster_of(plan))
    script = f"pretrain_{'gpt' if model.family == 'llama' else model.family}.py"
    world = grid.tp * grid.pp * grid.dp
    remarks = [
        f"{model.name} on {world} GPUs: tensor {grid.tp} x data {grid.dp} x pipeline {grid.pp}, {grid.num_micro_batches} micro-batches.",
        f"Use: grep -v '^#' THIS_FILE | xargs torchrun --nproc-per-node {world} {script}  (several nodes: as torchrun wants it)",
        "Still to be given: data, tokenizer, learning rate, number of iterations.",
        *_NOTES.get(model.family, ()),
    ]
    lines = [*(f"# {remark}" for remark in remarks), *(shlex.join(flag) for flag in flags)]
    return "\n".join(lines) + "\n"


def _flags(plan: Plan, model: Model, cluster: Cluster) -> tuple[Grid, Flags]:
    if model.family not in _SIZES or "source" in model.config:
        raise InputError(f"{TARGET} has no model like '{model.name}' ({model.family}). It has {', '.join(_SIZES)}.")
    grid = grid_of(plan, TARGET, ("1f1b", "interleaved"), model, cluster)
    if grid.zero > 1:
        raise refusal(TARGET, 0, f"zero is {grid.zero}; its distributed optimizer divides optimizer state alone", "Use zero 1.")
    if model.family == "t5" and grid.pp > 1:
        raise refusal(TARGET, 1, "its T5 has no pipeline", "Plan for one stage.")
    flags: Flags = [
        ("--tensor-model-parallel-size", str(grid.tp)),
        ("--pipeline-model-parallel-size", str(grid.pp)),
        *_pipeline(grid),
        ("--micro-batch-size", str(grid.micro_batch)),
        ("--global-batch-size", str(plan.global_batch)),
        *([("--sequence-parallel",)] if grid.sequence_parallel else []),
        *([("--use-distributed-optimizer",)] if grid.zero else []),
        *_recompute(grid),
        *([(f"--{plan.precision}",)] if plan.precision != "fp32" else []),
        ("--optimizer", "adam" if plan.optimizer == "adamw" else plan.optimizer),
        *_SIZES[model.family](plan, model.config),
    ]
    return grid, flags


def _pipeline(grid: Grid) -> Flags:
    """Nothing where Megatron-LM would cut alike, else the layout: E embedding, t layer, L head."""
    if grid.chunks > 1 and grid.num_micro_batches % grid.pp:
        what = f"{grid.num_micro_batches} micro-batches are no multiple of {grid.pp} pipeline ranks"
        raise refusal(TARGET, 0, f"{what}, as its interleaved schedule wants", "Change the micro-batch or the global batch.")
    if len(set(grid.num_layers)) == 1:
        return [("--num-layers-per-virtual-pipeline-stage", str(grid.num_layers[0]))] if grid.chunks > 1 else []
    return [("--pipeline-model-parallel-layout", "|".join(map(_letters, grid.parts)))]


def _letters(part: Sequence[BlockPart]) -> str:
    layers = sum(block.is_layer for block in part)
    kinds = {block.kind for block in part}
    middle = "t" * layers if layers < 2 else f"t*{layers}"
    return f"{'E' if 'embedding' in kinds else ''}{middle}{'L' if 'head' in kinds else ''}"


def _recompute(grid: Grid) -> Flags:
    """Every layer, the first n of each stage, or the core of attention everywhere; anything else is refused."""
    blocks = [block for part in grid.parts for block in part]
    if all(block.recomputed == tuple(op for op in block.ops if op.endswith("attention")) for block in blocks):
        return [("--recompute-granularity", "selective"), ("--recompute-modules", "core_attn")]
    stages = whole_layers(grid, TARGET)
    most = max((sum(layers) for layers in stages), default=0)
    if not most:
        return []
    full = ("--recompute-granularity", "full")
    if all(all(layers) for layers in stages):
        return [full, ("--recompute-method", "uniform"), ("--recompute-num-layers", "1")]
    for index, layers in enumerate(stages):
        if layers != [place < most for place in range(len(layers))]:
            what = f"it recomputes {sum(layers)} of its {len(layers)} layers, another stage {most}"
            raise refusal(TARGET, index, what, f"Recompute the first {most} layers of every stage, or all of them.")
    return [full, ("--recompute-method", "block"), ("--recompute-num-layers", str(most))]


def _common(plan: Plan, c: Mapping[str, Any], layers: str = "--num-layers") -> Flags:
    ffn = c["ffn"] or 4 * c["hidden"]
    return [
        (layers, str(c["layers"])), ("--hidden-size", str(c["hidden"])), ("--ffn-hidden-size", str(ffn)),
        ("--num-attention-heads", str(c["heads"])), ("--norm-epsilon", str(c["eps"])), ("--vocab-size", str(c["vocab"])),
        ("--make-vocab-size-divisible-by", "1"), ("--hidden-dropout", str(c["dropout"])),
        ("--attention-dropout", str(c.get("attention_dropout", 0.0))),
        *([] if c.get("tied", True) else [("--untie-embeddings-and-output-weights",)]),
        *([] if c.get("fused_attention", True) else [("--attention-backend", "unfused")]),
    ]  # fmt: skip


def _lengths(plan: Plan, most: int) -> Flags:
    return [("--seq-length", str(plan.seq_length)), ("--max-position-embeddings", str(most))]


def _gelu_only(c: Mapping[str, Any]) -> None:
    if c["activation"] not in ("gelu", "gelu_tanh"):
        raise InputError(f"{TARGET} cannot express the activation '{c['activation']}'. It has gelu for this model.")


def _gpt(plan: Plan, c: Mapping[str, Any]) -> Flags:
    _gelu_only(c)
    return [*_common(plan, c), *_lengths(plan, c["seq_length"]), ("--position-embedding-type", "learned_absolute")]


def _bert(plan: Plan, c: Mapping[str, Any]) -> Flags:
    _gelu_only(c)
    return [*_common(plan, c), *_lengths(plan, c["seq_length"]), *([] if c["next_sentence"] else [("--bert-no-binary-head",)])]


def _llama(plan: Plan, c: Mapping[str, Any]) -> Flags:
    if c["out_bias"] or c["window"]:
        what = "a bias on the attention output alone" if c["out_bias"] else f"attention over a window of {c['window']} tokens"
        raise InputError(f"{TARGET} cannot express {what}, which model '{plan.model}' has.")
    switches = (("--add-qkv-bias", c["qkv_bias"]), ("--qk-layernorm", c["qk_norm"]))
    return [
        *_common(plan, c), *_lengths(plan, max(plan.seq_length, c["seq_length"])), ("--normalization", "RMSNorm"), ("--swiglu",),
        ("--disable-bias-linear",), ("--position-embedding-type", "rope"), ("--rotary-base", str(round(c["rope_theta"]))),
        *_rope_scaling(c["rope_scaling"]), ("--group-query-attention",), ("--num-query-groups", str(c["kv_heads"])),
        *([("--kv-channels", str(c["head_width"]))] if c["head_width"] else []), *((flag,) for flag, on in switches if on),
    ]  # fmt: skip


def _rope_scaling(scaling: Mapping[str, Any] | None) -> Flags:
    """Megatron-LM takes the factor alone; the rest of Llama 3's scaling is fixed in it."""
    if not scaling:
        return []
    fixed = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if any(scaling.get(name) != value for name, value in fixed.items()):
        raise InputError(f"{TARGET} cannot express the rotary scaling {dict(scaling)}. It has Llama 3's: {fixed} and a factor.")
    return [("--use-rope-scaling",), ("--rope-scaling-factor", str(scaling["factor"]))]


def _t5(plan: Plan, c: Mapping[str, Any]) -> Flags:
    if c["gated"]:
        raise InputError(f"{TARGET} cannot express the gated MLP of a T5 1.1.")
    return [
        *_common(plan, c, "--encoder-num-layers"), ("--decoder-num-layers", str(c["dec_layers"] or c["layers"])),
        ("--kv-channels", str(c["head_width"])), ("--encoder-seq-length", str(plan.seq_length)),
        ("--decoder-seq-length", str(plan.dec_length)), ("--max-position-embeddings", str(max(plan.seq_length, plan.dec_length))),
        ("--position-embedding-type", "relative"), ("--relative-attention-num-buckets", str(c["buckets"])),
        ("--relative-attention-max-distance", str(c["max_distance"])), ("--normalization", "RMSNorm"), ("--disable-bias-linear",),
    ]  # fmt: skip


_SIZES: dict[str, Callable[[Plan, Mapping[str, Any]], Flags]] = {"gpt": _gpt, "llama": _llama, "bert": _bert, "t5": _t5}
_NOTES = {
    "bert": ("Note: Megatron-LM's BERT normalises before each half of a layer, the planned one after it.",),
    "t5": ("Note: Megatron-LM's T5 uses gelu in its MLP.",),
}
