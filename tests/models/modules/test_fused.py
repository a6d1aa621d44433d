"""Products that add to gradients in place, and own kernels in Triton's interpreter, against torch's ops."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from penstock.models.modules import fused
from penstock.runtime.parallel.deferred import DeferWeights


def product(seed: int, bias: bool = True) -> tuple[torch.Tensor, nn.Parameter, nn.Parameter | None]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = nn.Parameter(torch.randn(4, 5, generator=generator, dtype=torch.float64))
    return x, weight, nn.Parameter(torch.randn(4, generator=generator, dtype=torch.float64)) if bias else None


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_added_to_those_in_place(bias: bool) -> None:
    x, weight, shift = product(0, bias)
    F.linear(x, weight, shift).square().sum().backward()
    assert x.grad is not None and weight.grad is not None
    wanted = x.grad.clone(), 1 + weight.grad, 1 + shift.grad if shift is not None and shift.grad is not None else None

    x.grad, buffer = None, torch.ones_like(weight)
    weight.grad = buffer
    if shift is not None:
        shift.grad = torch.ones_like(shift)
    y = fused.linear(x, weight, shift)
    assert "_Linear" in type(y.grad_fn).__name__
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, wanted[0])
    torch.testing.assert_close(buffer, wanted[1])
    if shift is not None:
        torch.testing.assert_close(shift.grad, wanted[2])


def test_hooks_run_when_the_gradient_is_complete() -> None:
    x, weight, shift = product(1)
    assert shift is not None
    weight.grad, shift.grad = torch.zeros_like(weight), torch.zeros_like(shift)
    seen: list[float] = []
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.abs().sum())))  # type: ignore[union-attr]
    fused.linear(x, weight, shift).sum().backward()
    assert set(seen) == {float(weight.grad.abs().sum())} and seen[0] > 0  # some versions of torch run them once more
    handle.remove()
    told = len(seen)
    fused.linear(x, weight, shift).sum().backward()
    assert len(seen) == told


def test_without_a_gradient_in_place_it_is_torchs_product() -> None:
    x, weight, shift = product(2)
    assert "_Linear" not in type(fused.linear(x, weight, shift).grad_fn).__name__
    assert shift is not None
    weight.grad, shift.grad = torch.zeros_like(weight), torch.zeros_like(shift)
    with torch.no_grad():
        assert not fused.linear(x, weight, shift).requires_grad


def test_a_mode_that_puts_gradients_aside_sees_the_product() -> None:
    x, weight, shift = product(3)
    assert shift is not None
    weight.grad, shift.grad = torch.zeros_like(weight), torch.zeros_like(shift)
    with DeferWeights() as deferred:
        y = fused.linear(x, weight, shift)
    y.sum().backward()
    assert not weight.grad.any()
    deferred.pay(lambda parameter: None)
    assert weight.grad.any()


def test_a_weight_changed_before_the_backward_pass_is_noticed() -> None:
    x, weight, _ = product(4, bias=False)
    weight.grad = torch.zeros_like(weight)
    y = fused.linear(x, weight, None)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_equal_torchs_ops() -> None:
    # The interpreter is chosen when triton is imported, so it gets a process of its own.
    script = Path(__file__).parent / "triton_cases.py"
    done = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["norm", "gradients", "loss", "columns", "gelu", "carried", "attention", "update"]
