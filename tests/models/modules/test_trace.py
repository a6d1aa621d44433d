"""A traced module's description against direct counts on the module itself, at shapes that the tracer never saw."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.kept import kept_bytes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from penstock.clusters import resolve_cluster
from penstock.costs.roofline import Roofline
from penstock.errors import InputError
from penstock.files import write_json
from penstock.models.catalog import resolve_model
from penstock.models.description import model_to_description
from penstock.models.modules.cutting.absent import Absent
from penstock.models.modules.trace import trace_module
from penstock.models.ops import Model
from penstock.models.shapes import Shape
from tests.module_zoo import LongSkips

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *rest, **more: sdpa_backward_flop_count(g, q, k, v),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # An ordinary net is linear.
        yield
    torch.set_num_threads(threads)


def counted(module: nn.Module, *args: torch.Tensor) -> tuple[float, float, int]:
    """Flops forward, flops backward, and bytes saved besides weights and arguments, of a real run."""
    outside = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers(), *args)}
    saved: dict[int, torch.Tensor] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in outside:
            saved[x.untyped_storage().data_ptr()] = x
        return x

    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as forward, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        out = module(*args)
    out = out[0] if isinstance(out, tuple) else out
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as backward:
        out.backward(torch.zeros_like(out))
    return forward.get_total_flops(), backward.get_total_flops(), sum(x.untyped_storage().nbytes() for x in saved.values())


def assert_matches(model: Model, module: nn.Module, shape: Shape, *args: torch.Tensor) -> None:
    forward, backward, kept = counted(module, *args)
    assert model.num_parameters == sum(p.numel() for p in module.parameters())
    assert sum(placed.op.flops.at(shape) for placed in model.ops) == forward
    assert sum(placed.op.backward_flops.at(shape) for placed in model.ops) == backward
    assert kept_bytes(model, 0, model.num_ops, shape) == kept
    for placed in model.ops:
        assert placed.op.kind == "traced" and placed.op.traffic.at(shape) >= 0


class Transformer(nn.Module):
    """Two embeddings, equal blocks, a tied head."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, ffn: int = 0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(4096, width)
        make = nn.TransformerEncoderLayer
        self.layers = nn.ModuleList(make(width, heads, ffn or 4 * width, 0.0, batch_first=True, norm_first=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def test_mlp() -> None:
    module = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 5))
    model = trace_module(module, torch.zeros(8, 20), "mlp")
    assert [placed.name for placed in model.ops] == ["0", "2", "4"]
    assert model.seq_length == 0
    assert [spec.dims for placed in model.ops for spec in placed.op.carry] == [("samples", 30)] * 2 + [("samples", 5)]
    assert model.ops[1].op.flops.whole.terms() == {"samples": 2 * 30 * 30}
    assert model.ops[1].op.splits[0].saves_out == ("hidden",)  # of the function after it, which has no weights
    assert_matches(model, module, Shape.images(11), torch.randn(11, 20))


def test_cnn_with_nested_parts() -> None:
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    model = trace_module(module, torch.zeros(2, 3, 16, 16), "cnn")
    assert [placed.name for placed in model.ops] == ["0.0", "0.1", "1.0", "3"]
    assert_matches(model, module, Shape.images(5), torch.randn(5, 3, 16, 16))


