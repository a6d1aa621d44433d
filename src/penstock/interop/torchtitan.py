"""torchtitan: a Python function that configures its runs, derived from one that it ships. The names are those of torchtitan 0.3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.interop.torchrun import comment
from penstock.plans.grid import BlockPart, Grid, grid_of, refusal, whole_layers
from penstock.plans.references import cluster_of, model_of

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["module_fqns", "require_flavor", "require_precision", "torchtitan_recipe"]

TARGET = "torchtitan"
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}
_FLAVORS = {
    "1B": (16, 2048, 32, 8, 8192, True),
    "3B": (28, 3072, 24, 8, 8192, True),
    "8B": (32, 4096, 32, 8, 14336, False),
    "70B": (80, 8192, 64, 8, 28672, False),
    "405B": (126, 16384, 128, 8, 53248, False),
}
"""Its Llama 3 models: layers, hidden, heads, kv_heads, ffn, tied."""
_FIXED = {"vocab": 128256, "eps": 1e-5, "qkv_bias": False, "out_bias": False, "qk_norm": False, "window": 0, "dropout": 0.0}
"""What all of them have beside their sizes, and no recipe changes."""
_THETA = 500000.0
_SCALING = {
    "factor": ("scaling_factor", 8.0),
    "low_freq_factor": ("low_freq_factor", 1.0),
    "high_freq_factor": ("high_freq_factor", 4.0),
    "original_max_position_embeddings": ("original_max_position_embeddings", 8192),
}
"""Of Llama 3's rotary scaling as Hugging Face has it: torchtitan's name, and what all of its models have."""
_RESHARDS = {1: "never", 2: "never", 3: "always"}
"""ZeRO stage: whether FSDP gives gathered weights up again after a forward pass."""

_NARROW = """
torchtitan keeps and sums gradients in fp32, where the plan has bf16: each rank needs two bytes more for every weight that it holds.
"""

_OFTENER = """
torchtitan's FSDP sums gradients with every micro-batch, where the plan (ZeRO-1) does once a step: it communicates more.
"""

_RECIPE = '''\
"""{model} on {gpus}, {stages}. Written by Penstock for torchtitan 0.3.

PYTHONPATH=<folder of this file> NGPU={world} MODULE=<name of this file, without .py> CONFIG=penstock_plan ./run_train.sh
{note}"""

{imports}
{parts}

def penstock_plan():
    """The plan; data, learning rate and number of steps are those of the recipe it starts from."""
    config = {base}()
{body}{rope}
    return config
'''


def module_fqns(part: Sequence[BlockPart]) -> list[str]:
    """What torchtitan calls the modules of a stage."""
    names = {"embedding": ["tok_embeddings"], "head": ["norm", "lm_head"]}
    return [fqn for block in part for fqn in names.get(block.kind, [block.name])]


def torchtitan_recipe(plan: Plan, model: Model | None = None) -> str:
    """The text of a recipe."""
    model, cluster = model or model_of(plan), cluster_of(plan)
    flavor = require_flavor(model)
    grid = grid_of(plan, TARGET, tuple(_SCHEDULES), model, cluster)
    _require_expressible(plan, grid, tied=_FLAVORS[flavor][-1])
    again = [layer for stage in whole_layers(grid, TARGET) for layer in stage]
    if any(again) and not all(again):
        index = next(index for index, stage in enumerate(whole_layers(grid, TARGET)) if not all(stage))
        raise refusal(TARGET, index, "some layers are recomputed and some are not", "Recompute all layers, or none.")
    base = "llama3_70b" if flavor == "70B" else "llama3_8b"
    imports = [f"from torchtitan.models.llama3.config_registry import {base}"]
    if any(again):
        imports.insert(0, "from torchtitan.distributed.activation_checkpoint import FullAC")
    settings = [*_parallelism(plan, grid), *_training(plan, grid)]
    settings.append(("activation_checkpoint", "FullAC.Config()" if any(again) else "None"))
    if flavor not in ("8B", "70B"):
        imports.insert(-1, "from torchtitan.models.llama3 import model_registry")
        settings.insert(0, ("model_spec", f'model_registry("{flavor}")'))
    narrow, oftener = plan.precision == "bf16" and plan.gradients != "fp32", grid.zero == 1 and grid.num_micro_batches > 1
    world = grid.tp * grid.pp * grid.dp
    return _RECIPE.format(
        model=_documented(model.name), world=world, imports="\n".join(imports), base=base, gpus=plural(world, "GPU"),
        stages=plural(len(grid.parts), "stage"),
        parts=_parts(grid) if grid.pp > 1 else "", note=narrow * _NARROW + oftener * _OFTENER,
        body="\n".join(f"    config.{name} = {value}" for name, value in settings), rope=_rope(model.config),
    )  # fmt: skip


def _parts(grid: Grid) -> str:
    rows = (f"    [{', '.join(map(_quoted, module_fqns(part)))}]," for part in grid.parts)
    return "\n".join(["", "MODULE_FQNS_PER_MODEL_PART = [", *rows, "]", ""])


def _documented(name: str) -> str:
    """A name, which may be anybody's, as text that cannot end the docstring it stands in."""
    return comment(name).replace("\\", "\\\\").replace('"', '\\"')


