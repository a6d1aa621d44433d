"""The walk of a job: its samples prepared, its costs found, its plan searched or kept, and the run that then starts or goes on.

    model, raw data ──► tokens, lengths ──► costs ──► plan ──► PlanTrainer
                        once per content    once per   once per question, or as the run folder has it
                                            machine
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.clusters import cluster_to_dict, resolve_cluster
from penstock.errors import InputError, plural
from penstock.jobs.job_file import JobFile, SaveGroup, TrainGroup, anywhere, changed, job_from, read_job, write_job
from penstock.jobs.measuring import chosen_costs
from penstock.jobs.models import first_weights
from penstock.jobs.planning import FoundPlans, PlanQuestion, batch_of, differences, job_cluster, plans_for, require_plan_of
from penstock.jobs.raw_data import PreparedData, prepare_raw, sample_lengths
from penstock.models.catalog import resolve_model
from penstock.models.huggingface import found_source
from penstock.plans.plan import Plan
from penstock.plans.precision import chosen_precision
from penstock.plans.references import cluster_of
from penstock.plans.schema import read_plan, write_plan

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.runtime.request import NodePlace, TrainRequest
    from penstock.runtime.trainer import PlanTrainer
    from penstock.timing.disturbance import Disturbance

__all__ = ["AllDoneError", "ReadyJob", "ready", "trainer_of", "training_request"]

_PLAN = "plan.json"
_DECIDES_PLAN = ("model.", "data.", "plan.")
"""Fields whose change means another plan."""

Progress = Callable[[str], None]


class AllDoneError(InputError):
    """A run with nothing left to do."""


@dataclass(frozen=True, eq=False)
class ReadyJob:
    """A job with everything that its training needs, and what is worth saying of it first."""

    job: JobFile
    """With every field resolved."""
    model: Model
    prepared: PreparedData
    plan: Plan
    found: FoundPlans | None
    """What the search found; None where the plan was given, or kept from an earlier part of the run."""
    costs: str
    """Where costs come from, in words."""
    first_step: int
    changes: tuple[str, ...]
    """Fields that differ from those of the run that this one goes on with."""
    resume: str

    def trainer(self) -> PlanTrainer:
        """The job's trainer; the run's folder has the job from now on."""
        job = self.job
        weights = "" if self.resume else first_weights(found_source(job.model.source), job.model.weights)
        request = training_request(
            self.plan, self.prepared.folder, job.train.steps or 1, job.out, job.train, job.save, resume=self.resume, weights=weights,
            prompt_loss=job.data.prompt_loss,
        )  # fmt: skip
        found = trainer_of(request, job.train.adapt)
        if _is_first():
            self._own_folder()
        return found

    def _own_folder(self) -> None:
        from penstock.runtime.run_folder import JOB, STEPS
        from penstock.runtime.run_lock import run_lock

        out = Path(self.job.out)
        out.mkdir(parents=True, exist_ok=True)
        with run_lock(out):
            if not self.resume:  # steps of an earlier try of this job, of which nothing was saved
                (out / STEPS).unlink(missing_ok=True)
            write_plan(out / _PLAN, self.plan)  # first: who finds the job of now, finds its plan too
            write_job(out / JOB, anywhere(self.job))


def ready(job: JobFile, progress: Progress = lambda text: None) -> ReadyJob:
    """Walks from a job to the training that it means. Whatever is wrong with model, data or options is said before anything is trained."""
    before, resume, first_step = _earlier(job.out)
    job = anywhere(job).with_values(out=job.out, data__path=job.data.path)  # these are told as they were given
    if job.train.device not in ("", "cpu", "cuda"):
        raise InputError(
            f"train.device is '{job.train.device}'; a job trains on cpu or cuda. Rehearse its plan: penstock train PLAN --device timed …"
        )
    source, place = found_source(job.model.source, job.model.native), job_cluster(job.plan.cluster)
    cluster = resolve_cluster(place)
    model, _ = chosen_precision(resolve_model(source), cluster, job.model.precision)
    weights = first_weights(source, job.model.weights)
    progress("preparing data")
    prepared = prepare_raw(
        job.data.path, model, source, tokenizer=job.data.tokenizer, split=job.data.split, over_long=job.data.over_long,
        prompt_loss=job.data.prompt_loss, keeps_weights=bool(weights), fields=job.data.fields,
        report=lambda what, done, total: progress(what),
    )  # fmt: skip
    lengths = [max(1, length) for length in prepared.filled.own.tolist()]
    batch = job.plan.global_batch or batch_of(job.plan.tokens_per_batch, lengths, bool(model.seq_length))
    own_plan = _given_plan(job, model)
    batch = own_plan.global_batch if own_plan else batch
    steps = job.train.steps or max(1, math.ceil(job.train.epochs * len(lengths) / batch))
    whole = job.with_values(
        out=str(Path(job.out)), data__path=[str(Path(path).absolute()) for path in job.data.path], data__folder=prepared.folder,
        plan__global_batch=batch, train__steps=steps,
    )  # fmt: skip
    if first_step >= steps:
        raise AllDoneError(
            f"'{job.out}' has all of its {plural(steps, 'step')} behind it. Ask for more with --steps, or train anew into another --out."
        )
    kept = None if before is None else changed(before, whole)
    plan = own_plan or _kept_plan(job.out, kept, place, model)
    found, about = None, "" if plan is None else plan.costs
    if plan is None:
        progress("measuring costs")
        costs, about = chosen_costs(job.plan.costs, model, cluster, source)
        question = PlanQuestion(
            model, source, place, costs, batch, max(8, max(lengths)), job.model.precision, job.plan.memory_limit_gb, job.plan.time_budget_s
        )  # fmt: skip
        found = plans_for(question, sample_lengths(prepared), progress=progress)
        plan = found.plans()[0]
    return ReadyJob(whole, model, prepared, plan, found, about, first_step, tuple(kept or ()), resume)


def _earlier(out: str) -> tuple[JobFile | None, str, int]:
    """(job, checkpoint to go on from, steps behind it) of what a folder holds of this run; a run that is not of a job is refused."""
    from penstock.runtime.checkpoints.folder import latest_checkpoint, step_of
    from penstock.runtime.run_folder import CHECKPOINTS, JOB, refuse_other_run

    path = Path(out) / JOB
    if not path.is_file():
        refuse_other_run(Path(out), "")
        return None, "", 0
    saved = latest_checkpoint(Path(out) / CHECKPOINTS)
    before = job_from(read_job(path), {}, f"job file '{path}'")
    return before, "" if saved is None else str(saved), 0 if saved is None else step_of(saved)


def _given_plan(job: JobFile, model: Model) -> Plan | None:
    if job.plan.file is None:
        return None
    plan = read_plan(job.plan.file)
    require_plan_of(plan, model)
    return plan


def _kept_plan(out: str, changes: list[str] | None, cluster: str, model: Model) -> Plan | None:
    """The plan of the run that is gone on with, unless something that it depends on has changed, devices and the model's file among it."""
    path = Path(out) / _PLAN
    if changes is None or any(change.startswith(_DECIDES_PLAN) for change in changes) or not path.is_file():
        return None
    plan = read_plan(path)
    same_devices = cluster_to_dict(cluster_of(plan)) == cluster_to_dict(resolve_cluster(cluster))
    return plan if same_devices and not differences(plan, model) else None


