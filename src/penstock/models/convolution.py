"""Builders of the ops that convolutional families are chained from, with their formulas.

Images have the model's own resolution, so every amount is linear in `samples`. A bottleneck block (ResNet), as a chain:

    hidden ─ conv1 ─ bn1+relu ─ conv2 ─ bn2+relu ─ conv3 ─ bn3 ─ downsample ─ relu ─ hidden
       └──── residual (the same tensor, carried, not copied) ───────(+)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from penstock.models.ops import ITEM_BYTES, Collective, Op, Split, TensorSpec
from penstock.models.shapes import Form, Quantity

__all__ = [
    "avg_pool", "batch_norm", "class_loss", "conv", "conv_size", "downsample", "features", "fully_connected", "image", "max_pool", "relu",
]  # fmt: skip

_NORM = {"eps": 1e-5, "momentum": 0.1}
"""Of every batch norm, as torch has them unless told otherwise."""


def image(name: str, channels: int, size: int) -> TensorSpec:
    """A carry tensor of square feature maps."""
    return TensorSpec(name, ("samples", channels, size, size))


def features(name: str, width: int) -> TensorSpec:
    """A carry tensor of `width` values per sample."""
    return TensorSpec(name, ("samples", width))


def conv_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Height and width after a convolution or a pooling."""
    return (size + 2 * padding - kernel) // stride + 1


def _per_sample(amount: float) -> Form:
    return Form.of(samples=amount)


def _constant(value: float) -> Form:
    return Form.of(one=value)


def _channel_splits(size_in: Form, size_out: Form, kept: Quantity, saves_in: tuple[str, ...], first: bool = False) -> tuple[Split, ...]:
    """Both ways to divide a convolution or a matrix product whose carry is whole on every rank.

    `algo` 0 divides the outputs: gather them; the ranks' partial gradients of the input are summed. `algo` 1 divides the inputs:
    sum the partial outputs; gather the slices of the input's gradient. The first op of the net has no gradient of its input to
    exchange, and too few input channels to divide.
    """
    gather = Collective("all_gather", "forward", size_out)
    if first:
        return (Split((gather,), kept, saves_in),)
    return (
        Split((gather, Collective("all_reduce", "backward", size_in)), kept, saves_in),
        Split((Collective("all_reduce", "forward", size_out), Collective("all_gather", "backward", size_in)), kept, saves_in),
    )


def conv(
    name: str, inputs: int, outputs: int, size: int, dtype: str, *, carry: Sequence[TensorSpec], kernel: int, stride: int = 1,
    padding: int = 0, bias: bool = False, residual: str = "", first: bool = False,
) -> Op:  # fmt: skip
    """A convolution of `size` × `size` maps; `first` reads the images, `residual` "take" puts its input aside for the block's sum."""
    item = ITEM_BYTES[dtype]
    out_size = conv_size(size, kernel, stride, padding)
    weights = kernel * kernel * inputs * outputs
    size_in, size_out = _per_sample(inputs * size**2 * item), _per_sample(outputs * out_size**2 * item)
    flops = Quantity(split=_per_sample(2 * weights * out_size**2))
    traffic = Quantity(whole=size_in, split=size_out + _constant(weights * item))
    # Backward: one product for the weights and, but for the first op, one for the input.
    products = 1 if first else 2
    config = {
        "inputs": inputs, "outputs": outputs, "size": size, "kernel": kernel, "stride": stride, "padding": padding, "bias": bias,
        "source": "images" if first else "hidden", "output": "hidden", "residual": residual,
    }  # fmt: skip
    return Op(
        name, "conv", config, tuple(carry), parameters=Quantity(split=_constant(weights + (outputs if bias else 0))),
        flops=flops, backward_flops=flops * products, traffic=traffic, backward_traffic=traffic * products,
        backward_workspace=Quantity(split=_constant(weights * item)),
        splits=_channel_splits(size_in, size_out, Quantity(), () if first else ("hidden",), first),
        tp_limit=outputs if first else math.gcd(inputs, outputs), num_kernels=1 + bias,
    )  # fmt: skip


