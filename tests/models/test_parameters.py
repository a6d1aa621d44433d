"""Parameter counts as the papers' authors and Hugging Face publish them."""

from __future__ import annotations

import pytest

from penstock.models.catalog import model_from_mapping, resolve_model

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_named_sizes(name: str, parameters: int) -> None:
    assert resolve_model(name).num_parameters == parameters


@pytest.mark.parametrize(("name", "parameters"), [("t5-3b", 2_851_598_336), ("t5-11b", 11_307_321_344)])
def test_t5_with_the_published_vocabulary(name: str, parameters: int) -> None:
    assert model_from_mapping({"base": name, "vocab": 32128}, "test", name).num_parameters == parameters


@pytest.mark.parametrize(("name", "hidden", "parameters"), [("bert-base", 768, 109_482_240), ("bert-large", 1024, 335_141_888)])
def test_bert_without_its_pretraining_heads(name: str, hidden: int, parameters: int) -> None:
    """Encoder and pooler; what goes is the masked-token head (its weight is the embedding's) and the two-way classifier."""
    model = resolve_model(name)
    shape = model.usual_shape(1)
    heads = sum(
        op.config.get("untied_parameters", op.parameters.at(shape))
        for op in (placed.op for placed in model.ops if placed.block == "head")
        if op.kind != "pooler"
    )
    assert model.num_parameters - heads - (2 * hidden + 2) == parameters


def test_a_tied_weight_counts_once() -> None:
    whole = model_from_mapping({"base": "gpt-tiny", "tied": False}, "test", "untied")
    assert whole.num_parameters - resolve_model("gpt-tiny").num_parameters == 512 * 64