def training_request(
    plan: Plan, data: str, steps: int, out: str, train: TrainGroup, save: SaveGroup, *, resume: str = "", weights: str = "",
    prompt_loss: bool = False, disturbance: Disturbance | None = None, node: NodePlace | None = None,
    spares: int = 0,
) -> TrainRequest:  # fmt: skip
    """The runtime's request of a plan, prepared data and the fields of a job."""
    from penstock.runtime.request import PlanningSettings, TrainRequest
    from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
    from penstock.timing.disturbance import Disturbance

    rate = LearningRate(train.lr, train.warmup, steps, train.decay or ("cosine" if train.warmup else "constant"), train.end_share)
    plan = replace(plan, optimizer=train.optimizer or plan.optimizer)
    optimizer = OptimizerSettings(
        plan.optimizer, train.weight_decay, train.betas, train.eps, train.momentum, train.no_decay,  # type: ignore[arg-type]
    )  # fmt: skip
    settings = TrainingSettings(rate, optimizer, train.clip or None, train.seed, train.on_nan, train.deterministic)
    planning = PlanningSettings(train.planners, train.store, train.store_timeout, search_steps=train.budget_steps)
    return TrainRequest(
        plan, data, steps, out, settings, train.device, train.eval_every, checkpoint_every=save.every, keep=save.keep, resume=resume,
        weights=weights, prompt_loss=prompt_loss, profile_steps=_steps(train.torch_profile), share_gpus=train.share_gpus,
        reserve_memory=train.reserve_memory, planning=planning, disturbance=disturbance or Disturbance(), on_death=train.on_death,
        copies=train.copies, node=node, spares=spares,
    )  # fmt: skip


def trainer_of(request: TrainRequest, adapt: str) -> PlanTrainer:
    """The trainer of a request. `adapt`: slow ranks are not noticed (`off`), told (`watch`), or moved away from (`move`)."""
    from penstock.adapting.deaths import RunWitness
    from penstock.adapting.watching import move_run, obey_run, watch_run
    from penstock.runtime.trainer import PlanTrainer

    return PlanTrainer(request, {"off": obey_run, "watch": watch_run, "move": move_run}[adapt], RunWitness(request.out))


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--torch-profile is '{text}'; steps such as 3,4 were expected.") from None


def _is_first() -> bool:
    """Whether this process is the one that writes and tells."""
    return os.environ.get("RANK", "0") == "0"