def batch_norm(name: str, channels: int, size: int, dtype: str, *, carry: Sequence[TensorSpec], relu: bool = False) -> Op:
    """Batch normalisation over this micro-batch's samples, then a ReLU if asked for."""
    amount = _per_sample(channels * size**2 * ITEM_BYTES[dtype])
    # The input is read twice: once for the statistics, once to normalise; the ReLU works in place on the result.
    return Op(
        name, "batch_norm", {"channels": channels, "size": size, "relu": relu, **_NORM, "source": "hidden", "output": "hidden"},
        tuple(carry), parameters=Quantity(whole=_constant(2 * channels)),
        traffic=Quantity(whole=amount * (5 if relu else 3)), backward_traffic=Quantity(whole=amount * (8 if relu else 5)),
        backward_workspace=Quantity(whole=amount) if relu else Quantity(),
        splits=(Split(kept=Quantity(whole=_statistics(channels, dtype)), saves_in=("hidden",), saves_out=("hidden",) if relu else ()),),
        tp_limit=0, num_kernels=1 + relu,
    )  # fmt: skip


def _statistics(channels: int, dtype: str) -> Form:
    """Bytes of a batch norm's mean and inverse deviation in fp32, and of the fp32 copy of its scale where it trains in less."""
    return _constant((8 if dtype == "fp32" else 12) * channels)


def downsample(
    inputs: int, outputs: int, size: int, dtype: str, *, carry: Sequence[TensorSpec], stride: int, project: bool
) -> Op:  # fmt: skip
    """Adds the residual; `project` first brings it to the block's shape by a 1×1 convolution and a batch norm. `size` is the residual's."""
    item = ITEM_BYTES[dtype]
    out_size = conv_size(size, 1, stride, 0) if project else size
    size_in, size_out = _per_sample(inputs * size**2 * item), _per_sample(outputs * out_size**2 * item)
    config = {
        "inputs": inputs, "outputs": outputs, "size": size, "stride": stride, "project": project, **_NORM,
        "source": "hidden", "output": "hidden", "residual": "add",
    }  # fmt: skip
    if not project:
        return Op("downsample", "downsample", config, tuple(carry), traffic=Quantity(whole=size_out * 3), tp_limit=0)
    weights = inputs * outputs
    flops = Quantity(split=_per_sample(2 * weights * out_size**2))
    product = Quantity(whole=size_in, split=size_out + _constant(weights * item))
    return Op(
        "downsample", "downsample", config, tuple(carry), parameters=Quantity(whole=_constant(2 * outputs), split=_constant(weights)),
        flops=flops, backward_flops=flops * 2,
        traffic=product + Quantity(whole=size_out * 6), backward_traffic=product * 2 + Quantity(whole=size_out * 5),
        workspace=Quantity(whole=size_out), backward_workspace=Quantity(whole=size_out, split=_constant(weights * item)),
        # The norm's input, which is the convolution's output, is known to no other op.
        splits=_channel_splits(size_in, size_out, Quantity(whole=size_out + _statistics(outputs, dtype)), ("residual",)),
        tp_limit=math.gcd(inputs, outputs), num_kernels=3,
    )  # fmt: skip


def relu(name: str, channels: int, size: int, dtype: str, *, carry: Sequence[TensorSpec]) -> Op:
    """max(x, 0)."""
    amount = _per_sample(channels * size**2 * ITEM_BYTES[dtype])
    return Op(
        name, "relu", {"channels": channels, "size": size, "source": "hidden", "output": "hidden"}, tuple(carry),
        traffic=Quantity(whole=amount * 2), backward_traffic=Quantity(whole=amount * 3),
        splits=(Split(saves_out=("hidden",)),), tp_limit=0,
    )  # fmt: skip


