"""ResNet with bottleneck blocks, and the wide ones of torchvision, Alpa and Aceso."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import InputError
from penstock.models import convolution as c
from penstock.models.ops import Block, Model, Op

__all__ = ["RESNET_SIZES", "ResNetConfig", "resnet"]

EXPANSION = 4
"""A bottleneck block returns this many times the channels of its stage."""

MAX_STAGES = 16
"""After as many, maps of any size are a point, and channels millions."""


@dataclass(frozen=True)
class ResNetConfig:
    """Sizes of a ResNet."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    """Bottleneck blocks in each stage."""
    base_width: int = 64
    """Channels of the stem and of stage 0; every further stage doubles them."""
    width_factor: int = 1
    """The 3×3 convolutions have this many times their stage's channels."""
    wide_conv1: bool = True
    """The first 1×1 convolution is widened too (torchvision); otherwise only the 3×3 widens (Alpa, Aceso)."""
    num_classes: int = 1000
    image_size: int = 224
    stem_kernel: int = 7
    stem_stride: int = 2
    stem_pool: bool = True
    dtype: str = "fp32"


def _wide(base: int, factor: int, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> ResNetConfig:
    return ResNetConfig(blocks, base, factor, wide_conv1=False, num_classes=1024)


RESNET_SIZES = {
    "resnet-tiny": ResNetConfig((1, 1, 2, 1), 16, num_classes=16, image_size=64),
    "resnet-50": ResNetConfig(),
    "resnet-101": ResNetConfig((3, 4, 23, 3)),
    "resnet-152": ResNetConfig((3, 8, 36, 3)),
    "wide-resnet-50-2": ResNetConfig(width_factor=2),
    "wide-resnet-250m": _wide(160, 2),
    "wide-resnet-500m": _wide(224, 2),
    "wide-resnet-1b": _wide(320, 2),
    "wide-resnet-2b": _wide(448, 2),
    "wide-resnet-4b": _wide(640, 2),
    "wide-resnet-6.8b": _wide(320, 16),
    "wide-resnet-13b": _wide(320, 16, (3, 4, 23, 3)),
}


def _stem(config: ResNetConfig) -> tuple[Block, int]:
    """The ops before the first stage, and the size of their maps."""
    width, dtype, padding = config.base_width, config.dtype, config.stem_kernel // 2
    size = c.conv_size(config.image_size, config.stem_kernel, config.stem_stride, padding)
    hidden = (c.image("hidden", width, size),)
    ops = [
        c.conv("conv1", 3, width, config.image_size, dtype, carry=hidden, kernel=config.stem_kernel, stride=config.stem_stride,
               padding=padding, first=True),
        c.batch_norm("bn1", width, size, dtype, carry=hidden),
        c.relu("relu1", width, size, dtype, carry=hidden),
    ]  # fmt: skip
    if config.stem_pool:
        pooled = c.conv_size(size, 3, 2, 1)
        ops.append(c.max_pool(width, size, dtype, carry=(c.image("hidden", width, pooled),), kernel=3, padding=1))
        size = pooled
    return Block("stem", tuple(ops)), size


def _bottleneck(name: str, config: ResNetConfig, inputs: int, stage: int, size: int, stride: int, project: bool) -> Block:
    """1×1, 3×3 (with the stride) and 1×1 convolutions around the residual; `project` when it changes shape."""
    dtype = config.dtype
    width = config.base_width * 2**stage
    wide, outputs = width * config.width_factor, width * EXPANSION
    inner = wide if config.wide_conv1 else width
    out_size = c.conv_size(size, 3, stride, 1)
    residual = c.image("residual", inputs, size)
    after = {n: (c.image("hidden", channels, s), residual) for n, channels, s in
             ((1, inner, size), (2, wide, out_size), (3, outputs, out_size))}  # fmt: skip
    closed = (c.image("hidden", outputs, out_size),)
    ops: tuple[Op, ...] = (
        c.conv("conv1", inputs, inner, size, dtype, carry=after[1], kernel=1, residual="take"),
        c.batch_norm("bn1", inner, size, dtype, carry=after[1], relu=True),
        c.conv("conv2", inner, wide, size, dtype, carry=after[2], kernel=3, stride=stride, padding=1),
        c.batch_norm("bn2", wide, out_size, dtype, carry=after[2], relu=True),
        c.conv("conv3", wide, outputs, out_size, dtype, carry=after[3], kernel=1),
        c.batch_norm("bn3", outputs, out_size, dtype, carry=after[3]),
        c.downsample(inputs, outputs, size, dtype, carry=closed, stride=stride, project=project),
        c.relu("relu", outputs, out_size, dtype, carry=closed),
    )
    return Block(name, ops)


def resnet(config: ResNetConfig, name: str = "resnet") -> Model:
    """The chain of a ResNet: stem, stages of bottleneck blocks (`entry`, then `block`s), average, classes, loss."""
    if not config.blocks or 0 in config.blocks:
        raise InputError(f"{name}: field 'blocks' is {config.blocks}; every stage needs at least one block, as in (3, 4, 6, 3).")
    if len(config.blocks) > MAX_STAGES:
        raise InputError(f"{name}: field 'blocks' names {len(config.blocks)} stages, each twice as wide as the last; at most {MAX_STAGES}.")
    for field in ("base_width", "width_factor", "num_classes", "image_size", "stem_kernel", "stem_stride"):
        if getattr(config, field) < 1:
            raise InputError(f"{name}: field '{field}' is {getattr(config, field)}; expected at least 1.")
    stem, size = _stem(config)
    runs = [(stem, 1)]
    channels = config.base_width
    for stage, copies in enumerate(config.blocks):
        stride = 2 if stage else 1
        runs.append((_bottleneck(f"stage{stage}.entry", config, channels, stage, size, stride, project=True), 1))
        size, channels = c.conv_size(size, 3, stride, 1), config.base_width * 2**stage * EXPANSION
        if copies > 1:
            runs.append((_bottleneck(f"stage{stage}.block", config, channels, stage, size, 1, project=False), copies - 1))
    head = Block("head", (
        c.avg_pool(channels, size, config.dtype, carry=(c.features("hidden", channels),), out_size=1),
        c.fully_connected("fc", channels, config.num_classes, config.dtype, carry=(c.features("logits", config.num_classes),),
                          output="logits"),
        c.class_loss(config.num_classes, config.dtype),
    ))  # fmt: skip
    return Model(name, "resnet", config.dtype, (*runs, (head, 1)), layouts=("padded",), config=vars(config))
