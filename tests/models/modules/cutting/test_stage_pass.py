"""A stage's pass: hooks on gradients, units that run again, other micro-batches, and weights that are elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import InputError
from penstock.models.modules.cutting.skipping import Skipping
from tests.every_cut import Net, assert_every_cut, in_two, net_call, plain
from tests.module_zoo import PlainGpt, example, make


class Hooked(PlainGpt):
    """Gradients are halved by hooks: on what a block returns, on what is made of it, and in front of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_full_backward_pre_hook(lambda block, gradients: (gradients[0] * 0.5,))
        self.blocks[2].register_full_backward_hook(lambda block, gradients, _: (gradients[0] * 0.5,))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
            x = x * 1.5
            if x.requires_grad:
                x.register_hook(lambda gradient: gradient * 0.5)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def test_hooks_meet_a_gradient_once() -> None:
    """Code between units runs on both sides of a cut, and sets its hooks on both; so does what calls a unit."""
    module, kwargs = Hooked(), example("long-skips")
    assert_every_cut(module, lambda own: F.cross_entropy(own(kwargs["ids"]).flatten(0, 1), kwargs["labels"].flatten()))


def test_recomputed_units_change_nothing() -> None:
    kwargs = example("llama")
    assert_every_cut(make("llama"), lambda module: module(**kwargs), recompute=range(20))


def test_a_micro_batch_of_another_shape_needs_no_trace() -> None:
    module = make("gemma3")
    chain = Skipping(module)
    chain.trace(lambda module: module(**example("gemma3")))
    for samples, length in ((3, 5), (3, 7), (3, 23), (3, 8), (1, 5), (4, 7), (2, 23), (5, 2)):  # a size that stays the same is no constant
        kwargs = example("gemma3", samples, length)
        loss, _ = plain(module, lambda module: module(**kwargs))  # noqa: B023
        assert torch.equal(in_two(chain, lambda module: module(**kwargs), 3)[0], loss)  # noqa: B023


def test_weights_of_other_stages_may_be_on_meta() -> None:
    module, kwargs = make("qwen3"), example("qwen3")
    loss, _ = plain(module, lambda module: module(**kwargs))
    first, second = make("qwen3"), make("qwen3")
    chains = [Skipping(one) for one in (first, second)]
    for chain in chains:
        chain.trace(lambda module: module(**kwargs))
    for path in chains[0].calls[3:-1]:  # the last shares the weight of the first
        chains[0].units[path].to("meta")
    for path in chains[1].calls[1:3]:
        chains[1].units[path].to("meta")
    sent = chains[0].run(lambda module: module(**kwargs), 0, 3, {})
    assert torch.equal(chains[1].run(lambda module: module(**kwargs), 3, len(chains[1].calls), sent).loss, loss)


def test_another_order_of_calls_is_named() -> None:
    module = Net(lambda net, index, x, y: x + y)
    chain = Skipping(module)
    chain.trace(net_call)
    module.blocks = nn.ModuleList(reversed(module.blocks))
    with pytest.raises(InputError, match=r"'blocks.2' was called where 'blocks.0' was: every micro-batch must call the same parts"):
        chain.run(net_call, 0, len(chain.calls), {})
