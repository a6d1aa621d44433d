"""The torch-free description of a model: ops that pass a carry, blocks that repeat, and the chain they form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from penstock.errors import InputError
from penstock.models.shapes import NOTHING, Form, Quantity, Shape

__all__ = ["ITEM_BYTES", "Block", "Collective", "Model", "Op", "PlacedOp", "Split", "TensorSpec", "carried_bytes"]

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "int64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the carry: its shape as a function of the micro-batch, its dtype, its placement under tp."""

    name: str
    dims: tuple[str | int, ...]
    """Sizes; a text names a feature of the micro-batch (`tokens`, `dec_tokens`, `samples`), at most one per tensor."""
    dtype: str = "compute"
    """`compute` is the dtype the model trains in."""
    differentiable: bool = True
    split: bool = False
    """Under tp the last dimension is divided among the ranks; otherwise each rank holds the whole."""

    def elements(self) -> Form:
        """Number of elements as a form."""
        feature, count = "one", 1
        for dim in self.dims:
            if isinstance(dim, str):
                feature = dim
            else:
                count *= dim
        return Form.of(**{feature: count})

    def size_bytes(self, dtype: str) -> Quantity:
        """Bytes on one rank when the model trains in `dtype`."""
        amount = self.elements() * ITEM_BYTES[dtype if self.dtype == "compute" else self.dtype]
        return Quantity(split=amount) if self.split else Quantity(whole=amount)

    def shape(self, shape: Shape, tp: int = 1) -> tuple[int, ...]:
        """The tensor's concrete shape on one of `tp` ranks."""
        sizes = [getattr(shape, dim) if isinstance(dim, str) else dim for dim in self.dims]
        if self.split:
            sizes[-1] //= tp
        return tuple(sizes)


@lru_cache(maxsize=4096)  # a chain has thousands of cuts, but few kinds of carry
def carried_bytes(specs: tuple[TensorSpec, ...], dtype: str) -> Quantity:
    """Bytes of some tensors on one rank when the model trains in `dtype`."""
    return sum((spec.size_bytes(dtype) for spec in specs), NOTHING)


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that an op runs among its tensor-parallel ranks."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter"]
    when: Literal["forward", "backward"]
    size_bytes: Form
    """Bytes of the whole (unsplit) tensor it works on."""


@dataclass(frozen=True, slots=True)
class Split:
    """One way to divide an op among tensor-parallel ranks (`algo` 0, 1): what it communicates and what it keeps."""

    collectives: tuple[Collective, ...] = ()
    kept: Quantity = NOTHING
    """Bytes that only this op saves for its backward pass."""
    saves_in: tuple[str, ...] = ()
    """Carry tensors of its input that it saves; a tensor saved by several ops is held once."""
    saves_out: tuple[str, ...] = ()
    """Carry tensors of its output that it saves."""


@dataclass(frozen=True)
class Op:
    """The smallest unit that can be placed. All amounts are for the forward pass unless they say otherwise."""

    name: str
    kind: str
    config: Mapping[str, Any]
    """What its torch module is built from; ops of equal kind and config cost the same."""
    carry: tuple[TensorSpec, ...]
    """The carry it returns."""
    parameters: Quantity = NOTHING
    """Number of weights."""
    flops: Quantity = NOTHING
    backward_flops: Quantity = NOTHING
    repeated_flops: Quantity = NOTHING
    """Those of its backward pass that make again what its forward pass made, as fused attention does its scores."""
    traffic: Quantity = NOTHING
    """Bytes it must read and write."""
    backward_traffic: Quantity = NOTHING
    workspace: Quantity = NOTHING
    """Bytes it allocates and frees again inside its forward pass, beyond its output."""
    backward_workspace: Quantity = NOTHING
    """The same for its backward pass, beyond the gradient of its input."""
    splits: tuple[Split, ...] = (Split(),)
    tp_limit: int = 1
    """Tensor-parallel degrees that divide this number are possible; 0 means any (the op is not divided, but repeated)."""
    num_kernels: int = 1
    trainable: bool = True
    tied_to: str = ""
    """Name of the op whose weight this one shares."""
    mask_item_bytes: int = 0
    """What a pair of positions takes in the mask of attention with a window, see `mask_pairs`."""
    sequence: Literal["", "rows", "whole"] = ""
    """Under sequence parallelism, whether it works on its rank's rows of the tokens or on all of them, see `models.sequence`."""

    @cached_property
    def signature(self) -> str:
        """Equal for ops that cost the same: the key of profiles and cost tables."""
        return f"{self.kind} {json.dumps(dict(self.config), sort_keys=True)}"

    @property
    def needed_flops(self) -> Quantity:
        """What both passes have to compute, nothing of it twice."""
        return self.flops + self.backward_flops + self.repeated_flops * -1.0

    def seen_share(self, shape: Shape) -> float:
        """The share of the pairs of causal attention that its window lets through; of samples of unequal lengths, as if all had the length
        that a token meets on average, which is a little more than they see."""
        window, length = self.config.get("window", 0), shape.squares / max(shape.tokens, 1)
        return window / length * (2 - window / length) if 0 < window < length else 1.0

    def mask_pairs(self, shape: Shape) -> float:
        """Pairs of positions in the mask that attention with a window keeps where padded rows are longer: one for all rows and heads.

        Forms are linear in a micro-batch and have no word for it. Kernels of packed sequences know of windows and need no mask.
        """
        length = shape.squares / max(shape.tokens, 1)
        return length**2 if self.mask_item_bytes and shape.layout == "padded" and length > self.config["window"] else 0.0

    def check_tp(self, tp: int, algo: int = 0) -> None:
        """Refuses a degree or split that this op cannot have."""
        if tp < 1 or (self.tp_limit and self.tp_limit % tp):
            raise InputError(f"op '{self.name}' ({self.kind}) cannot be split over tp={tp}: {tp} does not divide {self.tp_limit}.")
        if not 0 <= algo < len(self.splits):
            raise InputError(f"op '{self.name}' ({self.kind}) has no split algo={algo}; it has 0..{len(self.splits) - 1}.")


