"""`penstock.parallelize`: this rank's part of a model under a plan, for a training loop of one's own.

    model = penstock.parallelize("hf:FOLDER", plan)
    optimizer = model.optimizer(torch.optim.AdamW, lr=2e-5)
    for step, batch in loader:
        loss = model.step(batch)          # forward and backward passes of the whole global batch; the same on every rank
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.data.samples import LoadedProgram
from penstock.errors import InputError
from penstock.models.catalog import TRACED
from penstock.models.huggingface import TRANSFORMERS, found_source, hf_folder
from penstock.models.modules.cutting.dividing import styles_of
from penstock.models.modules.cutting.origins import Made, made_of, make_origin
from penstock.models.modules.cutting.seen import Loss
from penstock.models.ops import Model
from penstock.plans.capabilities import require_supported
from penstock.plans.degrees import parts_of
from penstock.plans.plan import Plan
from penstock.plans.ranks import wrongly_started
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import require_valid
from penstock.programs import instructions as i
from penstock.programs.lower import lower
from penstock.programs.work import forward_work
from penstock.runtime.checkpoints.first_weights import open_weights
from penstock.runtime.checkpoints.huggingface import export_hf_checkpoint
from penstock.runtime.checkpoints.module_state import export_module
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.optimizing.optimizer import Optimizer, make_own
from penstock.runtime.optimizing.own_rules import require_divides
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.parallel.module_chain import CutModule, described_styles
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import checkpoint_state, load_state, load_weights, rank_pieces, rank_state
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.rendezvous import job_store
from penstock.runtime.transport.world import ProcessGroups
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES

__all__ = ["Parallel", "parallelize"]


def parallelize(
    model: str | nn.Module | Callable[[], Any], plan: Plan, *, loss: Loss | None = None, tp_plan: Mapping[str, str] | None = None,
    native: bool = True, compile: bool = False, seed: int = 0, groups: ProcessGroups | None = None,
) -> Parallel:  # fmt: skip
    """This process' part of `model` under `plan`; every process that torchrun started calls it.

    Args:
        model: A name of the catalogue, `hf:FOLDER` or the name of a downloaded model behind `hf:` (with its weights, where it has any),
            `module:FILE.py:FUNCTION`, a module, or a function that makes one. A module keeps the weights that it has.
        plan: As `find_plans` or `penstock search` made it for this model.
        loss: `loss(module, micro_batch)` gives a micro-batch's part of the global loss, see `penstock.MicroBatch`. If not given, the module
            is taken to return logits, or something with a field of that name.
        tp_plan: How tensor parallelism divides a module, as `{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}`: that with which the
            plan was found. If not given, the module's own attribute of that name, which models of transformers have.
        native: Whether families that Penstock has itself use its own ops; otherwise they are transformers' own modules, as in a plan of
            `find_plans(…, native=False)`.
        compile: Whether a module's units run through `torch.compile`. Penstock's own ops have kernels of their own, and are never compiled.
        seed: Of first weights that are random, and of dropout.
        groups: The processes of the job, where they were joined already.
    """
    model = found_source(model, native) if isinstance(model, str) else model
    described = model_of(plan)
    require_valid(plan, described, cluster_of(plan))
    _require_runs(plan, described)
    groups = groups or _joined(plan)
    cut = None
    if described.family == TRACED:
        made = _made(model, loss, seed)
        if tp_plan is not None:
            _require_divided_so(plan, described, made, tp_plan)
        cut = CutModule(described, made, groups.device)
        if compile:
            cut.compile()
    elif not isinstance(model, str) or not native or compile or loss is not None or tp_plan is not None:
        raise InputError(
            f"the plan is of Penstock's own {described.family} ops, which have their own loss, and not of this module. Search for a plan "
            "of the module: find_plans with native=False, or --model module:FILE.py:FUNCTION."
        )
    rank = _OpenRank(described, groups, TrainingSettings(seed=seed), cut=cut)
    rank.adopt(plan)
    parallel = Parallel(rank, described)
    folder = hf_folder(model) if isinstance(model, str) else None
    if folder is not None and any(folder.glob("model*.safetensors*")):
        load_weights(open_weights(f"hf:{folder}", described), rank)
    return parallel


def _require_runs(plan: Plan, described: Model) -> None:
    require_supported(plan, described)
    if SCHEDULES[plan.schedule].asynchronous:
        raise InputError(
            f"schedule '{plan.schedule}' updates each stage by itself after every micro-batch; in a loop of your own optimizer.step() "
            f"updates all of them at once. Use a plan with '{DEFAULT_SCHEDULE}', or `penstock train`."
        )


def _require_divided_so(plan: Plan, described: Model, made: Made, tp_plan: Mapping[str, str]) -> None:
    styles, _ = styles_of(made.module, tp_plan, strict=True)
    divides = any(part.tp > 1 for stage in plan.stages for part in parts_of(stage))
    if divides and styles != described_styles(described):
        raise InputError("the plan was found for another tp_plan of this module. Give find_plans the same, or leave it out here.")


def _made(model: str | nn.Module | Callable[[], Any], loss: Loss | None, seed: int) -> Made:
    if isinstance(model, str):
        made = make_origin(model.replace(TRANSFORMERS, "hf:", 1), seed=seed)
        return made if loss is None else replace(made, loss=loss)
    given = model if isinstance(model, nn.Module) else model()
    module, example = (given[0], given[1]) if isinstance(given, tuple) else (given, None)
    if not isinstance(module, nn.Module):
        raise InputError(f"model is a {type(module).__name__}; a name, a torch module, or a function that makes one was expected.")
    return made_of(module, example, loss, seed=seed)


def _joined(plan: Plan) -> ProcessGroups:
    """The processes of the job: those of torchrun, or this one alone."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != len(plan.ranks):
        raise wrongly_started(plan, started)
    kinds = {cluster_of(plan).device(rank).name for rank in plan.ranks}
    device = "cpu" if kinds == {"cpu"} or not torch.cuda.is_available() else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if started == 1:
        return ProcessGroups(device, own=plan.ranks[0], members=plan.ranks)
    store, place, _ = job_store()
    return ProcessGroups(device, store=store, own=plan.ranks[place], members=plan.ranks)


