"""Every cut of many models, two stages in one process: loss and gradients against the module as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from penstock.errors import InputError
from penstock.models.modules.cutting.absent import Absent, NeedsValues
from penstock.models.modules.cutting.buffers import ChangingBuffers, Met
from penstock.models.modules.cutting.shapes import UnitShapes
from penstock.models.modules.cutting.skipping import Call, Skipping
from penstock.models.modules.cutting.weights import WeightTable
from tests.module_zoo import NAMES, VOCAB, PlainGpt, example, make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.loss


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def plain(module: nn.Module, call: Call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(call(module))
    loss.backward()
    return loss.detach(), gradients(module)


def in_two(chain: Skipping, call: Call, cut: int, recompute: Any = ()) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The second stage on leaves, then the first from their gradients."""
    sent = chain.run(call, 0, cut, {}, recompute)
    leaves = {site: x.detach().requires_grad_(x.requires_grad) for site, x in sent.items()}
    loss = loss_of(chain.run(call, cut, len(chain.calls), leaves, recompute))
    loss.backward()
    back = [(sent[site], leaf.grad) for site, leaf in leaves.items() if leaf.grad is not None]
    torch.autograd.backward([x for x, _ in back], [grad for _, grad in back])
    return loss.detach(), gradients(chain.module)


def assert_every_cut(module: nn.Module, call: Call, recompute: Any = ()) -> None:
    loss, wanted = plain(module, call)
    chain = Skipping(module)
    chain.trace(call)
    assert len(chain.calls) > 2 and all(cut.sites for cut in chain.cuts)
    for cut in range(1, len(chain.calls)):
        got, found = in_two(chain, call, cut, recompute)
        assert torch.equal(got, loss), f"cut before {chain.calls[cut]}"
        for name, gradient in wanted.items():
            scale = max(gradient.abs().max().item(), 1e-6)
            assert (found[name] - gradient).abs().max().item() <= 1e-6 * scale, f"{name}, cut before {chain.calls[cut]}"
    chain.close()
    assert torch.equal(plain(module, call)[0], loss)


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_equals_the_module(name: str) -> None:
    kwargs = example(name)
    assert_every_cut(make(name), lambda module: module(**kwargs))


def test_a_block_that_stands_in_a_list_again_is_one() -> None:
    """As in universal transformers: the same weights at every depth."""
    module, kwargs = PlainGpt(layers=1), example("long-skips")
    module.blocks = nn.ModuleList([module.blocks[0]] * 3)
    assert_every_cut(module, lambda own: F.cross_entropy(own(kwargs["ids"]).flatten(0, 1), kwargs["labels"].flatten()))


class Bare(PlainGpt):
    """Weights that no part's forward pass uses: scales in lists and dicts, a head and an embedding of which the weight alone is used."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.rand(32) for _ in self.blocks)
        self.shifts = nn.ParameterDict({"first": torch.rand(32), "gate": torch.rand(32)})
        self.bias = nn.Linear(1, VOCAB)
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
    assert [table.config(index).get("buffers") for index in range(5)] == [None, None, None, None, {":last": [VOCAB]}]


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


class Stateful(nn.Module):
    """Blocks that change their buffers in training, in place and by others in their stead; what a block returns depends on some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_StatefulBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _StatefulBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x + self.count * torch.tanh(self.norm(self.product(x))) * self.mask


def test_recomputed_units_change_their_buffers_once() -> None:
    """As many micro-batches under way as in a pipeline: those behind have moved the buffers before the first is run again."""
    plain = Stateful()
    module = deepcopy(plain)
    chain = Skipping(module)
    rows = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    chain.trace(lambda module: module(rows[0]))
    for pair in rows.split(2):
        losses = [plain(x) for x in pair]
        again = [chain.run(lambda module, x=x: module(x), 0, 3, {}, recompute=range(3)) for x in pair]  # type: ignore[misc]
        for loss, other in zip(losses, again, strict=True):
            loss.backward()
            other.backward()
            assert torch.equal(loss, other)
    for (name, mine), its in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad), name
    for (name, mine), its in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, its), name


def test_constants_are_not_kept_for_each_micro_batch() -> None:
    block = _StatefulBlock()
    block.product, mask = nn.Sequential(), nn.Module()
    mask.register_buffer("values", torch.ones(8, 8))
    block.add_module("masks", mask)
    buffers, first, second = ChangingBuffers(block), Met(), Met()
    for met in (first, second):
        with buffers.run(met):
            block(torch.randn(4, 8))
    assert [store is one for (store, _), one in zip(second, (block._buffers, block.norm._buffers), strict=True)] == [True, True]
    assert len(first) == 2


def test_masks_and_angles_do_not_travel() -> None:
    """Between two layers of Llama crosses the hidden state alone."""
    kwargs = example("llama", 2, 9)
    chain = Skipping(make("llama"))
    chain.trace(lambda module: module(**kwargs))
    assert [cut.shapes for cut in chain.cuts] == [((2, 9, 32),)] * len(chain.cuts)


