"""The torch-free description and the modules tell the same story: weights, carries, flops, and bytes kept for the backward pass.

Weights, carries and flops are read off fake tensors, kept bytes off a real run. `test_tensor_parallel.py` does the same on two ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_bytes import as_on_cpu, measured_bytes
from oracles.kept import kept_bytes
from small_models import small_batch, small_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from penstock.models.catalog import FAMILIES
from penstock.models.modules import TORCH_DTYPES, Batch, TensorParallel, build_chain, build_op
from penstock.models.ops import Model, PlacedOp
from penstock.models.shapes import Shape

UNFUSED = {"fused_attention": False}
CASES = [
    ("gpt", "padded", {}), ("gpt", "packed", {}), ("gpt", "padded", UNFUSED), ("gpt", "packed", UNFUSED),
    ("gpt", "packed", {"dtype": "bf16", "tied": False}),
    ("gpt", "padded", {**UNFUSED, "attention_dropout": 0.1, "dropout": 0.1}),
    ("llama", "padded", {"window": 5}), ("llama", "padded", {"window": 5, "dtype": "bf16"}), ("llama", "packed", {"window": 12}),
    ("llama", "padded", {}), ("llama", "packed", {"qkv_bias": True, "qk_norm": True}), ("llama", "packed", {"dtype": "bf16"}),
    ("bert", "padded", {}), ("bert", "packed", {}), ("bert", "padded", {"next_sentence": False}),
    ("t5", "padded", {}), ("t5", "padded", {"gated": True, "activation": "gelu_tanh", "tied": False}),
]  # fmt: skip
LENGTHS = {"padded": [12, 12, 12], "packed": [5, 12, 1, 9]}
CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_FLOPS = {
    CPU_FLASH: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *rest, **more: sdpa_backward_flop_count(
        g, q, k, v
    ),
}
"""torch counts the fused kernel only on CUDA."""


def test_every_family_is_held_to_its_modules() -> None:
    convolutional = {"resnet", "vgg"}  # in `test_convolution.py`
    assert {family for family, _, _ in CASES} | convolutional == set(FAMILIES)


def steps(model: Model, batch: Batch) -> Iterator[tuple[PlacedOp, dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]]:
    """Each op with its parameters, the carry it returned and its flops forward and backward."""
    dtype = TORCH_DTYPES[model.dtype]
    carry: dict[str, torch.Tensor] = {}
    for placed in model.ops:
        module = build_op(placed, dtype=dtype)
        carry = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in carry.items()}
        with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as forward:
            carry = module(carry, batch)
        roots = [x for x in carry.values() if x.grad_fn is not None]
        with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as backward:
            torch.autograd.backward(roots, [torch.empty_like(x) for x in roots])
        yield placed, dict(module.named_parameters()), carry, forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("family", "layout", "changes"), CASES)
def test_weights_carries_and_flops(family: str, layout: Any, changes: dict[str, Any]) -> None:
    model = small_model(family, **changes)
    batch = small_batch(model, LENGTHS[layout], layout)
    shape = batch.shape
    with FakeTensorMode(allow_non_fake_inputs=True):
        for placed, parameters, carry, forward, backward in steps(model, batch):
            op, where = placed.op, placed.name
            assert sum(p.numel() for p in parameters.values()) == op.parameters.at(shape), where
            assert list(carry) == [spec.name for spec in op.carry], where
            for spec in op.carry:
                found = carry[spec.name]
                assert tuple(found.shape) == spec.shape(shape), (where, spec.name)
                assert found.dtype == TORCH_DTYPES[model.dtype if spec.dtype == "compute" else spec.dtype], (where, spec.name)
                assert spec.differentiable == found.is_floating_point(), (where, spec.name)
            # The description counts one triangle where a fused kernel does; torch counts the square.
            whole = 2 if op.kind == "attention" and op.config["causal"] and op.config["fused"] else 1
            assert forward == whole * op.flops.at(shape), where
            assert backward == whole * op.backward_flops.at(shape), where
            cut = model.boundary_bytes(placed.index + 1)
            assert cut.at(shape) == sum(x.numel() * x.element_size() for x in carry.values()), where


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5"])
def test_weights_of_a_tensor_parallel_rank(family: str) -> None:
    """Both ranks together hold the whole of what is divided and each the whole of the rest, whichever way it is divided."""
    model = small_model(family)
    one = Shape(1)
    for placed in model.ops:
        whole, split = placed.op.parameters.whole(one), placed.op.parameters.split(one)
        for algo in range(len(placed.op.splits)):
            sizes = [sum(p.numel() for p in build_op(placed, TensorParallel(rank, 2), algo).parameters()) for rank in range(2)]
            assert sum(sizes) == 2 * whole + split, (placed.name, algo, sizes)


def test_a_divided_carry_is_the_description_over_tp() -> None:
    model = small_model("llama", dtype="bf16")
    for index in range(1, model.num_ops):
        cut, shape = model.boundary_bytes(index), Shape.padded(2, 8)
        sizes = [2 * torch.Size(spec.shape(shape, tp=2)).numel() for spec in model.carry_before(index) if spec.name != "logits"]
        if len(sizes) == len(model.carry_before(index)):
            assert cut.at(shape, tp=2) == sum(sizes)


@pytest.mark.parametrize(("family", "layout", "changes"), CASES)
def test_kept_bytes(family: str, layout: Any, changes: dict[str, Any]) -> None:
    """Each op alone, the whole chain, and slices of it with some ops recomputed: to the byte."""
    model = small_model(family, **changes)
    batch = small_batch(model, LENGTHS[layout], layout)
    chain, told = build_chain(model), as_on_cpu(model, batch)
    choice = random.Random(1)
    slices = [(index, index + 1, []) for index in range(model.num_ops)] + [(0, model.num_ops, []), (0, model.num_ops, range(model.num_ops))]
    for _ in range(12):
        start, stop = sorted(choice.sample(range(model.num_ops + 1), 2))
        slices.append((start, stop, [position for position in range(stop - start) if choice.random() < 0.6]))
    for start, stop, recompute in slices:
        found = measured_bytes(chain, model, batch, start, stop, recompute)
        assert found == kept_bytes(told, start, stop, batch.shape, recompute=recompute), (start, stop, recompute)