@pytest.mark.parametrize("layers", [3, 9])
def test_a_list_of_blocks(layers: int) -> None:
    """Nine equal blocks are traced as four; either way each is stored once."""
    module = Transformer(layers, 32, 4, 100)
    before = dict(module.layers._modules)
    model = trace_module(module, torch.zeros(4, 64, dtype=torch.long), "mine")
    assert module.layers._modules == before and not any(block._forward_pre_hooks for block in module.layers)
    assert [(block.name, copies) for block, copies in model.runs] == [
        ("words", 1), ("places", 1), ("layers", layers), ("norm", 1), ("head", 1)]  # fmt: skip
    assert model.ops[-1].op.tied_to == "words"
    layer = model.ops[2].op
    assert layer.flops.whole.terms() == {"tokens": 2 * 12 * 32**2, "squares": 4 * 32}
    # Fused attention's backward pass makes its scores again, which no model needs: as of our own ops.
    assert layer.backward_flops.whole.terms() == {"tokens": 2 * 2 * 12 * 32**2, "squares": 2.5 * 4 * 32}
    assert layer.needed_flops.whole.terms() == {"tokens": 3 * 2 * 12 * 32**2, "squares": 3 * 4 * 32}
    assert layer.parameters.whole.terms() == {"one": 12 * 32**2 + 13 * 32}
    assert [(spec.name, spec.dims) for spec in layer.carry] == [("hidden", ("tokens", 32))]
    assert model.seq_length == 64
    forward, backward, kept = counted(module, torch.zeros(5, 40, dtype=torch.long))
    shape = Shape.padded(5, 40)
    assert sum(placed.op.flops.at(shape) for placed in model.ops) == forward
    assert sum(placed.op.backward_flops.at(shape) for placed in model.ops) == backward
    assert model.num_parameters == sum(p.numel() for p in module.parameters())
    # The positions 0..39 are no feature of a micro-batch; the description takes them for one per token.
    assert kept <= kept_bytes(model, 0, model.num_ops, shape) <= kept + 8 * shape.tokens
    assert len(Roofline().table(model, [shape], [1], resolve_cluster("1xh100")).chain) == layers + 4  # of any number of blocks
    assert max(copies for _, copies in model.shortened(2).runs) == 2 and len(model.shortened(2).ops) == 6


def test_a_causal_mask_halves_attention() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    model = trace_module(Causal(), torch.zeros(2, 64, 32), dtype="bf16")
    assert sum((placed.op.flops.whole for placed in model.ops), start=model.ops[0].op.flops.whole * 0).terms() == {
        "tokens": 2 * 32 * 128, "squares": 2 * 32}  # fmt: skip
    assert model.ops[0].op.carry[0].dtype == "compute"


class Hourglass(nn.Module):
    """Results of the way down are used again on the way up."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = []
        for layer in self.down:
            x = layer(x).relu()
            seen.append(x)
        for layer in self.up:
            x = layer(x + seen.pop())
        return x, seen[0] if seen else x


def test_skips_travel_in_the_carry() -> None:
    module = Hourglass()
    model = trace_module(module, torch.zeros(4, 16), "hourglass")
    assert model.num_ops == 12
    # The sum that enters `up.0` is made at the end of `down.5`; from then on a result is taken up with each op.
    assert [len(placed.op.carry) for placed in model.ops] == [1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1, 1]
    assert_matches(model, module, Shape.images(7), torch.randn(7, 16))


def test_a_shared_block_is_tied_to_its_first_use() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.block(self.block(self.block(x)).tanh()))

    module = Loop()
    model = trace_module(module, torch.zeros(2, 8))
    assert [placed.name for placed in model.ops] == ["block", "block#2", "block#3", "head"]
    assert [placed.op.tied_to for placed in model.ops] == ["", "block", "block", ""]
    assert_matches(model, module, Shape.images(3), torch.randn(3, 8))


def test_a_file_resolves(tmp_path: Path) -> None:
    model = trace_module(Transformer(5, 32, 4, 100), lambda samples, length: torch.zeros(samples, length, dtype=torch.long), "mine", "bf16")
    path = tmp_path / "mine.json"
    write_json(path, model_to_description(model))
    assert resolve_model(str(path)) == model


def test_seven_billion_weights_are_never_there() -> None:
    """A layer is looked at a few times, however many there are, and always as a shape: on the meta device nothing is computed."""
    with torch.device("meta"):
        module = Transformer(32, 4096, 32, 32000, 16384)
    calls: list[torch.Tensor] = []
    layers = next(child for child in module.modules() if isinstance(child, nn.ModuleList))
    for layer in layers:
        layer.register_forward_pre_hook(lambda layer, given: calls.append(given[0]))
    model = trace_module(module, lambda samples, length: (torch.zeros(samples, length, dtype=torch.long),), "big", "bf16", length=2048)
    assert 0 < len(calls) <= 32 and all(isinstance(x, FakeTensor | Absent) or x.is_meta for x in calls)
    assert model.num_parameters == sum(p.numel() for p in module.parameters()) > 6.5e9
    assert [copies for _, copies in model.runs] == [1, 1, 32, 1, 1]


def test_a_block_that_stands_in_a_list_again_keeps_its_weights() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    module = nn.ModuleDict({"blocks": nn.ModuleList([block] * 3)})
    module.forward = lambda x: module["blocks"][2](module["blocks"][1](module["blocks"][0](x)))
    before = module.state_dict()
    trace_module(module, torch.zeros(2, 4), "again")
    assert all(torch.equal(x, before[name]) and not isinstance(x, FakeTensor) for name, x in module.state_dict().items())


class Chosen(nn.Linear):
    """Works on the rows that it chooses."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.where(x[:, 0] > 0)[0]
        return x.index_add(0, rows, super().forward(x[rows]))