def test_a_micro_batch_of_another_shape_needs_no_trace() -> None:
    module = make("gemma3")
    chain = Skipping(module)
    chain.trace(lambda module: module(**example("gemma3")))
    for samples, length in ((3, 5), (3, 7), (3, 23), (3, 8), (1, 5), (4, 7), (2, 23), (5, 2)):  # a size that stays the same is no constant
        kwargs = example("gemma3", samples, length)
        loss, _ = plain(module, lambda module: module(**kwargs))  # noqa: B023
        assert torch.equal(in_two(chain, lambda module: module(**kwargs), 3)[0], loss)  # noqa: B023


def test_a_size_that_stays_the_same_is_no_constant() -> None:
    """As a decoder's length beside sources of many."""
    unit, cpu = nn.Linear(4, 4), torch.device("cpu")
    unit.forward = lambda x, source: x * source.mean()  # type: ignore[method-assign]
    shapes = UnitShapes()
    for length, source in ((5, 2), (5, 3), (5, 4), (6, 2), (7, 9)):
        assert shapes.outputs(unit, unit.forward, (torch.ones(length), torch.ones(source)), {}, cpu).shape == (length,)


class Alike(nn.Module):
    """Blocks that look the same from outside, and differ by an attribute; with `counts`, each is given what the one before has counted."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.blocks = counts, nn.ModuleList(_Scaled(index) for index in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths, scales, count = [], [], 0
        for index, block in enumerate(self.blocks):
            x, length, scale, found = block(x, count)
            count = found if self.counts else 0
            assert found == (index if self.counts else 0) + 1
            lengths.append(length)
            scales.append(scale)
        for length, scale in zip(lengths, scales, strict=True):
            x = x[:, : length // 2 + 1] * scale if length > 12 else x * scale
        return x.square().sum()


class _Scaled(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.product, self.index = nn.Linear(4, 4), index

    def forward(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, int, float, int]:
        y = torch.tanh(self.product(x))
        return (torch.cat([y, y], 1) if self.index == 2 else y), x.shape[1], 1.0 + self.index, count + 1


@pytest.mark.parametrize("counts", [False, True])
def test_units_that_only_look_the_same_are_told_apart(counts: bool) -> None:
    """Lengths that grow, numbers that each block gives of its own, and a count that is handed on: of every length."""
    torch.manual_seed(0)
    module = Alike(counts)
    chain = Skipping(module)
    chain.trace(lambda own: own(torch.zeros(2, 8, 4)))
    for length in (8, 5, 7, 9, 6, 8):
        x = torch.randn(2, length, 4)
        loss, wanted = plain(module, lambda own, x=x: own(x))  # type: ignore[misc]
        for cut in range(1, 5):
            got, found = in_two(chain, lambda own, x=x: own(x), cut)  # type: ignore[misc]
            assert torch.equal(got, loss), (length, cut)
            assert all(torch.allclose(found[name], gradient) for name, gradient in wanted.items()), (length, cut)


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


class Net(nn.Module):
    """Blocks with something between them."""

    def __init__(self, between: Callable[[Net, int, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 11)
        self.between = between

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = self.between(self, index, x, block(x))
        return self.head(x).logsumexp(-1).sum()


def net_call(module: nn.Module) -> torch.Tensor:
    return module(torch.arange(10).view(2, 5))  # type: ignore[no-any-return]


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


def reads(net: Net, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.mean() > 0:
        return x
    return x + y


def test_a_value_that_is_read_between_units_is_named() -> None:
    chain = Skipping(Net(reads))
    with pytest.raises(NeedsValues) as caught:
        chain.trace(net_call)
    assert "test_skipping.py:" in str(caught.value) and "'y.mean() > 0' reads an activation after 'blocks.0'" in str(caught.value)
    assert "Move it into a block, or allow one stage." in str(caught.value)


def test_another_order_of_calls_is_named() -> None:
    module = Net(lambda net, index, x, y: x + y)
    chain = Skipping(module)
    chain.trace(net_call)
    module.blocks = nn.ModuleList(reversed(module.blocks))
    with pytest.raises(InputError, match=r"'blocks.2' was called where 'blocks.0' was: every micro-batch must call the same parts"):
        chain.run(net_call, 0, len(chain.calls), {})


def test_an_absent_tensor_has_no_values() -> None:
    x = Absent(torch.empty(2, 3, device="meta"), torch.device("cpu"))
    assert isinstance(x @ x.T, Absent) and (x @ x.T).shape == (2, 2) and x.device.type == "cpu"
    assert "Absent((2, 3), torch.float32)" in repr(x)
    with pytest.raises(NeedsValues):
        x.sum().item()


def test_what_is_remembered_of_absent_tensors_is_what_was_asked() -> None:
    """Equal arguments of other types, strides or dtypes are other questions; what changes a tensor gives that very one."""
    x = Absent(torch.empty(2, 3, dtype=torch.long, device="meta"), torch.device("cpu"))
    for _ in range(2):
        assert [(x + n).dtype for n in (1, 1.0, True)] == [torch.long, torch.float32, torch.long]
        assert (x.T.contiguous().stride(), x.contiguous().stride()) == ((2, 1), (3, 1))
        assert x.add_(1) is x and (x + torch.zeros(3)).dtype == torch.float32 and x.float().device.type == "cpu"
        with pytest.raises(NeedsValues):
            torch.zeros(2, 3).add_(x)
