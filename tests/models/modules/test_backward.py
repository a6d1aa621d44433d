"""Backward passes: on the thread that asks for them, and the gradients that torch gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from penstock.models.modules import run_backward

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_nobody_else_runs_it(device: str) -> None:
    leaf = torch.tensor([1.0, 2.0], device=device, requires_grad=True)
    made = leaf * leaf
    seen: list[tuple[int, bool]] = []
    made.register_hook(lambda _: seen.append((threading.get_ident(), torch.autograd.is_multithreading_enabled())))
    run_backward([get_gradient_edge(made), (3.0 * leaf).sum()], [torch.tensor([1.0, 10.0], device=device), torch.ones((), device=device)])
    assert seen == [(threading.get_ident(), False)]
    assert torch.autograd.is_multithreading_enabled()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0 * 1.0 + 3.0, 4.0 * 10.0 + 3.0]
