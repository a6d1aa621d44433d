"""Megatron-LM: its command-line flags from a plan with the same degrees everywhere and cuts between layers."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.interop.torchrun import LaunchNode, comment, launch_nodes
from penstock.plans.grid import BlockPart, Grid, grid_of, refusal, whole_layers
from penstock.plans.references import cluster_of, model_of
from penstock.schedules.rules import CHUNKED_SCHEDULE, DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["megatron_text", "require_model"]

TARGET = "Megatron-LM"
_SCHEDULES = (DEFAULT_SCHEDULE, CHUNKED_SCHEDULE)

Flags = list[tuple[str, ...]]


def megatron_text(plan: Plan, model: Model | None = None) -> str:
    """The flags, one on each line and quoted for a shell, below remarks on how to use them."""
    model = model or model_of(plan)
    cluster = cluster_of(plan)
    grid, flags = _flags(plan, model, cluster)
    script = f"pretrain_{'gpt' if model.family == 'llama' else model.family}.py"
    world = grid.tp * grid.pp * grid.dp
    remarks = [
        f"{comment(model.name)} on {plural(world, 'GPU')}: tensor {grid.tp} x data {grid.dp} x pipeline {grid.pp}, "
        f"{plural(grid.num_micro_batches, 'micro-batch')}.",
        f"Use: grep -v '^#' THIS_FILE | xargs torchrun {_processes(launch_nodes(plan, cluster))} {script}",
        "Still to be given: data, tokenizer, learning rate, number of iterations.",
        *_NOTES.get(model.family, ()),
    ]
    lines = [*(f"# {remark}" for remark in remarks), *(shlex.join(flag) for flag in flags)]
    return "\n".join(lines) + "\n"


def _processes(nodes: Sequence[LaunchNode]) -> str:
    """What torchrun is told of a plan's nodes."""
    each = " or ".join(map(str, dict.fromkeys(node.num_processes for node in nodes)))
    if len(nodes) == 1:
        return f"--nproc-per-node {each}"
    return f"--nnodes {len(nodes)} --node-rank NODE --master-addr HOST --nproc-per-node {each}"


def require_model(model: Model) -> None:
    """Refuses a model of a family that Megatron-LM lacks, or with a detail that none of its flags can say."""
    c = model.config
    if model.family not in _SIZES or "source" in c:
        raise InputError(f"{TARGET} has no model like '{model.name}' ({model.family}). It has {', '.join(_SIZES)}.")
    if model.family in ("gpt", "bert") and c["activation"] not in ("gelu", "gelu_tanh"):
        raise InputError(f"{TARGET} cannot express the activation '{c['activation']}'. It has gelu for this model.")
    if model.family == "llama" and (c["out_bias"] or c["window"]):
        what = "a bias on the attention output alone" if c["out_bias"] else f"attention over a window of {c['window']} tokens"
        raise InputError(f"{TARGET} cannot express {what}, which model '{model.name}' has.")
    if model.family == "llama":
        _rope_scaling(c["rope_scaling"])
        if c["rope_theta"] % 1:
            raise InputError(f"{TARGET} cannot express rope_theta {c['rope_theta']} of model '{model.name}': its --rotary-base is whole.")
    if model.family == "t5" and c["gated"]:
        raise InputError(f"{TARGET} cannot express the gated MLP of a T5 1.1.")


def _flags(plan: Plan, model: Model, cluster: Cluster) -> tuple[Grid, Flags]:
    require_model(model)
    grid = grid_of(plan, TARGET, _SCHEDULES, model, cluster)
    if grid.zero > 1:
        raise refusal(TARGET, 0, f"zero is {grid.zero}; its distributed optimizer divides optimizer state alone", "Use zero 1.")
    if plan.optimizer == "lamb":
        raise InputError(f"{TARGET} cannot express the optimizer 'lamb' of this plan: it has Adam and SGD.")
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
        *_precision(plan),
        ("--optimizer", "adam" if plan.optimizer == "adamw" else plan.optimizer),
        *_SIZES[model.family](plan, model.config),
    ]
    return grid, flags


def _precision(plan: Plan) -> Flags:
    """Left alone it sums gradients in fp32 with --bf16 and in fp16 with --fp16, so that the plan's dtype is always said."""
    if plan.precision == "fp32":
        return []
    if plan.gradients == "fp32":
        return [(f"--{plan.precision}",), ("--accumulate-allreduce-grads-in-fp32",)]
    return [("--bf16",), ("--grad-reduce-in-bf16",)] if plan.precision == "bf16" else [("--fp16",)]


def _pipeline(grid: Grid) -> Flags:
    """Nothing where Megatron-LM would cut alike, else the layout: E embedding, t layer, L head."""
    if grid.chunks > 1 and grid.num_micro_batches % grid.pp:
        what = f"{plural(grid.num_micro_batches, 'micro-batch')} cannot be shared out evenly over {grid.pp} pipeline ranks"
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
            what = f"it recomputes {sum(layers)} of {plural(len(layers), 'layer')}, another stage {most}"
            raise refusal(TARGET, index, what, f"Recompute the first {plural(most, 'layer')} of every stage, or all of them.")
    return [full, ("--recompute-method", "block"), ("--recompute-num-layers", str(most))]


def _common(c: Mapping[str, Any], layers: str = "--num-layers") -> Flags:
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


def _gpt(plan: Plan, c: Mapping[str, Any]) -> Flags:
    return [*_common(c), *_lengths(plan, c["seq_length"]), ("--position-embedding-type", "learned_absolute")]


def _bert(plan: Plan, c: Mapping[str, Any]) -> Flags:
    return [*_common(c), *_lengths(plan, c["seq_length"]), *([] if c["next_sentence"] else [("--bert-no-binary-head",)])]


def _llama(plan: Plan, c: Mapping[str, Any]) -> Flags:
    switches = (("--add-qkv-bias", c["qkv_bias"]), ("--qk-layernorm", c["qk_norm"]))
    return [
        *_common(c), *_lengths(plan, max(plan.seq_length, c["seq_length"])), ("--normalization", "RMSNorm"), ("--swiglu",),
        ("--disable-bias-linear",), ("--position-embedding-type", "rope"), ("--rotary-base", str(round(c["rope_theta"]))),
        *_rope_scaling(c["rope_scaling"]), ("--group-query-attention",), ("--num-query-groups", str(c["kv_heads"])),
        *([("--kv-channels", str(c["head_width"]))] if c["head_width"] else []), *((flag,) for flag, on in switches if on),
    ]  # fmt: skip


def _rope_scaling(scaling: Mapping[str, Any] | None) -> Flags:
    """Megatron-LM takes the factor alone; the rest of Llama 3's scaling is fixed in it."""
    if not scaling:
        return []
    fixed = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    if "factor" not in scaling or any(scaling.get(name) != value for name, value in fixed.items()):
        raise InputError(f"{TARGET} cannot express the rotary scaling {dict(scaling)}. It has Llama 3's: {fixed} and a factor.")
    return [("--use-rope-scaling",), ("--rope-scaling-factor", str(scaling["factor"]))]


def _t5(plan: Plan, c: Mapping[str, Any]) -> Flags:
    return [
        *_common(c, "--encoder-num-layers"), ("--decoder-num-layers", str(c["dec_layers"] or c["layers"])),
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
