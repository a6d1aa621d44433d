"""ResNets: known parameter counts, Aceso's op list and weights, shapes along the chain, what is kept."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InputError
from penstock.models.ops import Model
from penstock.models.resnet import RESNET_SIZES, ResNetConfig, resnet
from penstock.models.shapes import Shape

ONE = Shape.images(1)

# MB (2^20) of fp32 weights in Aceso's published tables, summed over the ops; they leave out the norms of projected residuals.
ACESO_WEIGHTS_MB = {"wide-resnet-500m": 1888.348, "wide-resnet-2b": 7495.716, "wide-resnet-6.8b": 25663.912}
# The same tables' rows of 500M for the blocks that open stages 0 and 3, and for the last op.
ACESO_500M_MB = {
    "stem.conv1": 0.126, "stem.bn1": 0.002,
    "stage0.entry.conv1": 0.191, "stage0.entry.conv2": 3.445, "stage0.entry.conv3": 1.531,
    "stage3.entry.conv1": 24.5, "stage3.entry.conv2": 220.5, "stage3.entry.conv3": 98.0, "stage3.entry.bn3": 0.055,
    "head.fc": 28.004,
}  # fmt: skip


def build(name: str) -> Model:
    return resnet(RESNET_SIZES[name], name)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("resnet-50", 25_557_032), ("resnet-101", 44_549_160), ("resnet-152", 60_192_808), ("wide-resnet-50-2", 68_883_240)],
)
def test_parameters_are_torchvisions(name: str, parameters: int) -> None:
    assert build(name).num_parameters == parameters


@pytest.mark.parametrize("name", ACESO_WEIGHTS_MB)
def test_weights_are_acesos(name: str) -> None:
    model = build(name)
    projected = sum(p.op.parameters.whole(ONE) for p in model.ops if p.op.kind == "downsample")
    ours = (model.num_parameters - projected) * 4 / 2**20
    # The tables round each of 134 rows to 0.0005 MB.
    assert ours == pytest.approx(ACESO_WEIGHTS_MB[name], abs=134 * 0.0005)


def test_weights_of_single_ops_are_acesos() -> None:
    weights = {p.name: p.op.parameters.at(ONE) * 4 / 2**20 for p in build("wide-resnet-500m").ops}
    for name, expected in ACESO_500M_MB.items():
        assert weights[name] == pytest.approx(expected, abs=0.0006), name


@pytest.mark.parametrize(("name", "billions"), [("250m", 0.25), ("500m", 0.5), ("1b", 1), ("2b", 2), ("4b", 4), ("6.8b", 6.8), ("13b", 13)])
def test_sizes_are_near_their_names(name: str, billions: float) -> None:
    assert build(f"wide-resnet-{name}").num_parameters == pytest.approx(billions * 1e9, rel=0.03)


@pytest.mark.parametrize("name", RESNET_SIZES)
def test_the_chain_is_acesos_op_list_and_a_loss(name: str) -> None:
    model = build(name)
    assert model.num_ops == 8 * sum(RESNET_SIZES[name].blocks) + 6 + 1
    names = [placed.name for placed in model.ops]
    assert len(set(names)) == len(names)
    assert [n.removeprefix("stage0.entry.") for n in names[4:12]] == ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample", "relu"]


def test_blocks_of_a_stage_are_one_run() -> None:
    model = build("resnet-50")
    assert [(block.name, copies) for block, copies in model.runs if block.name.startswith("stage2")] == [
        ("stage2.entry", 1), ("stage2.block", 5),
    ]  # fmt: skip
    assert len(model.distinct_ops) < model.num_ops / 2


def test_carry_holds_the_residual_inside_a_block_only() -> None:
    model = build("resnet-50")
    inside = {"conv1", "bn1", "conv2", "bn2", "conv3", "bn3"}
    for placed in model.ops:
        held = {spec.name for spec in placed.op.carry}
        assert ("residual" in held) == (placed.name.startswith("stage") and placed.op.name in inside), placed.name


def test_shapes_of_resnet_50() -> None:
    carry = {p.name: p.op.carry for p in build("resnet-50").ops}
    batch = Shape.images(8)
    assert carry["stem.conv1"][0].shape(batch) == (8, 64, 112, 112)
    assert carry["stem.maxpool"][0].shape(batch) == (8, 64, 56, 56)
    assert carry["stage1.entry.conv2"][0].shape(batch) == (8, 128, 28, 28)
    assert carry["stage1.entry.conv2"][1].shape(batch) == (8, 256, 56, 56)
    assert carry["stage3.block.1.relu"][0].shape(batch) == (8, 2048, 7, 7)
    assert carry["head.fc"][0].shape(batch) == (8, 1000)


def test_flops_of_resnet_50() -> None:
    model = build("resnet-50")
    assert sum(p.op.flops.at(ONE) for p in model.ops) == 2 * 4_089_184_256  # torchvision's 4.09 G multiply-adds
    first = model.ops[0].op
    assert first.backward_flops.at(ONE) == first.flops.at(ONE)


def test_boundary_bytes_are_acesos() -> None:
    model = build("wide-resnet-500m")
    index = {p.name: p.index for p in model.ops}
    # Aceso's table: output_size at 16 samples, 214.375 MB after conv3 of the first block, 343 MB in the next.
    assert model.boundary_bytes(index["stage0.entry.bn3"]).at(Shape.images(16)) / 2**20 == 214.375
    assert model.boundary_bytes(index["stage0.block.0.bn3"]).at(Shape.images(16)) / 2**20 == 343.0


def test_kept_bytes() -> None:
    ops = {p.name: p.op for p in build("resnet-50").ops}
    two = Shape.images(2)
    assert ops["stem.conv1"].splits[0].saves_in == ()  # the images belong to the micro-batch
    assert ops["stem.maxpool"].splits[0].kept.at(two) == 2 * 64 * 56 * 56 * 8
    assert ops["stage0.entry.bn1"].splits[0].kept.at(two) == 64 * 2 * 4
    assert ops["stage0.entry.downsample"].splits[0].kept.at(two) == 2 * 256 * 56 * 56 * 4 + 256 * 2 * 4
    assert ops["stage0.block.0.downsample"].splits[0].kept.at(two) == 0
    half = {p.name: p.op for p in resnet(ResNetConfig(dtype="bf16")).ops}
    assert half["stage0.entry.downsample"].splits[0].kept.at(two) == 2 * 256 * 56 * 56 * 2 + 256 * 3 * 4


def test_bytes_moved() -> None:
    ops = {p.name: p.op for p in build("resnet-50").ops}
    conv, size_in, size_out, weights = ops["stage1.entry.conv2"], 128 * 56 * 56 * 4, 128 * 28 * 28 * 4, 9 * 128 * 128 * 4
    assert conv.traffic.at(ONE) == size_in + size_out + weights
    assert conv.traffic.at(ONE, 2) == size_in + (size_out + weights) / 2  # each of two ranks reads the whole input
    assert conv.backward_traffic.at(ONE, 2) == 2 * conv.traffic.at(ONE, 2)
    assert conv.backward_workspace.at(ONE, 2) == weights / 2  # the gradient, before it is added
    maps = 64 * 112 * 112 * 4
    assert ops["stem.bn1"].traffic.at(ONE) == 3 * maps  # read for the statistics, read, written
    assert ops["stem.bn1"].backward_traffic.at(ONE) == 5 * maps  # input and gradient twice, written once
    inner = 64 * 56 * 56 * 4
    assert ops["stage0.entry.bn1"].traffic.at(ONE) == (3 + 2) * inner  # its ReLU reads and writes
    assert ops["stage0.entry.bn1"].backward_traffic.at(ONE) == (5 + 3) * inner  # its ReLU reads result and gradient, and writes
    assert ops["head.loss"].splits[0].kept.at(Shape.images(2)) == 2 * 1000 * 4 + 4  # log-probabilities, and the sum of class weights


def test_the_loss_is_in_fp32_whatever_the_model_is_in() -> None:
    loss = resnet(ResNetConfig(dtype="bf16")).ops[-1].op
    assert loss.splits[0].kept.at(ONE) == 1000 * 4 + 4
    assert loss.traffic.at(ONE) == 1000 * 2 + 1000 * 4  # logits read in bf16


def test_splits() -> None:
    model = build("resnet-50")
    ops = {p.name: p.op for p in model.ops}
    assert len(ops["stem.conv1"].splits) == 1
    assert [c.when for c in ops["stem.conv1"].splits[0].collectives] == ["forward"]
    outputs, inputs = ops["stage1.entry.conv2"].splits
    assert [(c.kind, c.when, c.size_bytes(ONE)) for c in outputs.collectives] == [
        ("all_gather", "forward", 128 * 28 * 28 * 4), ("all_reduce", "backward", 128 * 56 * 56 * 4),
    ]  # fmt: skip
    assert [(c.kind, c.when, c.size_bytes(ONE)) for c in inputs.collectives] == [
        ("all_reduce", "forward", 128 * 28 * 28 * 4), ("all_gather", "backward", 128 * 56 * 56 * 4),
    ]  # fmt: skip
    assert model.max_tp() == 8  # 1000 classes


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"blocks.*at least one block"):
        resnet(ResNetConfig(blocks=(3, 0)))
    with pytest.raises(InputError, match="num_classes"):
        resnet(ResNetConfig(num_classes=0))


@pytest.mark.parametrize(
    ("fields", "told"),
    [({"stem_stride": 0}, "'stem_stride' is 0; expected at least 1"), ({"stem_kernel": 0}, "'stem_kernel' is 0"),
     ({"num_classes": 0}, "'num_classes' is 0"), ({"blocks": (1,) * 1100}, "1100 stages")],
)  # fmt: skip
def test_sizes_that_make_no_net(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        resnet(ResNetConfig(**fields))
