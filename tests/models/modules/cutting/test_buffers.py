"""Buffers that units change in training, where their forward passes run again."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from penstock.models.modules.cutting.buffers import ChangingBuffers, Met
from penstock.models.modules.cutting.skipping import Skipping


class Stateful(nn.Module):
    """Blocks that change their buffers in training, in place and by others in their stead; what a block returns depends on some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_StatefulBlock() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class _StatefulBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = spectral_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        return x + self.count * torch.tanh(self.norm(self.product(x))) * self.mask


def test_recomputed_units_change_their_buffers_once() -> None:
    """As many micro-batches under way as in a pipeline: those behind have moved the buffers before the first is run again."""
    plain = Stateful()
    module = deepcopy(plain)
    chain = Skipping(module)
    rows = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1))
    chain.trace(lambda module: module(rows[0]))
    for pair in rows.split(2):
        losses = [plain(x) for x in pair]
        again = [chain.run(lambda module, x=x: module(x), 0, 3, {}, recompute=range(3)) for x in pair]  # type: ignore[misc]
        for loss, other in zip(losses, again, strict=True):
            loss.backward()
            other.backward()
            assert torch.equal(loss, other)
    for (name, mine), its in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad), name
    for (name, mine), its in zip(module.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, its), name


def test_constants_are_not_kept_for_each_micro_batch() -> None:
    block = _StatefulBlock()
    block.product, mask = nn.Sequential(), nn.Module()
    mask.register_buffer("values", torch.ones(8, 8))
    block.add_module("masks", mask)
    buffers, first, second = ChangingBuffers(block), Met(), Met()
    for met in (first, second):
        with buffers.run(met):
            block(torch.randn(4, 8))
    assert [store is one for (store, _), one in zip(second, (block._buffers, block.norm._buffers), strict=True)] == [True, True]
    assert len(first) == 2
