"""AdamW, LAMB and SGD by torch's own functions, without its optimizer classes: those import torch's compiler, seconds in every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from penstock.runtime.settings import OptimizerSettings

__all__ = ["AdamWRule", "LambRule", "SgdRule", "UpdateRule", "update_rule"]


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


class LambRule(UpdateRule):
    """LAMB: Adam's direction and weight decay, as long as the tensor's norm says (You et al., 2020).

    The norms are those of whole tensors, of which this rank may hold a part: `advance` takes the gradients in, `direction` says where a
    weight goes, from which whoever knows all parts finds the ratio for `move`.
    """

    @torch.no_grad()
    def advance(self) -> None:
        """Takes the gradients into the moments."""
        weights, gradients, states = self._with_gradients(None)
        first, second = self.settings.betas
        for weight, gradient, state in zip(weights, gradients, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    @torch.no_grad()
    def direction(self, weight: nn.Parameter) -> torch.Tensor:
        """The direction of a weight's step after `advance`, before its length is known; made anew each time, so that none of it is held."""
        state, own = self.state[weight], self.settings
        mean, square = state["exp_avg"] / (1 - own.betas[0] ** state["step"]), state["exp_avg_sq"] / (1 - own.betas[1] ** state["step"])
        return mean.div_(square.sqrt_().add_(own.eps)).add_(weight, alpha=own.weight_decay)

    @torch.no_grad()
    def move(self, weight: nn.Parameter, ratio: torch.Tensor) -> None:
        """One update: the direction, times the learning rate and the ratio of the norms, one number or one for each value."""
        weight.sub_(self.direction(weight).mul_(ratio), alpha=self.lr)


_RULES = {"adamw": AdamWRule, "lamb": LambRule, "sgd": SgdRule}


def update_rule(settings: OptimizerSettings, parameters: Iterable[nn.Parameter], lr: float) -> UpdateRule:
    """The rule that the settings name."""
    return _RULES[settings.kind](parameters, settings, lr)
