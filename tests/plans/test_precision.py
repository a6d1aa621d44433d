"""Precision, gradients and lengths that a plan gets without being told, and what it cannot have."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.precision import chosen_gradients, chosen_lengths, chosen_precision, described_training
from penstock.plans.schema import plan_from_dict, plan_to_dict
from penstock.plans.validity import check_plan

GPT = resolve_model("gpt2")
OPEN = dataclasses.replace(resolve_model("gpt-tiny"), open_dtype=True)


@pytest.mark.parametrize(
    ("cluster", "asked", "expected", "note"),
    [
        ("8xh100", None, "bf16", ""),
        ("8xh100", "fp16", "fp16", ""),
        ("8xt4", None, "fp16", "t4 has no bf16"),
        ("8xt4", "fp32", "fp32", ""),
        ("1xp4d.24xlarge+1xp3.16xlarge", None, "fp16", "v100-16gb has no bf16"),
        ("2xcpu", None, "fp32", "cpu has no bf16"),
    ],
)
def test_a_precision_that_all_devices_have(cluster: str, asked: str | None, expected: str, note: str) -> None:
    model, notes = chosen_precision(GPT, resolve_cluster(cluster), asked)
    assert model.dtype == expected and model.num_parameters == GPT.num_parameters
    assert bool(notes) == bool(note) and all(note in told for told in notes)


@pytest.mark.parametrize(("cluster", "expected"), [("8xa10g", "bf16"), ("8xt4", "fp16"), ("1xcpu", "fp32")])
def test_a_config_without_dtype_is_planned_in_the_best_and_says_so(cluster: str, expected: str) -> None:
    model, (note,) = chosen_precision(OPEN, resolve_cluster(cluster))
    assert model.dtype == expected and f"planned in {expected}" in note
    assert chosen_precision(OPEN, resolve_cluster(cluster), "fp32")[1] == ()


@pytest.mark.parametrize("cluster", ["8xt4", "1xp3.2xlarge"])
def test_bf16_is_refused_where_it_would_be_emulated(cluster: str) -> None:
    with pytest.raises(InputError, match=r"no bf16; it would be emulated .* Use --precision fp16"):
        chosen_precision(GPT, resolve_cluster(cluster), "bf16")


def test_an_unknown_precision_is_answered_with_the_known() -> None:
    with pytest.raises(InputError, match=r"precision is 'bf61'\. Did you mean 'bf16'"):
        chosen_precision(GPT, resolve_cluster("8xh100"), "bf61")


def test_gradients_are_fp32_or_like_the_weights() -> None:
    assert [chosen_gradients(asked, "bf16") for asked in (None, "fp32", "bf16")] == ["fp32", "fp32", "bf16"]
    with pytest.raises(InputError, match=r"gradients is 'bf16', but weights are fp32\. Use fp32"):
        chosen_gradients("bf16", "fp32")
    plan = uniform_plan("gpt2", "4xh100", global_batch=8, micro_batch=1)
    assert check_plan(dataclasses.replace(plan, gradients="fp32")) == []
    (problem,) = check_plan(dataclasses.replace(plan, gradients="fp16"))
    assert "gradients is 'fp16', but precision is bf16" in problem


def test_plan_files_hold_gradients() -> None:
    plan = uniform_plan("gpt2", "4xh100", global_batch=8, micro_batch=1)
    wide = dataclasses.replace(plan, gradients="fp32")
    assert plan_from_dict(plan_to_dict(wide), "a test") == wide
    assert "gradients" not in plan_to_dict(plan) and described_training(plan).endswith(" tokens, bf16")
    assert described_training(wide) == "1,024 tokens, bf16 (gradients in fp32)"


def test_lengths_are_usual_ones() -> None:
    llama = dataclasses.replace(resolve_model("llama-8b"), seq_length=131072)
    length, _, (note,) = chosen_lengths(llama, None)
    assert length == 4096 and "131,072" in note and "4,096" in note
    assert chosen_lengths(llama, 131072) == (131072, 0, ())
    assert chosen_lengths(GPT, None) == (1024, 0, ())
    t5 = dataclasses.replace(resolve_model("t5-base"), dec_length=100_000)
    assert chosen_lengths(t5, None)[1] == chosen_lengths(t5, 256)[1] == 4096
    assert chosen_lengths(resolve_model("t5-base"), None)[:2] == (512, resolve_model("t5-base").dec_length)
