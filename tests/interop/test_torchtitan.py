"""Recipes for torchtitan: a snapshot, what they set, and everything that is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from other_llamas import OTHER_FIELDS, other_llama

from penstock.errors import InputError
from penstock.interop.torchtitan import torchtitan_recipe
from penstock.models.llama import LlamaConfig
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan

BASE = uniform_plan(
    "llama-8b", "16xh100-80gb", pp=4, tp=2, replicas=2, global_batch=64, micro_batch=2, zero=1, recompute="full", sequence_parallel=True
)


def settings(text: str) -> dict[str, str]:
    """What the recipe sets, each by its name; whether torchtitan takes it `test_consumers.py` tells."""
    return dict(line.strip().removeprefix("config.").split(" = ", 1) for line in text.splitlines() if line.startswith("    config."))


def test_a_recipe_in_full() -> None:
    assert torchtitan_recipe(replace(BASE, gradients="fp32")) == '''\
"""llama-8b on 16 GPUs, 4 stages. Written by Penstock for torchtitan 0.3.

PYTHONPATH=<folder of this file> NGPU=16 MODULE=<name of this file, without .py> CONFIG=penstock_plan ./run_train.sh

torchtitan's FSDP sums gradients with every micro-batch, where the plan (ZeRO-1) does once a step: it communicates more.
"""

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3.config_registry import llama3_8b

MODULE_FQNS_PER_MODEL_PART = [
    ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3", "layers.4", "layers.5", "layers.6", "layers.7"],
    ["layers.8", "layers.9", "layers.10", "layers.11", "layers.12", "layers.13", "layers.14", "layers.15"],
    ["layers.16", "layers.17", "layers.18", "layers.19", "layers.20", "layers.21", "layers.22", "layers.23"],
    ["layers.24", "layers.25", "layers.26", "layers.27", "layers.28", "layers.29", "layers.30", "layers.31", "norm", "lm_head"],
]


def penstock_plan():
    """The plan; data, learning rate and number of steps are those of the recipe it starts from."""
    config = llama3_8b()
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.tensor_parallel_degree = 2
    config.parallelism.enable_sequence_parallel = True
    config.parallelism.pipeline_parallel_degree = 4
    config.parallelism.fsdp_reshard_after_forward = "never"
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.module_fqns_per_model_part = MODULE_FQNS_PER_MODEL_PART
    config.parallelism.pipeline_parallel_microbatch_size = 2
    config.training.local_batch_size = 32
    config.training.global_batch_size = 64
    config.training.seq_len = 4096
    config.training.mixed_precision_param = "bfloat16"
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = FullAC.Config()
    for layer in config.model_spec.model.layers:
        layer.attention.rope.scaling = "none"
    return config
'''


def test_a_plan_with_gradients_in_bf16_is_told_of_what_it_cannot_have() -> None:
    assert "torchtitan keeps and sums gradients in fp32, where the plan has bf16" in torchtitan_recipe(BASE)


def test_one_stage_of_another_flavour() -> None:
    text = torchtitan_recipe(uniform_plan("llama-1b", "2xh100-80gb", replicas=2, global_batch=8, micro_batch=2))
    assert "MODULE_FQNS" not in text and "FullAC" not in text
    assert settings(text) == {
        "model_spec": 'model_registry("1B")',
        "parallelism.data_parallel_replicate_degree": "2",
        "parallelism.data_parallel_shard_degree": "1",
        "parallelism.tensor_parallel_degree": "1",
        "parallelism.enable_sequence_parallel": "False",
        "parallelism.pipeline_parallel_degree": "1",
        "training.local_batch_size": "2",
        "training.global_batch_size": "8",
        "training.seq_len": "4096",
        "training.mixed_precision_param": '"bfloat16"',
        "activation_checkpoint": "None",
    }


@pytest.mark.parametrize(("zero", "reshard"), [(1, '"never"'), (2, '"never"'), (3, '"always"')])
def test_sharding(zero: int, reshard: str) -> None:
    text = torchtitan_recipe(uniform_plan("llama-70b", "16xh100-80gb", tp=8, replicas=2, zero=zero, global_batch=8, micro_batch=1))
    found = settings(text)
    assert found["parallelism.fsdp_reshard_after_forward"] == reshard and found["parallelism.data_parallel_shard_degree"] == "2"
    assert ("sums gradients with every micro-batch" in text) == (zero == 1)


def test_schedules() -> None:
    looped = uniform_plan(
        "llama-8b", "4xh100-80gb", pp=4, chunks=2, schedule="interleaved", global_batch=8, micro_batch=1, precision="fp32"
    )
    text = torchtitan_recipe(looped)
    found = settings(text)
    assert found["parallelism.pipeline_parallel_schedule"] == '"Interleaved1F1B"' and found["training.mixed_precision_param"] == '"float32"'
    assert text.count('    ["') == 8 and found["training.local_batch_size"] == "8"
    assert '"GPipe"' in torchtitan_recipe(replace(BASE, schedule="gpipe"))
    with pytest.raises(InputError, match=r"torchtitan cannot express the schedule 'zero-bubble'\. It has 1f1b, gpipe, interleaved"):
        torchtitan_recipe(uniform_plan("llama-8b", "4xh100-80gb", pp=4, schedule="zero-bubble", global_batch=8, micro_batch=1))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(BASE, precision="fp16"), "torchtitan cannot express precision fp16"),
        (replace(BASE, optimizer="sgd"), "torchtitan cannot express the optimizer 'sgd'"),
        (uniform_plan("llama-1b", "4xh100-80gb", pp=2, replicas=2, zero=1, global_batch=8, micro_batch=1), "stage 1: it shares the emb"),
        (uniform_plan("llama-8b", "2xh100-80gb", pp=2, global_batch=8, micro_batch=1), "stage 0: bf16 with weights that are whole"),
        (replace(BASE, stages=(*BASE.stages[:2], replace(BASE.stages[2], recompute=()), BASE.stages[3])),
         "stage 2: some layers are recomputed and some are not"),
        (replace(BASE, stages=(replace(BASE.stages[0], recompute=(((1, 3),),)), *BASE.stages[1:])), "stage 0: it recomputes norm1, qkv of"),
        (replace(BASE, stages=(replace(BASE.stages[0], last=68), replace(BASE.stages[1], first=68, recompute=()), *BASE.stages[2:])),
         "stage 1: it starts at op 68 'layers.8.out'"),
        (replace(BASE, micro_batching=replace(BASE.micro_batching, layout="packed")), "packed micro-batches"),
        (uniform_plan("gpt-tiny", "1xh100-80gb", global_batch=8, micro_batch=1), "torchtitan has no model like 'gpt-tiny' (gpt)"),
        (uniform_plan("llama-tiny", "1xh100-80gb", global_batch=8, micro_batch=1), "no Llama of the sizes of 'llama-tiny'"),
        (replace(uniform_plan("llama-8b", "1xh100-80gb", global_batch=8, micro_batch=1), model={"base": "llama-8b", "qk_norm": True}),
         "torchtitan cannot express qk_norm True of model 'model': its Llama 8B has False"),
        (replace(uniform_plan("llama-8b", "1xh100-80gb", global_batch=8, micro_batch=1),
                 model={"base": "llama-8b", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
         "torchtitan cannot express rope_scaling {'rope_type': 'linear', 'factor': 2.0}"),
    ],
)  # fmt: skip
def test_what_it_cannot_express(plan: Plan, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        torchtitan_recipe(plan)
    assert reason in str(refused.value)


def test_positions_are_turned_as_the_model_turns_them(tmp_path: Path) -> None:
    """torchtitan's own are Llama 3.1's."""

    def lines(**fields: Any) -> list[str]:
        text = torchtitan_recipe(other_llama(tmp_path, **fields))
        return [line.strip().removeprefix("layer.attention.rope.") for line in text.splitlines() if line.startswith("        layer.")]

    newer = {**OTHER_FIELDS["rope_scaling"], "factor": 8.0}
    assert lines(rope_scaling=newer) == [] and lines() == ['scaling = "none"']
    assert lines(rope_scaling={**newer, "factor": 32.0}, rope_theta=1e6) == ["theta = 1000000.0", "scaling_factor = 32.0"]
    assert lines(rope_scaling=newer, head_width=128) == []  # as wide as it would be unsaid


@pytest.mark.parametrize("field", [field.name for field in fields(LlamaConfig)])
def test_every_field_of_a_model_is_seen_or_refused(field: str, tmp_path: Path) -> None:
    try:
        assert torchtitan_recipe(other_llama(tmp_path, **{field: OTHER_FIELDS[field]})) != torchtitan_recipe(other_llama(tmp_path))
    except InputError as refused:
        assert f"cannot express {field} {OTHER_FIELDS[field]}" in str(refused) or "has no Llama of the sizes" in str(refused)
