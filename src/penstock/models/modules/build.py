"""From a description to torch modules, and running a slice of the chain with some ops recomputed."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import InputError, near_misses
from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model, PlacedOp
from penstock.models.segments import segments

__all__ = ["TORCH_DTYPES", "Chain", "build_chain", "build_op"]

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_WHERE = {
    "embedding": "transformer.Embedding", "norm": "transformer.Norm", "linear": "transformer.Linear",
    "activation": "transformer.Activation", "pooler": "transformer.Pooler", "logits": "transformer.Logits",
    "attention": "attention.Attention", "loss": "loss.Loss",
    "conv": "convolution.Conv", "batch_norm": "convolution.BatchNorm", "relu": "convolution.Relu", "max_pool": "convolution.MaxPool",
    "avg_pool": "convolution.AvgPool", "fc": "convolution.Fc", "downsample": "convolution.Downsample",
    "class_loss": "convolution.ClassLoss",
    "traced": "unit.UnitOp",
}  # fmt: skip


def build_op(
    placed: PlacedOp, tp: TensorParallel | None = None, algo: int = 0, *, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> OpModule:  # fmt: skip
    """The module of one op on this rank."""
    kind = placed.op.kind
    if kind not in _WHERE:
        raise InputError(f"op '{placed.name}' is of kind '{kind}', which has no torch module. {near_misses(kind, _WHERE)}")
    file, name = _WHERE[kind].split(".")
    module: type[OpModule] = getattr(importlib.import_module(f"penstock.models.modules.{file}"), name)
    return module(placed.op, placed.name, tp, algo, device=device, dtype=dtype, seed=seed)


class Chain(nn.Module):
    """A slice of a model's chain on this rank."""

    def __init__(self, ops: Sequence[OpModule], places: Sequence[PlacedOp]) -> None:
        super().__init__()
        self.ops = nn.ModuleList(ops)
        self.places = tuple(places)
        self._in_order = tuple(ops)  # a list of modules takes the host longer to index

    def forward(self, batch: Batch, carry: Carry | None = None, recompute: Collection[int] = ()) -> Carry:
        """Runs the ops; those whose position is in `recompute` keep only the input of their segment."""
        carry = {} if carry is None else carry
        for part in segments(self.places, recompute):
            if part.recomputed:
                told = batch if self._adds_in_place(part.start, part.stop) else replace(batch, torch_products=True)
                carry = checkpoint(self._run_again, carry, told, part.start, part.stop, use_reentrant=False, preserve_rng_state=False)
            else:
                carry = self._run(carry, batch, part.start, part.stop)
        return carry

    def _adds_in_place(self, start: int, stop: int) -> bool:
        """Whether gradients are held to be added to. A segment must save the same both times it runs, and its products see the gradients
        that there are at the time."""
        weights = (weight for op in self._in_order[start:stop] for weight in op.parameters(recurse=False) if weight.requires_grad)
        first = next(weights, None)
        return first is not None and first.grad is not None

    def _run_again(self, carry: Carry, batch: Batch, start: int, stop: int) -> Carry:
        """A segment that is recomputed, and run again only until all that its ops save is there: torch's product saves its input before it
        runs, a function of ours after, so that the last op's is torch's."""
        return self._run(self._run(carry, batch, start, stop - 1), replace(batch, torch_products=True), stop - 1, stop)

    def _run(self, carry: Carry, batch: Batch, start: int, stop: int) -> Carry:
        for op in self._in_order[start:stop]:
            # Where kernels are short the host's time counts: only an op that somebody watches is called as torch calls modules.
            carry = op(carry, batch) if op._forward_pre_hooks else op.forward(carry, batch)
        return carry


def build_chain(
    model: Model, start: int = 0, stop: int | None = None, *, tp: TensorParallel | None = None, algos: Sequence[int] = (),
    device: torch.device | str = "cpu", dtype: torch.dtype | None = None, seed: int = 0,
) -> Chain:  # fmt: skip
    """Ops `start` to `stop` of `model`; weights shared by two ops of this slice are one parameter."""
    placed = model.ops[start:stop]
    kinds = list(algos) or [0] * len(placed)
    made: dict[str, OpModule] = {}
    for place, algo in zip(placed, kinds, strict=True):
        module = build_op(place, tp, algo, device=device, dtype=dtype or TORCH_DTYPES[model.dtype], seed=seed)
        if place.op.tied_to in made:
            module.weight = made[place.op.tied_to].weight
        elif place.op.tied_to:
            _copy_tied(module, place, seed)
        made[place.name] = module
    return Chain(list(made.values()), placed)


def _copy_tied(module: OpModule, place: PlacedOp, seed: int) -> None:
    """A tied weight whose owner is on another rank starts from the same values as the owner's."""
    from penstock.models.modules.init import init_parameter

    whole = init_parameter(module.whole_shapes["weight"], place.op.tied_to, "weight", seed=seed, device=module.device)
    module.load("weight", whole.detach())
