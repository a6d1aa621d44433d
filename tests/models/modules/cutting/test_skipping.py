"""Every cut of many models, two stages in one process: loss and gradients against the module as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.every_cut import Net, assert_every_cut, net_call
from tests.module_zoo import NAMES, PlainGpt, example, make


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_equals_the_module(name: str) -> None:
    kwargs = example(name)
    assert_every_cut(make(name), lambda module: module(**kwargs))


def test_a_block_that_stands_in_a_list_again_is_one() -> None:
    """As in universal transformers: the same weights at every depth."""
    module, kwargs = PlainGpt(layers=1), example("long-skips")
    module.blocks = nn.ModuleList([module.blocks[0]] * 3)
    assert_every_cut(module, lambda own: F.cross_entropy(own(kwargs["ids"]).flatten(0, 1), kwargs["labels"].flatten()))


def in_place(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x + 1.0
    x += y
    return x


def received_in_place(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    y *= 2.0
    return y.add_(x)


def into_another(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(x)
    out[:] = y
    return x + out


def remembered(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    net.seen = [*getattr(net, "seen", [])[-1:], y] if index else [y]
    return x + sum(net.seen)


class Halved(torch.autograd.Function):
    """As reversal of gradients is written."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).tanh()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradients[0] / 2, -gradients[0]


def with_a_gradient_of_its_own(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return Halved.apply(x * 2, y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", [in_place, received_in_place, into_another, remembered, with_a_gradient_of_its_own])
def test_glue_of_many_kinds(between: Any) -> None:
    assert_every_cut(Net(between), net_call)


def test_frozen_units() -> None:
    module = make("llama")
    module.model.embed_tokens.requires_grad_(False)
    module.model.layers[0].requires_grad_(False)
    kwargs = example("llama")
    assert_every_cut(module, lambda module: module(**kwargs))
