"""Weights as training might have left them, while a module is tried: first values that are small hide whatever lies before them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["shaken"]

_OF_A_VECTOR = 0.1


@contextmanager
def shaken(module: nn.Module) -> Iterator[None]:
    """Weights that are zero (output projections, gates, places, LoRA's B) or small are of a usual size meanwhile: with matrices of 0.02, as
    many models begin, attention may move the loss by a millionth."""
    generator, before = torch.Generator().manual_seed(0), list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        for p in module.parameters():
            usual = _usual(p)
            if p.is_floating_point() and p.numel() and p.detach().float().square().mean().sqrt() < usual:
                before.append((p.detach(), p.detach().clone()))
                p.detach().add_((torch.randn(p.shape, generator=generator) * usual).to(p.device, p.dtype))
        yield
    finally:
        for weight, value in before:
            weight.copy_(value)


def _usual(p: torch.Tensor) -> float:
    """Of matrices such that sums over their rows keep their size; of vectors less than one, as they may be added to something."""
    return float((p.shape[0] / p.numel()) ** 0.5) if p.ndim > 1 and p.numel() else _OF_A_VECTOR
