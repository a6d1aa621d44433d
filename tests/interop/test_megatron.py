"""Flags for Megatron-LM: snapshots, the layout of uneven stages, recomputation, and everything that is refused."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_flags import megatron_flags
from other_llamas import OTHER_FIELDS, other_llama

from penstock.errors import InputError
from penstock.interop.megatron import megatron_text
from penstock.models.catalog import resolve_model
from penstock.models.llama import LlamaConfig
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, OpRun, Plan, Stage
from penstock.plans.references import model_of
from penstock.systems.aceso.plans import groups

GPT = uniform_plan("gpt-tiny", "4xa100-40gb", pp=4, global_batch=16, micro_batch=2)
"""Stages of one layer each: ops 0:9, 9:17, 17:25, 25:36."""


def options(plan: Plan) -> dict[str, str]:
    """Each flag and its value."""
    found: dict[str, str] = {}
    for word in megatron_flags(plan):
        if word.startswith("--"):
            name = word
            found[name] = ""
        else:
            found[name] = word
    return found


def recut(plan: Plan, *cuts: int, **changes: Any) -> Plan:
    """The same plan cut elsewhere, one device for each stage."""
    bounds = [0, *cuts, plan.stages[-1].last]
    stages = tuple(
        Stage(first, last, ((index,),), **changes) for index, (first, last) in enumerate(pairwise(bounds))
    )
    return replace(plan, stages=stages)


def test_each_node_is_told_its_own_processes() -> None:
    plan = uniform_plan("gpt-1.3b", "2xp4d.24xlarge", pp=2, tp=2, replicas=4, global_batch=64, micro_batch=2)
    wanted = "torchrun --nnodes 2 --node-rank NODE --master-addr HOST --nproc-per-node 8 pretrain_gpt.py\n"
    assert wanted in megatron_text(replace(plan, gradients="fp32"))


def test_a_gpt_in_full() -> None:
    plan = uniform_plan(
        "gpt-1.3b", "8xa100-40gb", pp=2, tp=2, replicas=2, global_batch=64, micro_batch=2, zero=1, recompute="full", sequence_parallel=True
    )
    assert megatron_text(replace(plan, gradients="fp32")) == """\
