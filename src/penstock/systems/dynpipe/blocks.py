"""DynPipe's blocks and calculations, found in our chains of ops: what its files count when they cut a model and recompute part of it.

DynPipe lists a model as calculations, one line each, and cuts between blocks of them. Our ops fuse some of its lines:

    here     conv1 relu1 … maxpool   avgpool fc1                        fc2                     fc3       loss
    VGG      conv  relu  … pool      (size view) linear relu dropout    linear relu dropout     linear    the criterion

A line is a block in VGG (reshapes go with a neighbour) and ResNet; in BERT a block ends with each residual addition. Models that
DynPipe does not have are counted as ours are built: an op is a calculation, a block a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["BlockPiece", "block_ends", "num_module_ops", "pieces"]

_BOTTLENECK = "conv1 bn1=2 conv2 bn2=2 conv3 bn3 downsample{projection} relu"
_LISTINGS = {
    "vgg": {"head": "avgpool+fc1=5/3 fc2=3 fc3"},
    "resnet": {
        # The listing has the projection of the first two stages among the lines of the main path, that of the others after them.
        "stage0.entry": "conv1 bn1=2 conv2 bn2+conv3+bn3+downsample=7 relu",
        "stage1.entry": "conv1+bn1+conv2+bn2+conv3+bn3+downsample=11 relu",
        "entry": _BOTTLENECK.format(projection="=3"),
        "block": _BOTTLENECK.format(projection=""),
        "head": "avgpool=3 fc",
    },
    "bert": {
        "embedding": "embedding+norm=1/0",
        "layers": "qkv+attention=1/0 out=3/1 norm1=1/0 up+act=1/0 down=3/1 norm2=1/0",
        "head": "pooler+transform+transform_act=1/0 transform_norm=1/0 logits=2/1",
    },
}
"""Ops here = calculations there / blocks that end with them (as many as calculations, if not said), block by block."""


@dataclass(frozen=True, slots=True)
class BlockPiece:
    """Ops [first, last) that are `num_calculations` lines of DynPipe's listing, of which the last ends the last of `num_blocks`."""

    first: int
    last: int
    num_calculations: int
    num_blocks: int


def num_module_ops(model: Model) -> int:
    """The ops of the model's modules: all but the loss, which is DynPipe's criterion and not part of its listing."""
    return model.num_ops - (model.ops[-1].op.kind in ("loss", "class_loss"))


def pieces(model: Model) -> tuple[BlockPiece, ...]:
    """The chain, but for the loss, in the smallest pieces that both sides can tell apart."""
    listing = {} if "source" in model.config else _LISTINGS.get(model.family, {})  # chains of imported tables have ops of their own
    found: list[BlockPiece] = []
    for (block, _), ops in groupby(model.ops[: num_module_ops(model)], lambda placed: (placed.block, placed.copy)):
        names = [placed.op.name for placed in ops]
        text = listing.get(block) or listing.get(block.rpartition(".")[2], "")
        for size, calculations, blocks in _parse(text, names) if text else _plain(len(names), bool(listing)):
            first = found[-1].last if found else 0
            found.append(BlockPiece(first, first + size, calculations, blocks))
    return tuple(found)


def _parse(text: str, names: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """(ops, calculations, blocks) of each group; ops that this size of the model lacks are left out."""
    for ops, _, counts in (group.partition("=") for group in text.split()):
        size = sum(name in names for name in ops.split("+"))
        calculations, _, blocks = (counts or "1").partition("/")
        if size:
            yield size, int(calculations), int(blocks or calculations)


def _plain(num_ops: int, known: bool) -> Iterator[tuple[int, int, int]]:
    """Each op a calculation: and a block where DynPipe has such a model, a part of one where it has not."""
    for position in range(num_ops):
        yield 1, 1, int(known or position == num_ops - 1)


def block_ends(model: Model) -> dict[int, int]:
    """Where stages may end, and begin: DynPipe's blocks so far → the ops that they are. Blocks inside one of our ops are missing."""
    ends, blocks = {0: 0}, 0
    for piece in pieces(model):
        blocks += piece.num_blocks
        if piece.num_blocks:
            ends[blocks] = piece.last
    ends[blocks] = model.num_ops
    return ends
