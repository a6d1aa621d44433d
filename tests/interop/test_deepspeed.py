"""DeepSpeed's configuration: a snapshot, parts of every family, and everything that is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.interop.deepspeed import deepspeed_config
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan

BASE = uniform_plan("gpt-tiny", "8xa100-40gb", pp=2, tp=2, replicas=2, global_batch=64, micro_batch=4, zero=1, recompute="full")


def test_a_configuration_in_full() -> None:
    found = deepspeed_config(replace(BASE, precision="bf16"))
    assert json.loads(json.dumps(found)) == found == {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "communication_data_type": "bf16",
        "penstock": {
            "model": "gpt-tiny",
            "topology": {"num_pp": 2, "num_mp": 2, "num_dp": 2},
            "layers": ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"],
            "parts": [0, 3, 6],
            "activation_checkpoint_interval": 1,
            "recomputed_layers": ["layers"],
        },
    }  # fmt: skip


def test_gradients_are_summed_as_planned() -> None:
    found = deepspeed_config(replace(BASE, precision="bf16", gradients="fp32"))
    assert found["data_types"] == {"grad_accum_dtype": "fp32"} and found["communication_data_type"] == "fp32"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_another_dtype_need_zero(precision: str) -> None:
    """DeepSpeed refuses such a mix without it; over one rank ZeRO-1 divides nothing."""
    alone = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, global_batch=8, micro_batch=2, precision=precision, gradients="fp32")
    assert deepspeed_config(alone)["zero_optimization"] == {"stage": 1}
    assert deepspeed_config(replace(alone, gradients=""))["zero_optimization"] == {"stage": 0}
    two = uniform_plan("gpt-tiny", "2xa100-40gb", replicas=2, global_batch=8, micro_batch=2, precision=precision, gradients="fp32")
    with pytest.raises(InputError, match=f"gradients are summed in fp32 beside weights in {precision}, which it does under ZeRO alone"):
        deepspeed_config(two)
    assert deepspeed_config(replace(two, gradients=precision))["zero_optimization"] == {"stage": 0}


@pytest.mark.parametrize(("optimizer", "untested"), [("adamw", None), ("sgd", True), ("lamb", True)])
def test_zero_is_told_to_take_other_optimizers(optimizer: str, untested: bool | None) -> None:
    assert deepspeed_config(replace(BASE, optimizer=optimizer)).get("zero_allow_untested_optimizer") is untested


def test_whole_precision_without_recomputation() -> None:
    found = deepspeed_config(replace(uniform_plan("gpt-tiny", "1xa100-40gb", global_batch=8, micro_batch=2), optimizer="sgd"))
    assert "bf16" not in found and "fp16" not in found and found["optimizer"] == {"type": "SGD"}
    assert found["penstock"]["activation_checkpoint_interval"] == 0 and found["penstock"]["recomputed_layers"] == []


@pytest.mark.parametrize("model", ["llama-tiny", "bert-tiny", "t5-tiny", "resnet-tiny"])
def test_every_family_has_layers(model: str) -> None:
    found = deepspeed_config(uniform_plan(model, "2xa100-40gb", pp=2, global_batch=8, micro_batch=2))["penstock"]
    assert found["parts"][0] == 0 and found["parts"][-1] == len(found["layers"]) == len(set(found["layers"]))


@settings(deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(1, 3), st.integers(1, 4))
def test_the_batch_sizes_agree(pp: int, tp: int, replicas: int, micro: int, rounds: int) -> None:
    """DeepSpeed itself refuses a configuration in which they do not."""
    plan = uniform_plan("gpt-tiny", "64xa100-40gb", pp=pp, tp=tp, replicas=replicas, dp=2, global_batch=replicas * 2 * micro * rounds,
                        micro_batch=2 * micro)  # fmt: skip
    found = deepspeed_config(plan)
    ranks = found["penstock"]["topology"]["num_dp"]
    assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"] * ranks
    parts = found["penstock"]["parts"]
    assert len(parts) == pp + 1 and parts == sorted(set(parts))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(BASE, schedule="gpipe"), "the schedule 'gpipe'. It has 1f1b."),
        (uniform_plan("gpt-tiny", "2xa100-40gb", tp=2, sequence_parallel=True, global_batch=8, micro_batch=2), "stage 0: sequence paral"),
        (replace(BASE, stages=(BASE.stages[0], replace(BASE.stages[1], recompute=()))), "stage 1: it recomputes 0 of 2 layers"),
        (replace(BASE, stages=(BASE.stages[0], replace(BASE.stages[1], recompute=(((17, 20),),)))), "stage 1: it recomputes norm1, qkv"),
        (replace(BASE, stages=(replace(BASE.stages[0], last=18, recompute=()), replace(BASE.stages[1], first=18, recompute=()))),
         "stage 1: it starts at op 18 'layers.2.qkv'"),
        (replace(BASE, micro_batching=replace(BASE.micro_batching, layout="packed")), "packed micro-batches"),
        (uniform_plan("gpt-tiny", "1xg5.xlarge+1xg6.xlarge", pp=2, global_batch=16, micro_batch=2), "stage 1: it uses l4 beside the a10g"),
    ],
)  # fmt: skip
def test_what_it_cannot_express(plan: Plan, reason: str) -> None:
    with pytest.raises(InputError) as refused:
        deepspeed_config(plan)
    assert "DeepSpeed cannot express" in str(refused.value) and reason in str(refused.value)
