"""DynPipe's blocks in our chains: the published counts, which lines are one op here, every model of the catalogue."""

from __future__ import annotations

import pytest

from penstock.models.catalog import model_from_mapping, model_names, resolve_model
from penstock.systems.dynpipe.blocks import block_ends, num_module_ops, pieces


@pytest.mark.parametrize(
    ("name", "blocks", "calculations"), [("vgg16", 38, 40), ("vgg16-cifar10", 38, 40), ("resnet-50", 176, 176), ("bert-large", 49, 245)]
)
def test_the_published_counts(name: str, blocks: int, calculations: int) -> None:
    model = resolve_model(name)
    assert max(block_ends(model)) == blocks and sum(piece.num_calculations for piece in pieces(model)) == calculations


def test_the_largest_published_bert() -> None:
    assert max(block_ends(model_from_mapping({"base": "bert-large", "layers": 48}, "test", "bert"))) == 97


@pytest.mark.parametrize("name", model_names())
def test_pieces_are_the_whole_chain_but_the_loss(name: str) -> None:
    model = resolve_model(name)
    found, ends = pieces(model), block_ends(model)
    assert [piece.first for piece in found] == [0, *(piece.last for piece in found[:-1])] and found[-1].last == num_module_ops(model)
    assert all(piece.first < piece.last and piece.num_calculations > 0 and piece.num_blocks >= 0 for piece in found)
    assert ends[0] == 0 and ends[max(ends)] == model.num_ops == num_module_ops(model) + 1
    assert sorted(ends.values()) == list(ends.values()) and len(set(ends.values())) == len(ends)


def starts(name: str) -> dict[int, str]:
    """The op that follows so many of DynPipe's blocks."""
    model = resolve_model(name)
    return {blocks: model.ops[op].name for blocks, op in block_ends(model).items() if op < model.num_ops}


def test_vgg16_line_by_line() -> None:
    """31 convolutions, ReLUs and poolings, then three linear layers, of which the first two have a ReLU and dropout of their own."""
    found = starts("vgg16")
    assert sorted(found) == [*range(32), 34, 37]
    assert (found[0], found[4], found[8], found[15]) == ("stage0.conv1", "stage0.maxpool", "stage1.relu2", "stage2.relu3")
    assert (found[30], found[31], found[34], found[37]) == ("stage4.maxpool", "head.avgpool", "head.fc2", "head.fc3")


def test_resnet_50_where_the_lines_are_in_the_same_order() -> None:
    """Stem 4; the stages' first blocks 12 lines each, the others 10; average, two reshapes and the linear layer 4."""
    found = starts("resnet-50")
    assert (found[4], found[5], found[7], found[8]) == (
        "stage0.entry.conv1", "stage0.entry.bn1", "stage0.entry.conv2", "stage0.entry.bn2")  # fmt: skip
    assert not {6, 9, 10, 11, 12, 13, 14} & set(found) and found[15] == "stage0.entry.relu" and found[16] == "stage0.block.0.conv1"
    assert found[36] == "stage1.entry.conv1" and found[47] == "stage1.entry.relu" and not set(range(37, 47)) & set(found)
    assert found[66] == "stage1.block.1.downsample" and found[71] == "stage1.block.2.conv2" and 115 not in found
    assert found[144] == "stage3.entry.bn2" and found[172] == "head.avgpool" and found[175] == "head.fc" and not {173, 174} & set(found)


def test_bert_blocks_end_with_additions() -> None:
    found = starts("bert-large")
    assert sorted(found) == list(range(49))
    assert [found[block] for block in (0, 1, 2, 3, 48)] == [
        "embedding", "layers.0.norm1", "layers.0.norm2", "layers.1.norm1", "layers.23.norm2"]  # fmt: skip


def test_other_models_count_their_own_blocks() -> None:
    found = starts("gpt-tiny")
    assert found == {0: "embedding", **{layer + 1: f"layers.{layer}.norm1" for layer in range(4)}, 5: "head.norm"}
    assert all(piece.num_calculations == 1 and piece.last == piece.first + 1 for piece in pieces(resolve_model("gpt-tiny")))
