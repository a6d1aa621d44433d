"""Segments that are recomputed: what runs again, and that it saves what it saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import small_model

from penstock.models.modules import TensorParallel, build_chain, fused, random_batch, run_backward
from penstock.models.modules.build import Chain


def _layer(tp: int) -> tuple[Chain, list[int]]:
    """A small GPT, and the positions of its first layer."""
    model = small_model("gpt")
    chain = build_chain(model, tp=TensorParallel(0, tp, lone=tp > 1))
    return chain, [place.index for place in model.ops if place.name.startswith("layers.0.")]


def _hold_gradients(chain: Chain) -> None:
    for weight in chain.parameters():
        weight.grad = torch.zeros_like(weight)


@pytest.mark.parametrize("tp", [1, 2])
def test_the_product_that_ends_a_segment_need_not_run_again(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves its input before it runs; the other products of the segment add to the gradients that are there."""
    chain, layer = _layer(tp)
    _hold_gradients(chain)
    ran: list[str] = []
    product = fused.F.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        result = product(x, weight, bias)
        ran.append(next(name for name, one in chain.named_parameters() if one is weight))
        return result

    monkeypatch.setattr(fused.F, "linear", linear)
    batch = random_batch([6, 9], small_model("gpt").config["vocab"])
    loss = chain(batch, recompute=layer)["loss"]
    ran.clear()
    run_backward([loss])
    names = {f"ops.{index}.weight": chain.places[index].op.name for index in layer}
    assert [names[name] for name in ran] == ["qkv", "out", "up"]


def test_gradients_that_appear_before_a_segment_runs_again_do_not_change_what_it_saves() -> None:
    """Of the micro-batch that was under way at the same time."""
    found = []
    for recompute in (False, True):
        chain, layer = _layer(1)
        vocab = small_model("gpt").config["vocab"]
        first, second = (chain(random_batch(lengths, vocab, seed=seed), recompute=layer if recompute else ())["loss"]
                         for seed, lengths in enumerate(([6, 9], [4, 5])))  # fmt: skip
        run_backward([second])
        run_backward([first])
        found.append([weight.grad for weight in chain.parameters()])
    assert all(one is not None and torch.equal(one, other) for one, other in zip(*found, strict=True))
