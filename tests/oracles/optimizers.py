"""torch's own optimizer, as settings ask for it: what the update rules of the runtime are held against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from penstock.runtime.settings import OptimizerSettings


class Lamb(torch.optim.Optimizer):
    """LAMB on whole tensors, as its paper has it: bias-corrected moments, weight decay in the direction, norms of each tensor."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: OptimizerSettings, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": settings.weight_decay})
        self.settings = settings

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (first, second), eps = self.settings.betas, self.settings.eps
        for group in self.param_groups:
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                state["n"] = state.get("n", 0) + 1
                state["m"] = first * state.get("m", 0) + (1 - first) * weight.grad
                state["v"] = second * state.get("v", 0) + (1 - second) * weight.grad**2
                mean, square = state["m"] / (1 - first ** state["n"]), state["v"] / (1 - second ** state["n"])
                way = mean / (square.sqrt() + eps) + group["weight_decay"] * weight
                norms = weight.norm(), way.norm()
                weight -= group["lr"] * (norms[0] / norms[1] if min(norms) > 0 else 1.0) * way


def torch_optimizer(settings: OptimizerSettings, parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW or SGD, fused, or LAMB; of names without decay only `vectors` is known."""
    own = list(parameters)
    vectors = [p for p in own if p.dim() <= 1] if settings.no_decay else []
    rest = [p for p in own if p.dim() > 1 or not settings.no_decay]
    groups: list[dict[str, Any]] = [{"params": rest}, *([{"params": vectors, "weight_decay": 0.0}] if vectors else [])]
    if settings.kind == "lamb":
        return Lamb(groups, settings, lr)
    if settings.kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True)
    return torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True)
