"""torch's own optimizer, as settings ask for it: what the update rules of the runtime are held against."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from penstock.runtime.settings import OptimizerSettings


def torch_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW or SGD, fused."""
    if settings.kind == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.SGD(parameters, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