# gpt-1.3b on 8 GPUs: tensor 2 x data 2 x pipeline 2, 16 micro-batches.
# Use: grep -v '^#' THIS_FILE | xargs torchrun --nproc-per-node 8 pretrain_gpt.py
# Still to be given: data, tokenizer, learning rate, number of iterations.
--tensor-model-parallel-size 2
--pipeline-model-parallel-size 2
--micro-batch-size 2
--global-batch-size 64
--sequence-parallel
--use-distributed-optimizer
--recompute-granularity full
--recompute-method uniform
--recompute-num-layers 1
--bf16
--accumulate-allreduce-grads-in-fp32
--optimizer adam
--num-layers 24
--hidden-size 2048
--ffn-hidden-size 8192
--num-attention-heads 32
--norm-epsilon 1e-05
--vocab-size 51200
--make-vocab-size-divisible-by 1
--hidden-dropout 0.0
--attention-dropout 0.0
--seq-length 2048
--max-position-embeddings 2048
--position-embedding-type learned_absolute
"""


def test_the_dtype_of_gradients_is_always_said() -> None:
    """Left alone Megatron-LM would hold two bytes more for every weight in bf16."""
    plan = uniform_plan("llama-8b", "8xh100-80gb", tp=8, global_batch=8, micro_batch=1)
    wide = "--accumulate-allreduce-grads-in-fp32"
    for precision, gradients, expected in (
        ("bf16", "", {"--bf16", "--grad-reduce-in-bf16"}), ("bf16", "fp32", {"--bf16", wide}), ("fp16", "", {"--fp16"}),
        ("fp16", "fp32", {"--fp16", wide}), ("fp32", "fp32", set()),
    ):  # fmt: skip
        found = options(replace(plan, precision=precision, gradients=gradients))
        assert {"--bf16", "--fp16", "--grad-reduce-in-bf16", wide} & set(found) == expected


def test_layouts_are_quoted_for_a_shell_which_would_take_them_for_pipes() -> None:
    plan = uniform_plan("gpt-tiny", "3xa100-40gb", pp=3, global_batch=16, micro_batch=2)
    assert "--pipeline-model-parallel-layout 'Et|t|t*2L'" in megatron_text(plan).splitlines()


def test_llamas() -> None:
    found = options(uniform_plan("llama-8b", "8xh100-80gb", tp=8, global_batch=8, micro_batch=1))
    assert {"--swiglu", "--disable-bias-linear", "--group-query-attention", "--untie-embeddings-and-output-weights"} <= set(found)
    assert found["--num-query-groups"] == "8" and found["--rotary-base"] == "500000" and found["--normalization"] == "RMSNorm"
    small = options(uniform_plan("llama-1b", "1xh100-80gb", global_batch=8, micro_batch=1))
    assert small["--rope-scaling-factor"] == "32.0" and "--untie-embeddings-and-output-weights" not in small


def test_positions_reach_as_far_as_samples_do() -> None:
    """Whichever side of a T5 is longer, and beyond what a Llama was made for where the plan is for longer samples."""
    t5 = uniform_plan("t5-770m", "1xa100-40gb", global_batch=8, micro_batch=1)
    for lengths in ((512, 128), (128, 512)):
        found = options(replace(t5, seq_length=lengths[0], dec_length=lengths[1]))
        assert (found["--encoder-seq-length"], found["--decoder-seq-length"]) == tuple(map(str, lengths))
        assert found["--max-position-embeddings"] == "512"
    llama = uniform_plan("llama-tiny", "1xa100-40gb", global_batch=8, micro_batch=1)
    most = resolve_model("llama-tiny").config["seq_length"]
    for length, expected in ((most // 2, most), (2 * most, 2 * most)):
        found = options(replace(llama, seq_length=length))
        assert (found["--seq-length"], found["--max-position-embeddings"]) == (str(length), str(expected))


def test_bert_and_t5_come_with_a_note() -> None:
    bert = uniform_plan("bert-large", "2xa100-40gb", pp=2, global_batch=8, micro_batch=1)
    assert "# Note: Megatron-LM's BERT normalises before" in megatron_text(bert) and "pretrain_bert.py" in megatron_text(bert)
    t5 = uniform_plan("t5-770m", "2xa100-40gb", tp=2, global_batch=8, micro_batch=1)
    found = options(t5)
    assert found["--encoder-num-layers"] == found["--decoder-num-layers"] == "24" and found["--kv-channels"] == "64"
    assert (found["--relative-attention-num-buckets"], found["--relative-attention-max-distance"]) == ("32", "128")
    assert found["--encoder-seq-length"] == "2048" and found["--decoder-seq-length"] == "512"


def test_dropout_and_layers_of_each_side_are_the_models() -> None:
    model = {"base": "gpt-tiny", "dropout": 0.2, "attention_dropout": 0.3, "fused_attention": False}
    found = options(replace(uniform_plan("gpt-tiny", "1xa100-40gb", global_batch=8, micro_batch=1), model=model))
    assert (found["--hidden-dropout"], found["--attention-dropout"], found["--attention-backend"]) == ("0.2", "0.3", "unfused")
    plan = uniform_plan("t5-tiny", "1xa100-40gb", global_batch=8, micro_batch=1)
    plan = replace(plan, model={"base": "t5-tiny", "layers": 3, "dec_layers": 1})
    t5 = options(recut(replace(plan, stages=(replace(plan.stages[0], last=model_of(plan).num_ops),))))
    assert (t5["--encoder-num-layers"], t5["--decoder-num-layers"]) == ("3", "1")


def test_ranks_of_a_group_are_in_its_order() -> None:
    """Its first two ranks would be another pair of neighbours."""
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", tp=4, global_batch=8, micro_batch=1)
    with pytest.raises(InputError, match="stage 0: replica 0 is on ranks 0,2,1,3"):
        megatron_flags(replace(plan, stages=(replace(plan.stages[0], devices=((0, 2, 1, 3),)),)))


def test_one_rank_has_no_distributed_optimizer() -> None:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", replicas=2, zero=1, global_batch=8, micro_batch=1)
    alone = uniform_plan("gpt-tiny", "2xa100-40gb", tp=2, zero=1, global_batch=8, micro_batch=1)
    assert ["--use-distributed-optimizer" in options(one) for one in (plan, alone)] == [True, False]


def test_what_a_micro_batch_is_there() -> None:
    """A stage's dp is data parallelism like replicas, so that a rank's micro-batch is a share of the plan's."""
    found = options(uniform_plan("gpt-tiny", "8xa100-40gb", dp=2, replicas=2, tp=2, global_batch=32, micro_batch=4))
    assert found["--micro-batch-size"] == "2" and found["--global-batch-size"] == "32" and "--bf16" not in found


