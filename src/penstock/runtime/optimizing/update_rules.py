"""AdamW and SGD by torch's own functions, without its optimizer classes: those import torch's compiler, seconds in every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from penstock.runtime.settings import OptimizerSettings

__all__ = ["AdamWRule", "SgdRule", "UpdateRule", "update_rule"]


class UpdateRule:
    """Updates fp32 weights from their gradients; `state` has what it keeps for each, under the names of torch's optimizers."""

    def __init__(self, parameters: Iterable[nn.Parameter], settings: OptimizerSettings, lr: float) -> None:
        self.parameters, self.settings, self.lr = list(parameters), settings, lr
        self.state: defaultdict[nn.Parameter, dict[str, torch.Tensor]] = defaultdict(dict)

    def step(self, only: Iterable[nn.Parameter] | None = None) -> None:
        """One update of the weights that have gradients, all or some of them `only`."""
        raise TypeError(f"{type(self).__name__} has no step")

    def _with_gradients(
        self, only: Iterable[nn.Parameter] | None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[dict[str, torch.Tensor]]]:
        """Weights, gradients, and what is kept for each of them."""
        found = [p for p in (self.parameters if only is None else only) if p.grad is not None]
        return list(found), [p.grad for p in found if p.grad is not None], [self.state[p] for p in found]


class AdamWRule(UpdateRule):
    """Adam with decoupled weight decay."""

    @torch.no_grad()
    def step(self, only: Iterable[nn.Parameter] | None = None) -> None:
        weights, gradients, states = self._with_gradients(only)
        for weight, state in zip(weights, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        kept = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        own = self.settings
        adamw(
            weights, gradients, kept[0], kept[1], [], kept[2], foreach=False, fused=True, amsgrad=False, beta1=own.betas[0],
            beta2=own.betas[1], lr=self.lr, weight_decay=own.weight_decay, eps=own.eps, maximize=False,
        )  # fmt: skip


class SgdRule(UpdateRule):
    """Gradient descent with momentum."""

    @torch.no_grad()
    def step(self, only: Iterable[nn.Parameter] | None = None) -> None:
        weights, gradients, states = self._with_gradients(only)
        own = self.settings
        moments = [state.get("momentum_buffer") for state in states]
        sgd(
            weights, gradients, moments, foreach=False, fused=True, weight_decay=own.weight_decay, momentum=own.momentum, lr=self.lr,
            dampening=0.0, nesterov=False, maximize=False,
        )  # fmt: skip
        for state, moment in zip(states, moments, strict=True):
            if moment is not None:
                state["momentum_buffer"] = moment


def update_rule(settings: OptimizerSettings, parameters: Iterable[nn.Parameter], lr: float = 1e-4) -> UpdateRule:
    """The rule that the settings name."""
    return (AdamWRule if settings.kind == "adamw" else SgdRule)(parameters, settings, lr)
