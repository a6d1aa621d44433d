"""A rank's pieces are, element for element, what its op cut from the whole weight, in any degree, split and flat shard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from chain_pieces import chain_layouts, chain_pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import small_model

from penstock.models.modules import Chain, TensorParallel, build_chain
from penstock.models.ops import Model
from penstock.models.resnet import ResNetConfig, resnet
from penstock.models.vgg import VggConfig, vgg
from penstock.runtime.checkpoints.layout import CheckpointLayout, FlatRun, TensorPiece, optimizer_kinds, own_share, stored_shapes
from penstock.runtime.checkpoints.manifest import cover_problem

MODELS = {
    "gpt": small_model("gpt"),
    "gpt-untied": small_model("gpt", tied=False),
    "llama": small_model("llama", qkv_bias=True, qk_norm=True),
    "bert": small_model("bert"),
    "t5": small_model("t5", gated=True, activation="gelu_tanh"),
    "resnet": resnet(ResNetConfig((2, 1), 8, num_classes=12, image_size=32)),
    "vgg": vgg(VggConfig((1, 2), (8, 16), classifier_width=24, num_classes=12, image_size=16)),
}


def algos_of(model: Model, algo: int) -> list[int]:
    return [min(algo, len(placed.op.splits) - 1) for placed in model.ops]


def put(pieces: Iterable[TensorPiece], into: dict[str, torch.Tensor]) -> None:
    """Writes pieces into global tensors."""
    for piece in pieces:
        whole = into.setdefault(piece.name, torch.full(piece.shape, math.nan))
        whole[tuple(slice(a, b) for a, b in piece.box)] = piece.tensor


def whole_of(chain: Chain) -> dict[str, torch.Tensor]:
    return {f"{layout.kind}/{layout.name}": tensor.detach() for layout, tensor in chain_layouts(chain)}


@pytest.mark.parametrize("algo", [0, 1])
@pytest.mark.parametrize(("family", "tp"), [(family, tp) for family, model in MODELS.items() for tp in (1, 2, 4) if tp <= model.max_tp()])
def test_the_ranks_together_hold_the_whole(family: str, tp: int, algo: int) -> None:
    model = MODELS[family]
    parts = [build_chain(model, tp=TensorParallel(rank, tp), algos=algos_of(model, algo)) for rank in range(tp)]
    wanted, got = whole_of(build_chain(model)), {}
    for part in parts:
        put(chain_pieces(part), got)
    assert got.keys() == wanted.keys() == stored_shapes(model).keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert {name: tuple(tensor.shape) for name, tensor in got.items()} == stored_shapes(model)


@settings(max_examples=60)
@given(st.data())
def test_flat_shards_of_divided_weights(data: st.DataObject) -> None:
    """Cut at any elements, as ZeRO does: the shards of all ranks put together are the whole."""
    model = MODELS[data.draw(st.sampled_from(["gpt", "llama", "bert", "t5"]))]
    tp, algo = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([0, 1]))
    wanted, got = whole_of(build_chain(model, 0, 5)), {}
    boxes: dict[str, list[Any]] = {}
    for rank in range(tp):
        for layout, tensor in chain_layouts(build_chain(model, 0, 5, tp=TensorParallel(rank, tp), algos=algos_of(model, algo)[:5])):
            flat = tensor.detach().reshape(-1)
            cuts = sorted(data.draw(st.lists(st.integers(0, flat.numel()), max_size=3)))
            for start, stop in zip([0, *cuts], [*cuts, flat.numel()], strict=True):
                shards = list(layout.flat_pieces(flat[start:stop], start))
                put(shards, got)
                if layout.local_shape != layout.shape or rank == 0:  # what tp repeats comes from the first rank alone
                    boxes.setdefault(shards[0].name if shards else "", []).extend(piece.box for piece in shards)
                assert sum(piece.tensor.numel() for piece in shards) == stop - start
                assert all(piece.tensor.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for piece in shards)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert [cover_problem(wanted[name].shape, found) for name, found in boxes.items() if name] == [""] * len(wanted)


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_a_flat_range_is_a_few_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    layout = CheckpointLayout("op.weight", tuple(shape), tuple((FlatRun(0, 0, size),) for size in shape))
    numbers = torch.arange(numel).reshape(shape)
    found = list(layout.flat_pieces(numbers.reshape(-1)[start:stop], start))
    assert len(found) <= max(1, 2 * len(shape))
    assert [number for piece in found for number in piece.tensor.reshape(-1).tolist()] == list(range(start, stop))
    for piece in found:
        assert torch.equal(numbers[tuple(slice(a, b) for a, b in piece.box)], piece.tensor)


def test_fused_weights_are_cut_part_by_part() -> None:
    chain = build_chain(MODELS["llama"], 2, 3, tp=TensorParallel(1, 2))
    (weight, bias) = (layout for layout, _ in chain_layouts(chain))
    assert weight.name == "layers.0.qkv.weight" and weight.shape == (64, 32) and weight.local_shape == (32, 32)
    assert weight.runs == ((FlatRun(0, 16, 16), FlatRun(16, 40, 8), FlatRun(24, 56, 8)), (FlatRun(0, 0, 32),))
    assert bias.runs == weight.runs[:1]


def test_a_shared_weight_has_its_owners_name_and_is_saved_by_it() -> None:
    model = MODELS["gpt"]
    whole, tail = build_chain(model), build_chain(model, 3)
    names = [piece.name for piece in chain_pieces(whole, owned=True)]
    assert names.count("weights/embedding.weight") == 1
    assert "weights/embedding.weight" not in [piece.name for piece in chain_pieces(tail, owned=True)]
    assert "weights/embedding.weight" in [piece.name for piece in chain_pieces(tail)]


def test_running_statistics_travel_with_the_weights() -> None:
    found = {piece.name for piece in chain_pieces(build_chain(MODELS["resnet"]), owned=True)}
    assert sum(name.startswith("buffers/") and name.endswith("running_var") for name in found) > 3


def test_what_is_frozen_has_no_moments() -> None:
    model = small_model("gpt")
    block, copies = model.runs[0]
    frozen = dataclasses.replace(block, ops=tuple(dataclasses.replace(op, trainable=False) for op in block.ops))
    shapes = stored_shapes(dataclasses.replace(model, runs=((frozen, copies), *model.runs[1:])), ("weights", "exp_avg"))
    assert "weights/embedding.weight" in shapes and "exp_avg/embedding.weight" not in shapes
    assert "exp_avg/layers.0.qkv.weight" in shapes


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_holders_share_the_work(sizes: list[int], count: int) -> None:
    shares = [own_share(sizes, index, count) for index in range(count)]
    assert sorted(number for share in shares for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


@pytest.mark.parametrize("shapes", [((3,), ()), ((), (3,))])
def test_a_moment_of_one_number_is_no_count_of_steps(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Whichever weight comes last."""
    kinds = [(kind, shape) for shape in shapes for kind in ("weights", "exp_avg")] + [("buffers", ()), ("step", ()), ("step", ())]
    assert optimizer_kinds((f"{kind}/0.{number}", shape) for number, (kind, shape) in enumerate(kinds)) == {"exp_avg": False, "step": True}


def test_wrong_shapes_are_refused() -> None:
    layout, weight = next(chain_layouts(build_chain(MODELS["gpt"], 2, 3)))
    with pytest.raises(ValueError, match=r"shape \(3,\), \(96, 32\) was expected"):
        list(layout.pieces(torch.zeros(3)))
    with pytest.raises(ValueError, match="elements 3000 to 6072"):
        list(layout.flat_pieces(weight.detach().reshape(-1), 3000))
    with pytest.raises(ValueError, match="cannot be box"):
        TensorPiece("w", (4,), ((0, 3),), torch.zeros(4))