def test_schedules() -> None:
    even = options(uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, schedule="interleaved", global_batch=8, micro_batch=1))
    assert even["--num-layers-per-virtual-pipeline-stage"] == "1" and "--pipeline-model-parallel-layout" not in even
    chunked = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, schedule="interleaved", global_batch=8, micro_batch=1)
    stages = [replace(stage, first=first, last=last) for stage, (first, last) in
              zip(chunked.stages, ((0, 1), (1, 17), (17, 25), (25, 36)), strict=True)]  # fmt: skip
    uneven = options(replace(chunked, stages=tuple(stages)))
    assert uneven["--pipeline-model-parallel-layout"] == "E|t*2|t|tL" and uneven["--pipeline-model-parallel-size"] == "2"
    for schedule in ("gpipe", "zero-bubble"):
        with pytest.raises(InputError, match=f"Megatron-LM cannot express the schedule '{schedule}'. It has 1f1b, interleaved"):
            megatron_flags(replace(GPT, schedule=schedule))
    with pytest.raises(InputError, match="9 micro-batches cannot be shared out evenly over 2 pipeline ranks"):
        megatron_flags(replace(chunked, global_batch=9))


@settings(deadline=None)
@given(st.sets(st.sampled_from([1, 9, 17, 25, 33]), max_size=3))
def test_the_layout_holds_every_layer_once(cuts: set[int]) -> None:
    plan = recut(GPT, *sorted(cuts))
    layout = options(plan).get("--pipeline-model-parallel-layout", "")
    if not layout:
        assert len({(stage.last - stage.first) // 8 for stage in plan.stages}) <= 2
        return
    spelled = re.sub(r"t\*(\d+)", lambda match: "t" * int(match[1]), layout)
    assert spelled.replace("|", "") == "EttttL"
    ends, places = [], 0
    for letter in spelled:
        places += {"E": 1, "t": 8, "L": 3, "|": 0}[letter]
        ends += [places] if letter == "|" else []
    assert ends == sorted(cuts)


def test_recomputation() -> None:
    def flags(*stages: tuple[tuple[int, int], ...]) -> list[str]:
        found = replace(GPT, stages=tuple(
            replace(stage, recompute=(pattern,) if pattern else ()) for stage, pattern in zip(GPT.stages, stages, strict=True)
        ))  # fmt: skip
        words = megatron_flags(found)
        return words[words.index("--recompute-granularity") :][:6] if "--recompute-granularity" in words else []

    full = ["--recompute-granularity", "full", "--recompute-method"]
    assert flags((), (), (), ()) == []
    assert flags(((1, 9),), ((9, 17),), ((17, 25),), ((25, 33),)) == [*full, "uniform", "--recompute-num-layers", "1"]
    core = flags(((3, 4),), ((11, 12),), ((19, 20),), ((27, 28),))
    assert core[:4] == ["--recompute-granularity", "selective", "--recompute-modules", "core_attn"]
    with pytest.raises(InputError, match="stage 2: it recomputes 0 of 1 layer, another stage 1"):
        flags(((1, 9),), ((9, 17),), (), ((25, 33),))
    with pytest.raises(InputError, match=r"stage 1: it recomputes qkv, attention of 'layers.1'. Recompute whole layers"):
        flags((), ((10, 12),), (), ())
    with pytest.raises(InputError, match="stage 3: it recomputes norm, logits, loss of 'head'"):
        flags((), (), (), ((33, 36),))
    with pytest.raises(InputError, match="stage 0: it recomputes embedding of 'embedding'"):
        flags(((0, 9),), (), (), ())


def test_the_first_layers_of_each_stage() -> None:
    plan = uniform_plan("gpt-350m", "4xa100-40gb", pp=2, global_batch=16, micro_batch=2)
    first, last = plan.stages
    both = replace(plan, stages=(replace(first, recompute=(((1, 17),),)), replace(last, recompute=(((97, 113),),))))
    assert options(both)["--recompute-method"] == "block" and options(both)["--recompute-num-layers"] == "2"
    later = replace(plan, stages=(replace(first, recompute=(((1, 17),),)), replace(last, recompute=(((105, 121),),))))
    with pytest.raises(InputError, match=r"stage 1: it recomputes 2 of 12 layers, another stage 2\. Recompute the first 2"):
        megatron_flags(later)


TWO = uniform_plan("gpt-tiny", "2xa100-40gb", replicas=2, global_batch=16, micro_batch=2)


def stage(index: int, **changes: Any) -> Plan:
    return replace(GPT, stages=tuple(replace(old, **changes) if at == index else old for at, old in enumerate(GPT.stages)))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (recut(GPT, 12), "stage 1: it starts at op 12 'layers.1.out', inside 'layers.1'. Cut between layers, at op 9 or 17"),
        (recut(GPT, 34), "stage 1: it starts at op 34 'head.logits', inside 'head'"),
        (stage(1, devices=((1, 4),), degrees=Degrees(2, 1)), "stage 1: tp is 2, in stage 0 it is 1"),
        (stage(1, devices=((1, 4),), degrees=Degrees(1, 2)), "stage 1: dp is 2, in stage 0 it is 1"),
        (stage(2, zero=1), "stage 2: zero is 1, in stage 0 it is 0"),
        (stage(3, sequence_parallel=True), "stage 3: sequence_parallel is True, in stage 0 it is False"),
        (stage(0, runs=(OpRun(1, 3, 1, 1, 0),)), "stage 0: ops 1:3 have degrees or a split of their own"),
        (stage(1, recompute=(((9, 10),), ())), "stage 1: it has 2 recomputation patterns"),
        (stage(3, devices=((5,),)), "stage 3: replica 0 is on ranks 5, where ranks count tp first, then replicas, then st"),
        (replace(GPT, micro_batching=replace(GPT.micro_batching, layout="packed")), "packed micro-batches"),
        (replace(GPT, micro_batching=replace(GPT.micro_batching, policy="dynamic")), "differ from batch to batch"),
        (replace(TWO, micro_batching=replace(TWO.micro_batching, per_replica=(5, 3))), "replicas with unequal numbers of micro-batches"),
        (uniform_plan("gpt-tiny", "2xa100-40gb", replicas=2, zero=2, global_batch=16, micro_batch=2), "stage 0: zero is 2"),
        (uniform_plan("gpt-tiny", "1xg5.xlarge+1xg6.xlarge", pp=2, global_batch=16, micro_batch=2),
         "stage 1: it uses l4 beside the a10g of stage 0"),
        (uniform_plan("t5-tiny", "2xa100-40gb", pp=2, global_batch=16, micro_batch=2), "stage 1: its T5 has no pipeline"),
    ],
)  # fmt: skip
def test_what_it_cannot_express(plan: Plan, reason: str) -> None:
    cluster = plan.cluster if plan.cluster != "4xa100-40gb" else "8xa100-40gb"
    with pytest.raises(InputError) as refused:
        megatron_flags(replace(plan, cluster=cluster))
    assert "Megatron-LM cannot express" in str(refused.value) and reason in str(refused.value)


