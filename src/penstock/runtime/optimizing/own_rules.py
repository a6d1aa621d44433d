"""Whether somebody's optimizer gives the same weights where a plan hands it parts: values laid flat, or the weights of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.plans.degrees import parts_of
from penstock.plans.plan import Plan

__all__ = ["require_divides"]

_SHAPES = (4, 6), (3, 4)
_TOLERANCE = 1e-5


def require_divides(kind: type[torch.optim.Optimizer], settings: dict[str, Any], plan: Plan) -> None:
    """Refuses an optimizer that looks at whole weights (Adafactor), or at all of them (D-Adaptation), where no rank has those. It is tried:
    two steps of small weights, together, one by one, and each in two halves laid flat."""
    zero = max(stage.zero for stage in plan.stages)
    reasons = {
        f"{plan.precision} has fp32 masters laid flat": plan.precision != "fp32", f"ZeRO-{zero} divides them": zero > 1,
        "tensor parallelism divides them": any(part.tp > 1 for stage in plan.stages for part in parts_of(stage)),
    }  # fmt: skip
    flat = [reason for reason, holds in reasons.items() if holds]
    if not flat and plan.num_stages == 1 and not zero:
        return
    first = [torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) for shape in _SHAPES]
    settings = settings | ({"lr": 0.01} if "lr" in settings else {})  # one of zero, to be warmed up, would hide all
    together = _moved(kind, settings, [first])
    alone = _moved(kind, settings, [[one] for one in first])
    halves = _moved(kind, settings, [[half] for one in first for half in one.view(-1).chunk(2)])
    if not torch.allclose(together, alone, rtol=_TOLERANCE):
        raise InputError(f"{kind.__name__} looks at all weights at once, of which each rank of this plan updates some. Use one that "
                         "takes each weight by itself, such as AdamW, or a plan of one stage without ZeRO.")  # fmt: skip
    if flat and not torch.allclose(alone, halves, rtol=_TOLERANCE):
        raise InputError(f"{kind.__name__} looks at whole weights, and {flat[0]} under this plan. Use one that takes each value by "
                         "itself, such as AdamW, or a plan in fp32 with tp 1 and ZeRO at most 1.")  # fmt: skip


def _moved(kind: type[torch.optim.Optimizer], settings: dict[str, Any], groups: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """How far all values went in two steps, an optimizer for each group; nothing comparable where it does not take such weights."""
    moved = []
    for own in groups:
        weights = [nn.Parameter(one.clone()) for one in own]
        try:
            rule = kind(weights, **settings)
        except ValueError:  # as of Muon, which takes matrices alone
            return torch.full((sum(one.numel() for group in groups for one in group),), torch.nan, dtype=torch.float64)
        for _ in range(2):
            for weight in weights:
                weight.grad = weight.detach().sin() + 0.1
            rule.step()
        moved += [(weight.detach() - one).flatten() for weight, one in zip(weights, own, strict=True)]
    return torch.cat(moved)
