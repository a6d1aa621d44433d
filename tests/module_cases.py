"""Plans of somebody's modules, and the plain single-process training that they must equal: each sample by itself, without padding."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import module_zoo
import runtime_cases
import torch
from oracles.optimizers import torch_optimizer
from runtime_cases import Case, Choice, make_case
from torch.nn import functional as F
from training_jobs import RandomSource

from penstock.models.description import model_to_description
from penstock.models.modules.cutting.describing import describe_origin
from penstock.models.ops import Model
from penstock.models.stored import stored_name
from penstock.runtime.settings import TrainingSettings

ZOO = Path(module_zoo.__file__)
PLAIN: Choice = {"pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "padded", "recompute": "some", "cuts": "even",
                 "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@cache
def described(name: str) -> Model:
    """The model of `module:module_zoo.py:NAME`."""
    return describe_origin(f"module:{ZOO}:{name}")


def module_case(name: str, seed: int = 3, iterations: int = 5, **choice: Any) -> Case:
    """A plan of a model of the zoo."""
    model = described(name)
    fields = {"family": "traced", "description": model_to_description(model), "seq_length": model.seq_length}
    with mock.patch.dict(runtime_cases.MODELS, {name: fields}):
        return make_case(PLAIN | choice | {"family": name}, seed, iterations)


def plain_training(name: str, case: Case, settings: TrainingSettings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop over samples."""
    module: Any = getattr(module_zoo, name)()[0]
    optimizer = torch_optimizer(settings.optimizer, list(module.parameters()), settings.rate.peak)
    source, losses = RandomSource(case.model), []
    for iteration, programs in enumerate(case.programs()):
        optimizer.param_groups[0]["lr"] = settings.rate.at(iteration)
        optimizer.zero_grad()
        total = 0.0
        for program in {program.replica: program for program in programs}.values():
            for micro in program.micro_batches:
                for sample, length in zip(micro.samples, micro.lengths or [0] * len(micro.samples), strict=True):
                    one = source.sample(iteration, sample, length, 0)
                    out = module(torch.from_numpy(one.inputs)[None])
                    logits = out if isinstance(out, torch.Tensor) else out.logits
                    labels = torch.from_numpy(one.labels).view(-1)
                    loss = F.cross_entropy(logits.flatten(0, -2), labels, reduction="sum") / program.loss_tokens
                    loss.backward()
                    total += loss.item()
        if settings.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), settings.clip_norm)
        optimizer.step()
        losses.append(total)
    return losses, {name: p.detach() for name, p in module.named_parameters()}


def weights_apart(case: Case, outcomes: Any, weights: dict[str, torch.Tensor]) -> float:
    """The largest difference of any rank's weights, relative to the largest value of each; all of them must be held by some rank."""
    worst, seen = 0.0, set()
    for outcome in outcomes:
        for weight in outcome.weights:
            name = stored_name(case.model.ops[weight.op], weight.name)
            seen.add(name)
            worst = max(worst, ((weight.values - weights[name]).abs().max() / weights[name].abs().max().clamp_min(1e-3)).item())
    assert seen == set(weights)
    return worst