def test_models_it_does_not_have() -> None:
    with pytest.raises(InputError, match=r"no model like 'resnet-tiny' \(resnet\). It has gpt, llama, bert, t5"):
        megatron_flags(uniform_plan("resnet-tiny", "1xa100-40gb", global_batch=16, micro_batch=2))
    assert groups(resolve_model("resnet-tiny"))  # known to others


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"base": "gpt-tiny", "activation": "relu"}, "the activation 'relu'"),
        ({"base": "llama-tiny", "window": 16}, "attention over a window of 16 tokens"),
        ({"base": "llama-tiny", "out_bias": True}, "a bias on the attention output"),
        ({"base": "llama-tiny", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "the rotary scaling"),
        ({"base": "t5-tiny", "gated": True}, "the gated MLP"),
    ],
)
def test_parts_of_models_it_does_not_have(model: dict[str, Any], reason: str) -> None:
    plan = uniform_plan(model["base"], "1xa100-40gb", global_batch=16, micro_batch=2)
    with pytest.raises(InputError, match=f"Megatron-LM cannot express {reason}"):
        megatron_flags(replace(plan, model=model))


def test_an_invalid_plan_is_told_as_such() -> None:
    with pytest.raises(InputError, match=r"stages.1.ops is 9:17, but the ops before it end at 8"):
        megatron_flags(stage(0, last=8))


