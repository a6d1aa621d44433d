"""Bytes that a real forward pass keeps: of all storages it made, those still alive when nothing but the graph is held."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.models.modules import TORCH_DTYPES, Batch, Chain
from penstock.models.ops import ITEM_BYTES, Block, Model, Op
from penstock.models.shapes import Form, Quantity


class Made(TorchDispatchMode):
    """Remembers, weakly, every storage made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(result) if isinstance(x, torch.Tensor)):
            if storage._cdata not in given:  # Not a view of what was there before.
                self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def alive_bytes(self) -> int:
        return sum(size for ref, size in self.storages.values() if not ref.expired())


def measured_bytes(
    chain: Chain, model: Model, batch: Batch, start: int, stop: int, recompute: Any = (), tp: int = 1, told: int | None = None
) -> int:
    """Bytes that the graph of ops `start` to `stop` holds, besides weights and what belongs to the micro-batch; as soon as they are as
    `told`, since the threads of a collective let go of its tensors a while after it is done."""
    part, dtype, device = Chain(chain.ops[start:stop], model.ops[start:stop]), TORCH_DTYPES[model.dtype], batch.labels.device
    specs = model.carry_before(start)
    leaves = {spec.name: torch.ones(spec.shape(batch.shape, tp), dtype=dtype, device=device, requires_grad=True) for spec in specs}

    def run() -> list[Any]:
        carry = {name: leaf * 1 for name, leaf in leaves.items()}
        # One step further than the results: a Python function's node would die with its result.
        return [(x * 1).grad_fn for x in part(batch, carry, recompute).values()]

    run()  # Makes the micro-batch's own tables: rotary angles, keys of samples.
    made = Made()
    with made:
        graph = run()
    deadline = time.monotonic() + 100
    while (found := made.alive_bytes()) != told and told is not None and time.monotonic() < deadline:
        time.sleep(0.002)
    del graph
    return found


def as_on_cpu(model: Model, batch: Batch) -> Model:
    """The description with what torch's CPU kernels keep otherwise than the fused CUDA kernels it speaks of."""

    def change(op: Op) -> Op:
        (split, *more), c, item = op.splits, op.config, ITEM_BYTES[model.dtype]
        side = batch.decoder if c.get("side") == "decoder" else batch.own
        tokens, extra = side.ids.numel(), 0
        if op.kind == "norm" and c["rms"] and item == 4:  # Not fused: the normalised input too.
            extra = tokens * c["width"] * 4
        elif op.kind == "norm" and c["rms"]:  # In half precision that and the input itself, both as fp32 copies.
            extra, split = tokens * c["width"] * 8, replace(split, saves_in=())
        elif op.kind == "norm" and item == 2:  # Mean and deviation in half precision too.
            extra = -4 * tokens
        elif op.kind == "attention" and c["fused"] and side.layout == "packed":  # Results sequence by sequence, besides all of them.
            extra, split = tokens * c["heads"] * c["head_width"] * item, replace(split, saves_out=())
        elif op.kind == "attention" and not c["fused"] and side.layout == "packed":  # Scaled queries, besides the unscaled.
            extra = tokens * c["heads"] * c["head_width"] * item
        if op.kind == "attention" and c["qk_norm"]:  # As for norms.
            extra += tokens * (c["heads"] + c["kv_heads"]) * c["head_width"] * item
        amount = Form.of(one=extra)
        kept = split.kept + (Quantity(split=amount) if op.kind == "attention" else Quantity(whole=amount))
        return replace(op, splits=(replace(split, kept=kept), *more))

    runs = tuple((Block(block.name, tuple(map(change, block.ops))), copies) for block, copies in model.runs)
    return replace(model, runs=runs)
