"""The torch side of the convolutional ops: one module per kind, carry in, carry out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from penstock.models.modules.base import Carry, OpModule, Shard
from penstock.models.modules.batch import Batch
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.init import stable_hash
from penstock.models.modules.parallel import copy_to, gather, reduce_from, slice_to

__all__ = ["MODULES", "AvgPool", "BatchNorm", "ClassLoss", "Conv", "Downsample", "Fc", "MaxPool", "Relu"]


class _Divided(OpModule):
    """A product whose outputs (algo 0) or inputs (algo 1) are divided among the ranks; whole in, whole out."""

    def cut(self, dim: int) -> Shard:
        """This rank's part of a whole weight along `dim`."""
        return lambda whole: whole.chunk(self.tp.size, dim)[self.tp.rank]

    def add_product(self, shape: tuple[int, ...], *, std: float, bias: bool) -> None:
        """Weight (outputs, inputs, …) and bias; the latter is whole on every rank where partial sums are added."""
        self.add("weight", shape, std=std, shard=self.cut(self.algo))
        if bias:
            self.add("bias", shape[:1], fill=0.0, shard=self.cut(0) if self.algo == 0 else None)
        else:
            self.register_parameter("bias", None)

    def divided(self, product: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """`product(x, weight, bias)` over the ranks."""
        if self.algo == 0 or self.tp.size == 1:
            return gather(product(copy_to(x, self.tp), self.weight, self.bias), self.tp, 1)
        out = reduce_from(product(slice_to(x, self.tp, 1), self.weight, None), self.tp)
        # The bias must be added once, after the sum.
        return out if self.bias is None else out + self.bias.reshape(-1, *[1] * (out.dim() - 2))


class Conv(_Divided):
    """A convolution; the first of the net reads the images, one that opens a block puts its input aside."""

    def build(self) -> None:
        c = self.config
        shape = (c["outputs"], c["inputs"], c["kernel"], c["kernel"])
        self.add_product(shape, std=(2 / (c["outputs"] * c["kernel"] ** 2)) ** 0.5, bias=c["bias"])

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        x = batch.images.to(self.weight.dtype) if c["source"] == "images" else carry["hidden"]

        def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.conv2d(x, weight, bias, c["stride"], c["padding"])

        aside = {"residual": x} if c["residual"] == "take" else {}
        return self.following(carry, hidden=self.divided(product, x), **aside)


class _Normalizing(OpModule):
    """Batch normalisation with running statistics as fp32 buffers."""

    def add_norm(self, channels: int) -> None:
        """Scale, shift and running statistics of `channels` channels."""
        self.add("scale", (channels,), fill=1.0)
        self.add("shift", (channels,), fill=0.0)
        self.register_buffer("running_mean", torch.zeros(channels, device=self.device))
        self.register_buffer("running_var", torch.ones(channels, device=self.device))

    def normalize(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Over this micro-batch when training, by the running statistics otherwise."""
        mean, var = self.running_mean, self.running_var
        if batch.training and torch._C._current_graph_task_id() != -1:
            # Recomputed inside a backward pass: the first run has already moved the running statistics.
            mean, var = mean.clone(), var.clone()
        c = self.config
        return F.batch_norm(x, mean, var, self.scale.float(), self.shift.float(), batch.training, c["momentum"], c["eps"])


class BatchNorm(_Normalizing):
    """Batch normalisation, then a ReLU if asked for."""

    def build(self) -> None:
        self.add_norm(self.config["channels"])

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        out = self.normalize(carry["hidden"], batch)
        # In place: nothing else holds the norm's output, and its backward does not need it.
        return self.following(carry, hidden=F.relu_(out) if self.config["relu"] else out)


class Downsample(_Divided, _Normalizing):
    """Closes a block: adds the residual, projected where the block changes shape."""

    def build(self) -> None:
        c = self.config
        if c["project"]:
            self.add_product((c["outputs"], c["inputs"], 1, 1), std=(2 / c["outputs"]) ** 0.5, bias=False)
            self.add_norm(c["outputs"])

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        residual, stride = carry["residual"], self.config["stride"]
        if self.config["project"]:
            residual = self.normalize(self.divided(lambda x, weight, bias: F.conv2d(x, weight, bias, stride), residual), batch)
        return self.following(carry, hidden=carry["hidden"] + residual)


class Relu(OpModule):
    """max(x, 0); not in place, since the input belongs to the carry."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        return self.following(carry, hidden=F.relu(carry["hidden"]))


class MaxPool(OpModule):
    """The maximum of each window."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        return self.following(carry, hidden=F.max_pool2d(carry["hidden"], c["kernel"], c["stride"], c["padding"]))


class AvgPool(OpModule):
    """Adaptive average, flattened to one row per sample."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        x, out_size = carry["hidden"], self.config["out_size"]
        if self.config["size"] != out_size:
            x = F.adaptive_avg_pool2d(x, out_size)
        return self.following(carry, hidden=x.flatten(1))


class Fc(_Divided):
    """A matrix product per sample, then dropout and ReLU if asked for."""

    def build(self) -> None:
        c = self.config
        self.add_product((c["outputs"], c["inputs"]), std=((2 if c["relu"] else 1) / c["inputs"]) ** 0.5, bias=True)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        c = self.config
        x = self.divided(F.linear, carry["hidden"])
        if c["dropout"] and batch.training:
            x = keyed_dropout(x, _row_keys(batch, x), c["dropout"], stable_hash(batch.seed, batch.step, self.name))
        # Dropout before the ReLU is the same as after it, and the ReLU's output is then what the next op saves anyway.
        return self.following(carry, **{c["output"]: F.relu(x) if c["relu"] else x})


def _row_keys(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """(samples,) a number for each image: its sample id where the batch has them, else its row."""
    ids = getattr(batch, "samples", None)
    return (torch.arange(x.shape[0], device=x.device) if ids is None else ids) * 1_000_003


class ClassLoss(OpModule):
    """Cross entropy in fp32, summed with each sample's weight."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        losses = F.cross_entropy(carry["logits"].float(), batch.targets, reduction="none")
        return self.following(carry, loss=torch.dot(losses, batch.weights))


MODULES = {
    "conv": Conv,
    "batch_norm": BatchNorm,
    "downsample": Downsample,
    "relu": Relu,
    "max_pool": MaxPool,
    "avg_pool": AvgPool,
    "fc": Fc,
    "class_loss": ClassLoss,
}