def test_other_switches() -> None:
    gpt = uniform_plan("gpt-tiny", "1xa100-40gb", global_batch=16, micro_batch=2)
    found = options(replace(gpt, model={"base": "gpt-tiny", "fused_attention": False, "tied": False}, optimizer="sgd", precision="fp16"))
    assert found["--attention-backend"] == "unfused" and found["--optimizer"] == "sgd" and "--fp16" in found
    assert "--untie-embeddings-and-output-weights" in found
    qwen = {"base": "llama-tiny", "qkv_bias": True, "qk_norm": True, "head_width": 32}
    found = options(replace(uniform_plan("llama-tiny", "1xa100-40gb", global_batch=16, micro_batch=2), model=qwen))
    assert {"--add-qkv-bias", "--qk-layernorm"} <= set(found) and found["--kv-channels"] == "32"
    for field, flag, other in (("qkv_bias", "--add-qkv-bias", "--qk-layernorm"), ("qk_norm", "--qk-layernorm", "--add-qkv-bias")):
        one = {"base": "llama-tiny", field: True}
        found = options(replace(uniform_plan("llama-tiny", "1xa100-40gb", global_batch=16, micro_batch=2), model=one))
        assert flag in found and other not in found
    plain = {"base": "bert-tiny", "next_sentence": False}
    assert "--bert-no-binary-head" in options(replace(uniform_plan("bert-tiny", "1xa100-40gb", global_batch=8, micro_batch=2),
                                                      model=plain, stages=(Stage(0, 23, ((0,),)),)))  # fmt: skip


@pytest.mark.parametrize("field", [field.name for field in fields(LlamaConfig)])
def test_every_field_of_a_model_is_seen_or_refused(field: str, tmp_path: Path) -> None:
    try:
        assert megatron_flags(other_llama(tmp_path, **{field: OTHER_FIELDS[field]})) != megatron_flags(other_llama(tmp_path))
    except InputError as refused:
        assert field in ("rope_theta", "out_bias", "window") and "Megatron-LM cannot express" in str(refused)
