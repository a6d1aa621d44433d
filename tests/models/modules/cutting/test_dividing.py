"""Plans of tensor parallelism for somebody's modules: what they divide, and what is found wrong before anything trains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.models.modules.cutting import describing
from penstock.models.modules.cutting.describing import describe
from penstock.models.modules.cutting.dividing import styles_of, tp_plan_of
from penstock.models.modules.cutting.origins import made_of
from penstock.models.modules.cutting.seen import logits_loss
from penstock.models.modules.cutting.trying_tp import trains_alike
from tests.module_zoo import VOCAB, PlainGpt, make

MLP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def tried(module: nn.Module, plan: dict[str, str]) -> str:
    return trains_alike(module, logits_loss, styles_of(module, plan, strict=True)[0], 2, VOCAB)


def test_a_plan_that_trains_like_the_whole() -> None:
    assert tried(PlainGpt(), {**MLP, "words": "embedding_rowwise", "head": "colwise_gather_output"}) == ""  # 97 words over two ranks
    assert tried(PlainGpt(), {"blocks.*.up": "colwise_rep", "blocks.*.down": "rowwise_split_input"}) == ""


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"blocks.*.qkv": "colwise", "blocks.*.out": "rowwise"}, "its loss is"),  # queries, keys and values in a row: all shapes fit
        ({"blocks.*.up": "colwise"}, "it fails"),
    ],
)
def test_a_plan_that_computes_something_else(plan: dict[str, str], told: str) -> None:
    assert told in tried(PlainGpt(), plan)
    with pytest.raises(InputError, match=r"tp_plan of PlainGpt divides it into something else: with tp 2"):
        describe(replace(made_of(PlainGpt()), tp_plan=plan))


def test_a_gradient_that_is_not_summed_is_noticed() -> None:
    module: Any = make("qwen3")
    plan = dict(tp_plan_of(module)[0])
    del plan["model.layers.*.self_attn.q_norm"]
    assert "the gradient of 'model.layers.0.self_attn.q_norm.weight' is another" in tried(module, plan)


class BiasedKeys(nn.Module):
    """The gradient of its keys' bias is zero but for rounding, and others are large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * 30
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.head(x + self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))) * 30


def test_rounding_of_a_gradient_that_is_zero_is_no_difference() -> None:
    net = BiasedKeys()
    styles = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    assert trains_alike(net, logits_loss, styles, 2, VOCAB) == ""


def test_names_of_nothing_and_styles_of_nobody() -> None:
    with pytest.raises(InputError, match=r"tp_plan names 'layers.\*.up': no part of PlainGpt is called so."):
        styles_of(PlainGpt(), {"layers.*.up": "colwise"}, strict=True)
    with pytest.raises(InputError, match=r"tp_plan names 'blocks.\*.up': 'diagonal' is none of colwise"):
        styles_of(PlainGpt(), {"blocks.*.up": "diagonal"}, strict=True)


def test_shared_weights_are_divided_alike_or_not_at_all() -> None:
    module = PlainGpt()
    assert styles_of(module, {"words": "embedding_rowwise"}, strict=True)[0] == {}
    both = {"words": "embedding_rowwise", "head": "colwise_gather_output"}
    assert styles_of(module, both, strict=True)[0] == both


def test_experts_stay_whole_and_the_description_says_so() -> None:
    module = make("mixtral")
    styles, whole = styles_of(module, *tp_plan_of(module)[:1], strict=False)
    assert "model.layers.*.mlp.experts" in whole and styles["model.layers.2.self_attn.o_proj"] == "rowwise"
    assert describing._divided(made_of(PlainGpt())) == (None, ("tensor parallelism is 1: the module has no tp_plan.",))


def test_what_a_description_says_of_a_divided_module() -> None:
    """Half of the work and of the weights on each of two ranks, and two sums: of what leaves the block, and of its input's gradient."""
    model = describe(replace(made_of(PlainGpt(layers=6)), tp_plan=MLP))
    block = next(place.op for place in model.ops if place.name == "blocks.4")
    assert model.max_tp() == 64 and block.config["tp"] == {"up": "colwise", "down": "rowwise"}
    assert block.parameters.split.coefficients[0] == 2 * 32 * 128 + 128
    assert block.flops.split.coefficients[2] == 2 * 2 * 32 * 128
    assert [(one.kind, one.when, one.size_bytes.coefficients[2]) for one in block.splits[0].collectives] == [
        ("all_reduce", "backward", 128.0), ("all_reduce", "forward", 128.0)]  # fmt: skip
    assert model.ops[0].op.tp_limit == 0, "what is not divided may be beside anything"