class _OpenRank(Rank):
    """A rank that leaves its gradients where they are: a loop of one's own updates the weights."""

    _moved: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    """Running statistics, and what they were before the last step."""

    def step(self, step: i.Step) -> None:
        """Adds up the loss of all ranks."""
        total = self.world.gather(self._loss).sum(0)
        self.results = (StepResult(total[0], None, 0.0, torch.zeros(()), total),)
        self._moved, self._before = self._before, []

    def take_back(self) -> None:
        """The step is dropped: running statistics are what they were before it."""
        for own, before in self._moved:
            own.copy_(before)


class Parallel:
    """A model under a plan, on this rank. All methods are called by all ranks, with batches of the same step."""

    def __init__(self, rank: _OpenRank, model: Model) -> None:
        self.rank, self.model, self.plan = rank, model, rank.plan
        self.steps = 0
        """Updates so far, those that were skipped among them."""
        self.skipped = False
        """Whether the last update was: fp16's gradients overflowed, and the weights stayed as they were."""
        self._named: str = ""
        self._fresh = True
        """Whether gradients are zero."""
        self._loss = torch.zeros((), device=rank.world.device)
        self._norm: torch.Tensor | None = None
        self._max_norm: float | None = None
        """What the gradients are to be clipped to, once their norm is known."""

    def step(self, batch: LoadedProgram) -> torch.Tensor:
        """Forward and backward passes of a global batch, as its program says; its loss, the same on every rank."""
        _require_loaded(batch)
        if not self._fresh:
            raise InputError("gradients of the step before are still there: call optimizer.zero_grad() after optimizer.step().")
        self._fresh, self._norm, self._max_norm = False, None, None
        self._loss = self.rank.train(batch.program, batch).loss.float()
        return self._loss

    def evaluate(self, batch: LoadedProgram) -> tuple[float, float]:
        """(loss, share of labels that were the most likely ones) of a global batch, without training on it."""
        _require_loaded(batch)
        if self.plan.num_replicas > 1:
            raise InputError("a batch is evaluated by plans of one replica; this one has more. Use `penstock train --eval-every`.")
        programs = lower(self.plan, self.model, [forward_work(batch.program)], batch.program.iteration, training=False)
        own = next(program for program in programs if program.rank == self.rank.world.rank)
        found = self.rank.evaluate(own, batch)
        return found.loss, found.accuracy

    def parameters(self) -> Iterator[nn.Parameter]:
        """Refused: ranks update different weights, and some of them parts."""
        raise InputError("the optimizer holds weights of another rank: make it with model.optimizer(…).")

    def optimizer(self, kind: type[torch.optim.Optimizer], **settings: Any) -> ParallelOptimizer:
        """An optimizer of this class over the weights that this rank updates; half-precision ones have fp32 masters."""
        made = ParallelOptimizer(self, kind, settings)
        self._named = kind.__name__.lower()
        self.rank.update.optimizer = made.inner
        return made

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """The norm of all gradients of all ranks; the next update is made with gradients of at most `max_norm`."""
        self._norm, self._max_norm = self.rank.update.norm(), max_norm
        return self._norm.float()

    @torch.no_grad()
    def _update(self, optimizer: Optimizer) -> None:
        """One update from the gradients in place, unless fp16's have overflowed."""
        update = self.rank.update
        if update.scale is not None and self._norm is None:
            self._norm = update.norm()
        factor, self.skipped = None, False
        if self._norm is not None:  # before the scale adapts
            factor, self.skipped = update.factor(self._norm, self._max_norm), update.is_dropped(self._norm, self._loss)
        if self.skipped:
            self.rank.take_back()
        else:
            optimizer.step(factor)
            for own in update.gradients:
                own.share_updates()
        self.steps += 1

    def save(self, folder: str | Path) -> None:
        """A checkpoint that any plan of this model goes on from."""
        world = self.rank.world
        writer = CheckpointWriter(folder, rank=world.place, world_size=len(world.ranks), token=world.fresh_word())
        writer.save(self.steps, rank_pieces(self.rank), {**rank_state(self.rank), "optimizer": self._named})
        writer.wait()
        world.barrier()  # the first process completes it

    def load(self, folder: str | Path) -> None:
        """Weights, optimizer state and the count of steps of a checkpoint, or of the latest in a folder."""
        checkpoint = Checkpoint(folder)
        load_state(checkpoint_state(checkpoint, self.model, self._named), self.rank)
        self.steps = checkpoint.step

    def export(self, folder: str | Path) -> None:
        """Writes the weights as a folder: for models of transformers one that `from_pretrained` loads."""
        world, first = self.rank.world, self.rank.world.place == 0
        shared = Path(folder).parent
        shared.mkdir(parents=True, exist_ok=True)
        between = shared / f".{Path(folder).name}.checkpoint"
        self.save(between)
        if first:
            write = export_module if self.model.family == TRACED else export_hf_checkpoint
            write(Checkpoint(between), self.model, folder)
            with tempfile.TemporaryDirectory(dir=shared) as bin_:
                between.rename(Path(bin_) / "done")
        world.barrier()


