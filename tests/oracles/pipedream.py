"""Asynchronous 1F1B by plain torch in one process: each stage as old as it would be, one update after every micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from oracles.optimizers import torch_optimizer
from training_jobs import RandomSource

from penstock.models.modules import build_chain
from penstock.models.ops import Model
from penstock.plans.plan import Stage
from penstock.programs.instructions import Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.source import Source, load_share


def emulate(
    model: Model, stages: Sequence[Stage], programs: Sequence[Program], settings: TrainingSettings, source: Source | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the iterations (each the mean over its labels) and the final weights.

    With d stages from stage s to the end, micro-batch m passes stage s after the update of micro-batch m - d of the same program, whether
    that is of the same iteration or of the one before it.
    """
    chain: Any = build_chain(model, seed=settings.seed)
    source, depths = source or RandomSource(model), [len(stages) - index for index in range(len(stages))]
    owned = [[p for module in chain.ops[stage.first : stage.last] for p in module.parameters()] for stage in stages]
    optimizers = [torch_optimizer(settings.optimizer, parameters, settings.rate.peak) for parameters in owned]
    losses = []
    for program in programs:
        ends = program.ends or (len(program.micro_batches),)
        totals, labels = [0.0] * len(ends), [0] * len(ends)
        versions = [[[p.detach().clone() for p in parameters]] for parameters in owned]
        for m, micro in enumerate(program.micro_batches):
            for parameters, kept, depth in zip(owned, versions, depths, strict=True):
                _set(parameters, kept[max(0, m - depth + 1)])
            chain.zero_grad()
            needs, device = ("inputs", "dec_inputs", "labels"), torch.device("cpu")
            batch = load_share(source, program, micro, (0, len(micro.samples)), needs, device, settings.seed)
            batch.weights = (batch.weights > 0).float() / micro.loss_tokens()  # of the micro-batch, not of the global batch
            loss = chain(batch)["loss"]
            batch = sum(m >= end for end in ends)
            totals[batch] += loss.item() * micro.loss_tokens()
            labels[batch] += micro.loss_tokens()
            loss.backward()
            for parameters, kept, optimizer in zip(owned, versions, optimizers, strict=True):
                _set(parameters, kept[m])
                optimizer.param_groups[0]["lr"] = settings.rate.at(program.iteration + batch)
                optimizer.step()
                kept.append([p.detach().clone() for p in parameters])
        losses += [total / count for total, count in zip(totals, labels, strict=True)]
    named = {f"{place.index}.{name}": p for place, op in zip(model.ops, chain.ops, strict=True) for name, p in op.named_parameters()}
    return losses, {name: p.detach() for name, p in named.items()}


def _set(parameters: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