@dataclass(frozen=True)
class Block:
    """A named run of ops that repeats, such as one transformer layer."""

    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class PlacedOp:
    """An op at its place in the chain."""

    index: int
    name: str
    """Global name, unique in the model: `layers.3.qkv`."""
    block: str
    op: Op
    copy: int = 0
    """Which copy of the block it belongs to."""


@dataclass(frozen=True)
class Model:
    """An ordered chain of ops, given as runs of equal blocks."""

    name: str
    family: str
    dtype: str
    runs: tuple[tuple[Block, int], ...]
    """(block, number of copies) in order."""
    inputs: tuple[TensorSpec, ...] = ()
    """The carry before the first op (empty when the first op reads tokens or images itself)."""
    seq_length: int = 0
    """The usual length of a sample (0 for images)."""
    dec_length: int = 0
    """The usual length on the decoder's side (0 without a decoder)."""
    layouts: tuple[str, ...] = ("padded", "packed")
    config: Mapping[str, Any] = field(default_factory=dict)
    open_dtype: bool = False
    """Whether its file names no dtype, so that a plan may choose one."""
    notes: tuple[str, ...] = ()
    """What its file asks for and does not get, or is not priced."""
    names: tuple[str, ...] = ()
    """Names of all ops in order, where they are those of a module's parts; otherwise they follow from the blocks."""

    @cached_property
    def ops(self) -> tuple[PlacedOp, ...]:
        """Every op of the chain in order, with its global name."""
        placed = tuple(self._place())
        return tuple(replace(place, name=name) for place, name in zip(placed, self.names, strict=True)) if self.names else placed

    def _place(self) -> Iterator[PlacedOp]:
        index = 0
        seen: dict[str, int] = {}
        for block, copies in self.runs:
            for _ in range(copies):
                number = seen.get(block.name, 0)
                seen[block.name] = number + 1
                repeats = copies > 1 or number > 0
                prefix = f"{block.name}.{number}" if repeats else block.name
                for op in block.ops:
                    yield PlacedOp(index, op.name if prefix == op.name else f"{prefix}.{op.name}", block.name, op, number)
                    index += 1

    def shortened(self, copies: int) -> Model:
        """The model with each run of equal blocks cut to at most `copies`; its ops are named by their blocks."""
        return replace(self, runs=tuple((block, min(count, copies)) for block, count in self.runs), names=())

    @cached_property
    def distinct_ops(self) -> tuple[Op, ...]:
        """One op for each signature, in order of first appearance."""
        found: dict[str, Op] = {}
        for block, _ in self.runs:
            for op in block.ops:
                found.setdefault(op.signature, op)
        return tuple(found.values())

    @property
    def num_ops(self) -> int:
        """Length of the chain."""
        return sum(len(block.ops) * copies for block, copies in self.runs)

    @cached_property
    def num_parameters(self) -> int:
        """Weights of the whole model, shared ones counted once."""
        unit = Shape(1)
        total = 0.0
        for block, copies in self.runs:
            for op in block.ops:
                if not op.tied_to:
                    total += copies * op.parameters.at(unit)
                else:
                    total += copies * float(op.config.get("untied_parameters", 0))
        return round(total)

    def carry_before(self, index: int) -> tuple[TensorSpec, ...]:
        """The carry that enters op `index`, that is, what a pipeline cut there would send."""
        return self.inputs if index == 0 else self.ops[index - 1].op.carry

    def boundary_bytes(self, index: int) -> Quantity:
        """Bytes that cross a cut before op `index`, as held by one tp rank."""
        return carried_bytes(self.carry_before(index), self.dtype)

    def max_tp(self) -> int:
        """The largest tensor-parallel degree (a power of two up to 64) that every op allows."""
        degree = 64
        while degree > 1 and any(op.tp_limit % degree for op in self.distinct_ops if op.tp_limit):
            degree //= 2
        return degree

    def usual_shape(self, samples: int) -> Shape:
        """`samples` samples of the model's usual length."""
        if not self.seq_length:
            return Shape.images(samples)
        return Shape.padded(samples, self.seq_length, self.dec_length)