def _require_loaded(batch: LoadedProgram) -> None:
    if not hasattr(batch, "program"):
        raise InputError(f"a batch was expected, as penstock.DynamicLoader gives it, and {type(batch).__name__} was given.")


class ParallelOptimizer(torch.optim.Optimizer):
    """Updates this rank's weights and hands them to whoever else uses them. Learning-rate schedulers of torch take it."""

    def __init__(self, parallel: Parallel, kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
        require_divides(kind, settings, parallel.plan)
        defaults = kind([torch.zeros(1, 1, requires_grad=True)], **settings).defaults
        update, self._parallel = parallel.rank.update, parallel
        held = [held for own in update.gradients for held in own.updated_here()]
        self._rules: list[torch.optim.Optimizer] = []

        def make(weights: list[nn.Parameter]) -> Any:
            self._rules.append(kind(weights, **settings))
            return self._rules[-1]

        self.inner: Optimizer = make_own([one.parameter for one in held], make, {id(one.parameter): one.place.index for one in held})
        super().__init__([one.parameter for one in held] or [torch.zeros((), requires_grad=True)], defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update from the gradients of all ranks."""
        if closure is not None:
            raise InputError("a closure was given to the optimizer; model.step(batch) makes the gradients.")
        said = {name: value for name, value in self.param_groups[0].items() if name != "params"}  # schedulers turn more than rates
        for rule in self._rules:
            for group in rule.param_groups:
                group.update(said)
        self._parallel._update(self.inner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients to zero, in place whatever is asked for: their memory stays."""
        for own in self._parallel.rank.update.gradients:
            own.zero()
        self._parallel._fresh = True