def test_what_depends_on_values_is_refused() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x) if x.sum() > 0 else x

    with pytest.raises(InputError, match=r"trace of 'picky' at 2 samples .*: 'x.sum\(\) > 0' reads an activation after 'first'.*Move it"):
        trace_module(Picky(), torch.zeros(2, 4), "picky")
    with pytest.raises(InputError, match="'0'"):
        trace_module(nn.Sequential(nn.Linear(4, 4)), torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"in or after '0' shapes depend on values of tensors .*Let every expert see all tokens"):
        trace_module(nn.Sequential(Chosen(), nn.Linear(4, 4)), torch.zeros(2, 4), "choosy")
    with pytest.raises(InputError, match="dtype is 'fp8'"):
        trace_module(nn.Linear(2, 2), torch.zeros(2, 2), dtype="fp8")


def test_what_is_not_linear_is_told() -> None:
    class Cubic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            square = x @ x.transpose(1, 2)
            return square @ square @ square

    with pytest.warns(UserWarning, match="flops of 'linear' is not linear in the shape"):
        model = trace_module(Cubic(), torch.zeros(2, 64, 8))
    assert all(value >= 0 for value in model.ops[0].op.flops.whole.coefficients)


def test_one_module_alone() -> None:
    module: Any = nn.Linear(6, 3)
    model = trace_module(module, torch.zeros(2, 6))
    assert [placed.name for placed in model.ops] == ["module"]
    assert_matches(model, module, Shape.images(4), torch.randn(4, 6))


def test_ops_say_which_weights_they_have() -> None:
    model = trace_module(LongSkips(), torch.zeros(2, 16, dtype=torch.long))
    by_name = {placed.name: placed.op.config for placed in model.ops}
    assert list(by_name)[:3] == ["embed", "attention.0", "mlps.0"] and list(by_name)[-2:] == ["norm", "head"]
    assert by_name["embed"]["weights"] == {"weight": [97, 32], ":places": [128, 32]}
    assert by_name["embed"]["shared"] == by_name["head"]["shared"] == {"weight": "embed.weight"}
    assert by_name["mlps.2"]["weights"][":gate"] == [] and ":gate" not in by_name["mlps.1"]["weights"]
    assert [spec.dims for spec in model.carry_before(3)] == [("tokens", 32)] * 2, "the hidden state and the long skip, no mask"


def test_a_forward_pass_that_writes_to_its_weights_is_refused() -> None:
    """Processes that see other samples would keep other weights; buffers, such as running statistics, are what such passes may write to."""
    wild = nn.Sequential(nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 16))
    with pytest.raises(InputError, match=r"trace of 'wild' at 2 .*: the forward pass changes 0.weight, as .* with max_norm"):
        trace_module(wild, lambda samples, length: (torch.zeros(samples, length, dtype=torch.long),), "wild")
    trace_module(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.zeros(4, 8), "calm")


def test_a_tensor_that_leaves_a_unit_by_a_side_door_is_refused() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.scores = nn.Linear(8, 8), torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scores = self.router(x)
            return x + self.scores.softmax(-1)

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x + self.blocks[1].scores.sum()

    with pytest.raises(InputError, match=r"'blocks.1' hands a tensor out by a side door \(a hook or attribute\)"):
        trace_module(Mixture(), torch.zeros(2, 8))