def _quoted(text: str) -> str:
    return f'"{text}"'


def _rope(c: Mapping[str, Any]) -> str:
    """Lines that turn positions as the model does, where torchtitan's own turn otherwise: those are Llama 3.1's, of every size."""
    scaling = c["rope_scaling"]
    found = {"theta": c["rope_theta"]} if c["rope_theta"] != _THETA else {}
    if scaling:
        found |= {name: scaling[field] for field, (name, usual) in _SCALING.items() if scaling[field] != usual}
    else:
        found["scaling"] = _quoted("none")
    lines = [f"        layer.attention.rope.{name} = {value}" for name, value in found.items()]
    return "\n".join(["", "    for layer in config.model_spec.model.layers:", *lines]) if lines else ""


def require_flavor(model: Model) -> str:
    """The name of the Llama 3 that is this model, but for the rotary embedding, which a recipe can change."""
    c = model.config
    if model.family != "llama" or "source" in c:
        raise InputError(f"{TARGET} has no model like '{model.name}' ({model.family}). Of Penstock's families it has llama.")
    own = (c["layers"], c["hidden"], c["heads"], c["kv_heads"], c["ffn"], c["tied"])
    alike = [name for name, sizes in _FLAVORS.items() if sizes == own]
    if not alike:
        raise InputError(f"{TARGET} has no Llama of the sizes of '{model.name}'. It has {', '.join(_FLAVORS)}.")
    usual = {**_FIXED, "head_width": c["hidden"] // c["heads"]}
    for field, value in usual.items():
        if (c[field] or value) != value:
            raise InputError(f"{TARGET} cannot express {field} {c[field]} of model '{model.name}': its Llama {alike[0]} has {value}.")
    scaling = c["rope_scaling"]
    if scaling and (scaling.get("rope_type") != "llama3" or not _SCALING.keys() <= scaling.keys()):
        raise InputError(f"{TARGET} cannot express rope_scaling {dict(scaling)} of model '{model.name}'. It has none, or Llama 3's.")
    return alike[0]


def require_precision(precision: str) -> None:
    """Refuses a precision that torchtitan's recipes lack."""
    if precision == "fp16":
        raise InputError(f"{TARGET} cannot express precision fp16. It has bf16 and fp32. Search with --precision bf16.")


def _require_expressible(plan: Plan, grid: Grid, tied: bool) -> None:
    """Refuses what its recipes lack: fp16, sgd, tied weights in a pipeline, bf16 without sharded weights."""
    require_precision(plan.precision)
    if plan.optimizer != "adamw":
        raise InputError(f"{TARGET} cannot express the optimizer '{plan.optimizer}' of this plan: its Llama recipes use AdamW.")
    if tied and grid.pp > 1:
        raise refusal(TARGET, len(grid.parts) - 1, "it shares the embedding's weight with another stage", "Plan for one stage.")
    if plan.precision == "bf16" and not grid.zero and grid.tp * grid.pp > 1:
        what = "bf16 with weights that are whole on every rank; it mixes precision where it shards weights, or without tp and pipeline"
        raise refusal(TARGET, 0, what, "Use zero 1 over two or more replicas, or precision fp32.")


def _parallelism(plan: Plan, grid: Grid) -> list[tuple[str, str]]:
    sharded = grid.zero > 0
    settings = {
        "data_parallel_replicate_degree": 1 if sharded else grid.dp,
        "data_parallel_shard_degree": grid.dp if sharded else 1,
        "tensor_parallel_degree": grid.tp,
        "enable_sequence_parallel": grid.sequence_parallel,
        "pipeline_parallel_degree": grid.pp,
    }
    found = [(name, str(value)) for name, value in settings.items()]
    if sharded:
        found.append(("fsdp_reshard_after_forward", _quoted(_RESHARDS[grid.zero])))
    if grid.pp > 1:
        found += [
            ("pipeline_parallel_schedule", _quoted(_SCHEDULES[plan.schedule])),
            ("module_fqns_per_model_part", "MODULE_FQNS_PER_MODEL_PART"),
            ("pipeline_parallel_microbatch_size", str(grid.micro_batch)),
        ]
    return [(f"parallelism.{name}", value) for name, value in found]


def _training(plan: Plan, grid: Grid) -> list[tuple[str, str]]:
    precision = {"bf16": "bfloat16", "fp32": "float32"}[plan.precision]
    at_once = grid.num_micro_batches if grid.pp > 1 else 1  # a pipeline takes all of them, else gradients are accumulated
    found = [
        ("local_batch_size", str(grid.micro_batch * at_once)),
        ("global_batch_size", str(plan.global_batch)),
        ("seq_len", str(plan.seq_length)),
        ("mixed_precision_param", _quoted(precision)),
    ]
    if grid.pp > 1:
        found.append(("disable_cuda_graphs", "True"))  # pipelines cannot have them
    return [(f"training.{name}", value) for name, value in found]