def max_pool(channels: int, size: int, dtype: str, *, carry: Sequence[TensorSpec], kernel: int, padding: int = 0) -> Op:
    """The maximum of each window, which lies two further than the last; keeps where it was found as int64 indices."""
    item, stride = ITEM_BYTES[dtype], 2
    outputs = channels * conv_size(size, kernel, stride, padding) ** 2
    indices = _per_sample(outputs * ITEM_BYTES["int64"])
    moved = Quantity(whole=_per_sample((channels * size**2 + outputs) * item) + indices)
    return Op(
        "maxpool", "max_pool", {"channels": channels, "size": size, "kernel": kernel, "stride": stride, "padding": padding,
                           "source": "hidden", "output": "hidden"},
        tuple(carry), traffic=moved, backward_traffic=moved,
        splits=(Split(kept=Quantity(whole=indices), saves_in=("hidden",)),), tp_limit=0,
    )  # fmt: skip


def avg_pool(channels: int, size: int, dtype: str, *, carry: Sequence[TensorSpec], out_size: int) -> Op:
    """Averages adaptively to `out_size` × `out_size`, then flattens; nothing happens to maps that already have that size."""
    moved = Quantity(whole=_per_sample(channels * (size**2 + out_size**2) * ITEM_BYTES[dtype]))
    idle = size == out_size
    # torch takes a plain mean for 1×1, whose gradient needs only the shape; otherwise its backward asks for the input.
    saves_in = () if idle or out_size == 1 else ("hidden",)
    return Op(
        "avgpool", "avg_pool", {"channels": channels, "size": size, "out_size": out_size, "source": "hidden", "output": "hidden"},
        tuple(carry),
        traffic=Quantity() if idle else moved, backward_traffic=Quantity() if idle else moved,
        splits=(Split(saves_in=saves_in),), tp_limit=0, num_kernels=0 if idle else 1,
    )  # fmt: skip


def fully_connected(
    name: str, inputs: int, outputs: int, dtype: str, *, carry: Sequence[TensorSpec], output: str = "hidden", relu: bool = False,
    dropout: float = 0.0,
) -> Op:  # fmt: skip
    """A matrix product per sample (kind `fc`), then a dropout and a ReLU if asked for."""
    item = ITEM_BYTES[dtype]
    weights = inputs * outputs
    size_in, size_out = _per_sample(inputs * item), _per_sample(outputs * item)
    flops = Quantity(split=_per_sample(2 * weights))
    extra = Quantity(whole=size_out * (2 * relu + 2 * (dropout > 0)))
    traffic = Quantity(whole=size_in, split=size_out + _constant(weights * item))
    # Dropout comes first: scaling commutes with the ReLU, whose saved output is then the very tensor the next op saves.
    # Its mask is made again from the samples' int64 keys in the backward pass.
    keys = Quantity(whole=_per_sample(ITEM_BYTES["int64"])) if dropout else Quantity()
    splits = _channel_splits(size_in, size_out, keys, ("hidden",))
    saves_out = (output,) if relu else ()
    return Op(
        name, "fc", {"inputs": inputs, "outputs": outputs, "relu": relu, "dropout": dropout, "source": "hidden", "output": output},
        tuple(carry), parameters=Quantity(split=_constant(weights + outputs)), flops=flops, backward_flops=flops * 2,
        traffic=traffic + extra, backward_traffic=traffic * 2 + extra * 1.5, backward_workspace=Quantity(split=_constant(weights * item)),
        splits=tuple(Split(s.collectives, s.kept, s.saves_in, saves_out) for s in splits),
        tp_limit=math.gcd(inputs, outputs), num_kernels=1 + relu + 2 * (dropout > 0),
    )  # fmt: skip


def class_loss(classes: int, dtype: str) -> Op:
    """Cross entropy of the classes in fp32, summed with the micro-batch's weight of each sample."""
    size = _per_sample(classes * ITEM_BYTES[dtype])
    log_probabilities = _per_sample(classes * 4)
    return Op(
        "loss", "class_loss", {"classes": classes, "source": "logits", "output": "loss"}, (TensorSpec("loss", (), dtype="fp32"),),
        traffic=Quantity(whole=size + log_probabilities), backward_traffic=Quantity(whole=size + log_probabilities),
        # Four bytes: the sum of class weights that torch's nll_loss hands to its backward.
        splits=(Split(kept=Quantity(whole=log_probabilities + _constant(4))),), tp_limit=0, num_kernels=4,
    )  # fmt: skip
