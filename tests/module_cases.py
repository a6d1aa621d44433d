"""Plans of somebody's modules, and the plain single-process training that they must equal: each sample by itself, without padding."""

from __future__ import annotations

import time
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
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

from penstock.data.samples import Sample
from penstock.models.description import model_to_description
from penstock.models.modules.build import build_op
from penstock.models.modules.cutting.describing import describe_origin
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model
from penstock.models.stored import stored_name
from penstock.programs.instructions import Program
from penstock.runtime.checkpoints.folder import LATEST
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.world import World
from penstock.runtime.worker import Worker

ZOO = Path(module_zoo.__file__)
PLAIN: Choice = {"pp": 1, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "padded", "recompute": "some", "cuts": "even",
                 "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@cache
def described(name: str, precision: str = "fp32") -> Model:
    """The model of `module:module_zoo.py:NAME`."""
    return describe_origin(f"module:{ZOO}:{name}", precision)


def module_case(name: str, seed: int = 3, iterations: int = 2, precision: str = "fp32", **choice: Any) -> Case:
    """A plan of a model of the zoo. The second iteration begins with weights that the first has changed."""
    model = described(name, precision)
    lengths = {"seq_length": model.seq_length, "dec_length": model.dec_length}
    fields = {"family": "traced", "description": model_to_description(model), **lengths}
    with mock.patch.dict(runtime_cases.MODELS, {name: fields}):
        case = make_case(PLAIN | choice | {"family": name}, seed, iterations, precision)
    return replace(case, model=model)


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
                nothing = (0,) * len(micro.samples)
                for sample in zip(micro.samples, micro.lengths or nothing, micro.dec_lengths or nothing, strict=True):
                    one = source.sample(iteration, *sample)
                    targets = {} if one.dec_inputs is None else {"decoder_input_ids": torch.from_numpy(one.dec_inputs)[None]}
                    out = module(torch.from_numpy(one.inputs)[None], **targets)
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


def plain_statistics(name: str, case: Case, settings: TrainingSettings) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and running statistics of a plain loop over what each rank of one replica runs together; after a step its mean over them."""
    module: Any = getattr(module_zoo, name)()[0]
    optimizer = torch_optimizer(settings.optimizer, list(module.parameters()), settings.rate.peak)
    source, losses, dp = RandomSource(case.model), [], case.plan.stages[0].degrees.dp
    for iteration, (program, *_) in enumerate(case.programs()):
        optimizer.zero_grad()
        total, before, after = 0.0, deepcopy(dict(module.named_buffers())), []
        for share in range(dp):
            module.load_state_dict(before, strict=False)
            for micro in program.micro_batches:
                if samples := micro.samples[slice(*micro.share(dp, share))]:
                    drawn = [source.sample(iteration, one, 0, 0) for one in samples]
                    labels = torch.tensor([int(one.labels) for one in drawn])
                    logits = module(torch.stack([torch.from_numpy(one.inputs) for one in drawn]))
                    loss = F.cross_entropy(logits, labels, reduction="sum") / program.loss_tokens
                    loss.backward()
                    total += loss.item()
            after.append(deepcopy(dict(module.named_buffers())))
        module.load_state_dict({key: sum(one[key] for one in after) / dp for key in before}, strict=False)
        optimizer.step()
        losses.append(total)
    return losses, list(module.buffers())


def weights_apart(case: Case, outcomes: Any, weights: dict[str, torch.Tensor]) -> float:
    """The largest difference of any rank's weights, relative to the largest value of each; all of them must be held by some rank."""
    worst, seen = 0.0, set()
    for outcome in outcomes:
        for weight in outcome.weights:
            place = case.model.ops[weight.op]
            name = stored_name(place, weight.name)
            seen.add(name)
            shard = build_op(place, TensorParallel(weight.tp_rank, weight.tp_size), device="meta").shards[weight.name]
            whole = weights[name] if shard is None else shard(weights[name])
            worst = max(worst, ((weight.values - whole).abs().max() / whole.abs().max().clamp_min(1e-3)).item())
    assert seen == set(weights)
    return worst


@dataclass(frozen=True)
class GivenBatch:
    """A program with random samples: what a loader gives."""

    program: Program
    source: RandomSource

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """Draws the sample."""
        return self.source.sample(iteration, sample, length, dec_length)


class Killed(Exception):
    """What a test lets a rank meet."""


def save_values(worker: Worker, case: Case, folder: str, value: float, dies: bool) -> None:
    """A job for workers: saves a model whose weights are all `value`. If it `dies`, rank 0 ends before the checkpoint is whole; else rank 1
    is late: what lies there in its name, rank 0 may take."""
    import penstock

    model = penstock.parallelize(case.model.config["origin"], case.plan, groups=worker.groups)
    for stage in model.rank.stages.values():
        for held in stage.held:
            held.parameter.detach().fill_(value)
    write_part = CheckpointWriter._write_part

    def killed(*_: Any) -> None:
        raise Killed

    def late(writer: CheckpointWriter, partial: Path, *given: Any) -> None:
        while (partial / "rank-00001.json").exists() and not (partial.parent / LATEST).exists():
            time.sleep(0.01)
        write_part(writer, partial, *given)

    changed = {"_complete": killed} if dies else {"_write_part": late} if worker.rank == 1 else {}
    with mock.patch.multiple(CheckpointWriter, **changed) if changed else nullcontext():
        try:
            model.save(folder)
        except Killed:
            model.rank.world.barrier()


def own_loop(worker: Worker, name: str, case: Case, settings: TrainingSettings, folder: str, resume: bool) -> list[float]:
    """A job for workers: a training loop of one's own; it saves and exports what it trained."""
    import penstock

    origin = case.model.config["origin"]
    if worker.rank not in case.plan.ranks:
        World(case.plan, worker.groups)
        return []
    model = penstock.parallelize(origin, case.plan, groups=worker.groups)
    own = settings.optimizer
    optimizer = model.optimizer(torch.optim.AdamW, lr=settings.rate.peak, betas=own.betas, eps=own.eps, weight_decay=own.weight_decay)
    if resume:
        model.load(folder)
    losses = []
    for programs in case.programs()[model.steps :]:
        batch: Any = GivenBatch(programs[model.rank.world.place], RandomSource(case.model))
        before, hits = model.evaluate(batch)
        losses.append(model.step(batch).item())
        assert abs(before - losses[-1]) <= 1e-5 * abs(before) and 0.0 <= hits < 0.5, "the loss of the same weights"
        assert settings.clip_norm is not None
        model.clip_grad_norm_(settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    model.save(folder)
    model.export(f"{folder}-exported-{len(case.programs())}")
    return losses
