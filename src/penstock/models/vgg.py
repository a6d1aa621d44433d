"""VGG: plain stacks of 3×3 convolutions, then three large matrix products that hold most of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InputError
from penstock.models import convolution as c
from penstock.models.ops import Block, Model, Op

__all__ = ["VGG_SIZES", "VggConfig", "vgg"]

POOLED_SIZE = 7
"""The maps are averaged (or repeated, for small images) to this size before the matrix products."""


@dataclass(frozen=True)
class VggConfig:
    """Sizes of a VGG."""

    convs: tuple[int, ...] = (2, 2, 3, 3, 3)
    """3×3 convolutions in each stage; a stage ends by halving its maps."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    """Channels of each stage."""
    classifier_width: int = 4096
    num_classes: int = 1000
    image_size: int = 224
    dropout: float = 0.5
    dtype: str = "fp32"


VGG_SIZES = {
    "vgg-tiny": VggConfig((1, 1, 2), (16, 32, 64), classifier_width=128, num_classes=16, image_size=32),
    "vgg11": VggConfig((1, 1, 2, 2, 2)),
    "vgg16": VggConfig(),
    "vgg16-cifar10": VggConfig(num_classes=10, image_size=32),
    "vgg19": VggConfig((2, 2, 4, 4, 4)),
}


def _stage(stage: int, config: VggConfig, inputs: int, size: int) -> Block:
    """Convolutions with a ReLU each, then a 2×2 pooling."""
    width, dtype = config.widths[stage], config.dtype
    hidden = (c.image("hidden", width, size),)
    ops: list[Op] = []
    for i in range(config.convs[stage]):
        channels, first = (inputs if i == 0 else width), stage == 0 and i == 0
        ops.append(c.conv(f"conv{i + 1}", channels, width, size, dtype, carry=hidden, kernel=3, padding=1, bias=True, first=first))
        ops.append(c.relu(f"relu{i + 1}", width, size, dtype, carry=hidden))
    ops.append(c.max_pool(width, size, dtype, carry=(c.image("hidden", width, size // 2),), kernel=2))
    return Block(f"stage{stage}", tuple(ops))


def vgg(config: VggConfig, name: str = "vgg") -> Model:
    """The chain of a VGG: stages, average to 7×7, two hidden matrix products, classes, loss."""
    if len(config.convs) != len(config.widths) or not config.convs or 0 in (*config.convs, *config.widths):
        raise InputError(f"{name}: convs={config.convs} and widths={config.widths} must name the same stages, each at least 1.")
    if config.image_size < 2 ** len(config.convs):
        raise InputError(f"{name}: image_size={config.image_size} is halved {len(config.convs)} times; "
                         f"it must be at least {2 ** len(config.convs)}.")  # fmt: skip
    if not 0 <= config.dropout < 1:
        raise InputError(f"{name}: field 'dropout' is {config.dropout}; expected at least 0 and less than 1.")
    runs: list[tuple[Block, int]] = []
    channels, size = 3, config.image_size
    for stage, width in enumerate(config.widths):
        runs.append((_stage(stage, config, channels, size), 1))
        channels, size = width, size // 2
    flat, width, dtype = channels * POOLED_SIZE**2, config.classifier_width, config.dtype
    hidden = (c.features("hidden", width),)
    head = Block("head", (
        c.avg_pool(channels, size, dtype, carry=(c.features("hidden", flat),), out_size=POOLED_SIZE),
        c.fully_connected("fc1", flat, width, dtype, carry=hidden, relu=True, dropout=config.dropout),
        c.fully_connected("fc2", width, width, dtype, carry=hidden, relu=True, dropout=config.dropout),
        c.fully_connected("fc3", width, config.num_classes, dtype, carry=(c.features("logits", config.num_classes),), output="logits"),
        c.class_loss(config.num_classes, dtype),
    ))  # fmt: skip
    return Model(name, "vgg", dtype, (*runs, (head, 1)), layouts=("padded",), config=vars(config))
