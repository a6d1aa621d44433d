"""Units that look the same from outside and return something else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.models.modules.cutting.skipping import Skipping
from tests.every_cut import in_two, plain


class Alike(nn.Module):
    """Blocks that look the same from outside, and differ by an attribute; with `counts`, each is given what the one before has counted."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.blocks = counts, nn.ModuleList(_Scaled(index) for index in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths, scales, count = [], [], 0
        for index, block in enumerate(self.blocks):
            x, length, scale, found = block(x, count)
            count = found if self.counts else 0
            assert found == (index if self.counts else 0) + 1
            lengths.append(length)
            scales.append(scale)
        for length, scale in zip(lengths, scales, strict=True):
            x = x[:, : length // 2 + 1] * scale if length > 12 else x * scale
        return x.square().sum()


class _Scaled(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.product, self.index = nn.Linear(4, 4), index

    def forward(self, x: torch.Tensor, count: int) -> tuple[torch.Tensor, int, float, int]:
        y = torch.tanh(self.product(x))
        return (torch.cat([y, y], 1) if self.index == 2 else y), x.shape[1], 1.0 + self.index, count + 1


@pytest.mark.parametrize("counts", [False, True])
def test_units_that_only_look_the_same_are_told_apart(counts: bool) -> None:
    """Lengths that grow, numbers that each block gives of its own, and a count that is handed on: of every length."""
    torch.manual_seed(0)
    module = Alike(counts)
    chain = Skipping(module)
    chain.trace(lambda own: own(torch.zeros(2, 8, 4)))
    for length in (8, 5, 7, 9, 6, 8):
        x = torch.randn(2, length, 4)
        loss, wanted = plain(module, lambda own, x=x: own(x))  # type: ignore[misc]
        for cut in range(1, 5):
            got, found = in_two(chain, lambda own, x=x: own(x), cut)  # type: ignore[misc]
            assert torch.equal(got, loss), (length, cut)
            assert all(torch.allclose(found[name], gradient) for name, gradient in wanted.items()), (length, cut)
