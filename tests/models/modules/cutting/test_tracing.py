"""What a pass without values finds: the order of calls, what crosses each cut, and which weights code between units uses."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.models.modules.cutting.absent import NeedsValues
from penstock.models.modules.cutting.skipping import Skipping
from penstock.models.modules.cutting.weights import WeightTable
from tests.every_cut import Net, assert_every_cut, net_call
from tests.module_zoo import VOCAB, PlainGpt, example, make


class Bare(PlainGpt):
    """Weights that no part's forward pass uses: scales in lists and dicts, a head and an embedding of which the weight alone is used."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(32) for _ in self.blocks)
        self.shifts = nn.ParameterDict({"first": torch.rand(32), "gate": torch.rand(32)})
        self.bias = nn.Linear(1, VOCAB)
        self.bias.register_buffer("kept", torch.zeros(1))
        self.register_buffer("last", torch.rand(VOCAB))
        self.register_buffer("unsaved", torch.zeros(1), persistent=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        gate = torch.sigmoid(self.shifts["gate"])
        x = self.words(ids) + self.shifts["first"].to(self.head.weight.dtype)
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return F.linear(self.norm(x) * gate, self.words.weight, self.bias.bias) + self.last + self.unsaved


def test_weights_that_code_between_units_uses_are_found_where_they_are_used() -> None:
    module, kwargs = Bare(), example("long-skips")
    assert_every_cut(module, lambda own: F.cross_entropy(own(kwargs["ids"]).flatten(0, 1), kwargs["labels"].flatten()))
    carry, wanted = {}, module(kwargs["ids"])
    for stage, elsewhere in enumerate((("blocks.1", "blocks.2", "norm"), ("words", "blocks.2", "norm"), ("blocks.0", "blocks.1"))):
        own = Skipping(deepcopy(module))
        own.trace(lambda net: net(kwargs["ids"]))
        for path in elsewhere:
            own.units[path].to("meta")
        if stage:
            own.module.shifts.to("meta")
        carry = own.run(lambda net: net(kwargs["ids"]), (0, 2, 3)[stage], (2, 3, 5)[stage], carry)
    assert torch.equal(carry, wanted)
    chain = Skipping(module)
    chain.trace(lambda own: own(kwargs["ids"]))
    table = WeightTable(chain)
    glue = [{name for name in own if name[0] == ":"} for own in table.ops]
    assert chain.calls == ("words", "blocks.0", "blocks.1", "blocks.2", "norm")
    assert glue == [{":shifts.first", ":shifts.gate", ":places.weight", ":bias.weight"}, {":scales.0"}, {":scales.1"}, {":scales.2"},
                    {":words.weight", ":bias.bias"}]  # fmt: skip
    assert table.config(4)["shared"] == {":words.weight": "words.weight"}
    assert table.config(0)["frozen"] == [":places.weight", ":bias.weight"]
    assert [table.config(index).get("buffers") for index in range(5)] == [{":bias.kept": [1]}, None, None, None, {":last": [VOCAB]}]


def test_what_is_made_of_weights_alone_crosses_a_cut() -> None:
    """A penalty on all weights is made before the first unit, and of those that the second stage lacks."""
    module, kwargs = PlainGpt(), example("long-skips")
    module.head.weight = nn.Parameter(module.head.weight.detach() * 2)

    def call(net: nn.Module) -> torch.Tensor:
        penalty = sum(p.square().sum() for p in net.parameters()) + net.words.weight.detach().abs().sum()
        return F.cross_entropy(net(kwargs["ids"]).flatten(0, 1), kwargs["labels"].flatten()) + 0.01 * penalty

    stages, carry = [Skipping(deepcopy(module)) for _ in range(2)], {}
    for place, stage in enumerate(stages):
        stage.trace(call)
        if place:
            for path in ("words", "places", "blocks.0"):
                stage.units[path].to("meta")
        carry = stage.run(call, (0, 3)[place], (3, len(stage.calls))[place], carry)
    torch.testing.assert_close(carry, call(module))


def test_masks_and_angles_do_not_travel() -> None:
    """Between two layers of Llama crosses the hidden state alone."""
    kwargs = example("llama", 2, 9)
    chain = Skipping(make("llama"))
    chain.trace(lambda module: module(**kwargs))
    assert [cut.shapes for cut in chain.cuts] == [((2, 9, 32),)] * len(chain.cuts)


def reads(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.mean() > 0:
        return x
    return x + y


def test_a_value_that_is_read_between_units_is_named() -> None:
    chain = Skipping(Net(reads))
    with pytest.raises(NeedsValues) as caught:
        chain.trace(net_call)
    assert "test_tracing.py:" in str(caught.value) and "'y.mean() > 0' reads an activation after 'blocks.0'" in str(caught.value)
    assert "Move it into a block, or allow one stage." in str(caught.value)
