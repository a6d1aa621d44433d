"""Measuring the optimizer's step over the weights of a chain."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from penstock.costs.profile import OptimizerPoint
from penstock.models.modules import Chain
from penstock.profiling.marks import times_for
from penstock.profiling.measure import hold_gradients
from penstock.runtime.optimizing.optimizer import make_adamw, squared_norms
from penstock.runtime.parallel.module_chain import ModuleChain

__all__ = ["optimizer_points"]

_STEPS = 5
_AHEAD_S = 0.01
"""How long the device is kept busy before a step, so that its own time is seen and not how long it waits for the host."""


def optimizer_points(dtype: str, chain: Chain | ModuleChain, device: torch.device) -> list[OptimizerPoint]:
    """The step over a whole short chain and over its largest op, so that time for each weight and for each tensor can be told apart."""
    largest = max(chain.ops, key=lambda op: sum(p.numel() for p in op.parameters()))
    return [_point(dtype, num_ops, list(part.parameters()), device) for num_ops, part in ((len(chain.ops), chain), (1, largest))]


def _point(dtype: str, num_ops: int, parameters: list[nn.Parameter], device: torch.device) -> OptimizerPoint:
    trained = [p for p in parameters if p.requires_grad]
    hold_gradients(trained)
    optimizer, clock = make_adamw(trained), times_for(device)
    times = []
    for _ in range(_STEPS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        clock.get_ahead(_AHEAD_S)
        start = clock.mark()
        optimizer.step(squared_norms([p.grad for p in trained]).sum().sqrt().float().clamp(max=1.0))
        optimizer.zero_grad()
        end = clock.mark()
        clock.finish()
        times.append(clock.between(start, end))
    # The first step makes the optimizer's state.
    return OptimizerPoint(dtype, sum(p.numel() for p in trained), num_ops, statistics.median(times[1:]))
