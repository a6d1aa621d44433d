"""VGGs: known parameter counts, shapes along the chain for any image size, what is kept."""

from __future__ import annotations

import pytest

from penstock.errors import InputError
from penstock.models.convolution import fully_connected
from penstock.models.shapes import Shape
from penstock.models.vgg import VGG_SIZES, VggConfig, vgg

ONE = Shape.images(1)


@pytest.mark.parametrize(
    ("name", "parameters"), [("vgg11", 132_863_336), ("vgg16", 138_357_544), ("vgg19", 143_667_240), ("vgg16-cifar10", 134_301_514)]
)
def test_parameters_are_torchvisions(name: str, parameters: int) -> None:
    assert vgg(VGG_SIZES[name]).num_parameters == parameters


def test_flops_of_vgg16() -> None:
    assert sum(p.op.flops.at(ONE) for p in vgg(VggConfig()).ops) == 2 * 15_470_264_320  # torchvision's 15.47 G multiply-adds


def test_chain_of_vgg16() -> None:
    model = vgg(VggConfig())
    names = [placed.name for placed in model.ops]
    assert len(set(names)) == len(names) == 13 * 2 + 5 + 1 + 3 + 1
    assert model.layouts == ("padded",)
    assert names[:3] == ["stage0.conv1", "stage0.relu1", "stage0.conv2"]
    assert names[-5:] == ["head.avgpool", "head.fc1", "head.fc2", "head.fc3", "head.loss"]


@pytest.mark.parametrize("image_size", [32, 64, 100, 224, 256])
def test_any_image_size_has_the_same_weights(image_size: int) -> None:
    model = vgg(VggConfig(image_size=image_size))
    assert model.num_parameters == 138_357_544
    carry = {p.name: p.op.carry for p in model.ops}
    assert carry["stage4.maxpool"][0].shape(ONE) == (1, 512, image_size // 32, image_size // 32)
    assert carry["head.avgpool"][0].shape(ONE) == (1, 25088)


def test_kept_bytes() -> None:
    ops = {p.name: p.op for p in vgg(VggConfig()).ops}
    two = Shape.images(2)
    assert ops["stage0.maxpool"].splits[0].kept.at(two) == 2 * 64 * 112 * 112 * 8
    assert ops["head.avgpool"].splits[0].saves_in == ()  # 7×7 already: nothing happens
    assert ops["head.fc1"].splits[0].kept.at(two) == 2 * 8  # keys of the samples; the mask is made again
    small = {p.name: p.op for p in vgg(VGG_SIZES["vgg16-cifar10"]).ops}
    assert small["head.avgpool"].splits[0].saves_in == ("hidden",)


def test_bytes_moved_by_a_product() -> None:
    op = fully_connected("fc", 100, 40, "fp32", carry=(), relu=True)
    product, result = (100 + 40 + 100 * 40) * 4, 40 * 4
    assert op.traffic.at(ONE) == product + 2 * result  # the ReLU reads and writes
    assert op.backward_traffic.at(ONE) == 2 * product + 3 * result  # it reads result and gradient, and writes


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match=r"image_size=16 is halved 5 times; it must be at least 32"):
        vgg(VggConfig(image_size=16))
    with pytest.raises(InputError, match="same stages"):
        vgg(VggConfig(convs=(1, 1)))
    with pytest.raises(InputError, match="dropout"):
        vgg(VggConfig(dropout=1.0))
