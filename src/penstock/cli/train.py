"""`penstock train`: from a model and data to training in one command, or from a job file, or from a plan."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli import train_options as option
from penstock.cli.compare import comparison, show_comparison
from penstock.cli.console import JsonFlag, err, format_count, format_time, print_json, progress, say
from penstock.cli.options import slower_ranks
from penstock.errors import InputError, plural, shell_words
from penstock.processes.fork_server import warm_up

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.interrupts import Interrupted
    from penstock.runtime.request import NodePlace, StepReport, TrainResult
    from penstock.runtime.telemetry.predicting import PredictedSteps
    from penstock.runtime.trainer import PlanTrainer
    from penstock.timing.disturbance import Disturbance

__all__ = ["run_training", "train"]


def train(
    context: typer.Context,
    file: option.PlanOrJob = None,
    model: option.ModelSource = "",
    data: option.DataPaths = None,
    path: option.RunFolder = None,
    steps: option.Steps = None,
    tokens_per_batch: option.TokensPerBatch = None,
    cluster: option.JobCluster = "local",
    costs: option.JobCosts = "auto",
    tokenizer: option.JobTokenizer = None,
    changes: option.Changes = None,
    compare: option.CompareFlag = False,
    device: option.DeviceKind = "",
    slow: option.SlowRanks = None,
    disturb: option.DisturbFile = None,
    adapt: option.Adapt = "watch",
    on_death: option.OnDeath = "end",
    copies: option.CopySteps = 10,
    spares: option.Spares = 0,
    node_rank: option.NodeRank = None,
    master: option.Master = "",
    share_gpus: option.ShareGpus = False,
    reserve_memory: option.ReservedShare = 0.0,
    lr: option.PeakRate = 3e-4,
    warmup: option.WarmUp = 0,
    clip: option.ClipNorm = 1.0,
    on_nan: option.OnNan = "stop",
    eval_every: option.EvalEvery = 0,
    checkpoint_every: option.CheckpointEvery = 500,
    keep: option.Keep = 2,
    resume: option.ResumeFrom = "",
    weights: option.FirstWeights = "",
    planners: option.Planners = 1,
    budget_steps: option.BudgetSteps = 0,
    store: option.StoreAddress = "",
    store_timeout: option.StoreTimeout = 60.0,
    torch_profile: option.TorchProfile = "",
    seed: option.Seed = 0,
    deterministic: option.Deterministic = False,
    json: JsonFlag = False,
) -> None:
    """Train a model on your own data in one command, repeat or go on with a job file, or run a plan; on this machine's devices, or as one
    of the processes that torchrun started.

    The same command again goes on where the run was.

    Example: penstock train --model gpt-tiny --data chats.jsonl --out run

    Example: penstock train run/job.yaml --out again --set train.lr=1e-5

    Example: penstock train plan.json --data data --steps 100 --out run --compare
    """
    given = _Given.of(context)
    _check(reserve_memory, adapt)
    if file is None or file.suffix in (".yaml", ".yml"):
        _train_job(file, given, path, changes or [])
    else:
        _train_plan(file, given, data or [], steps, path, partial(_disturbance, slow or [], disturb))


@dataclass(frozen=True)
class _Given:
    """A command line as it was read."""

    values: Mapping[str, Any]
    """Of all options; those that are paths are still text."""
    typed: frozenset[str]
    """Options whose values somebody wrote; others have their defaults."""

    @classmethod
    def of(cls, context: typer.Context) -> _Given:
        typed = (name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE")
        return cls(context.params, frozenset(typed))

    def fields(self, group: str) -> dict[str, Any]:
        """The values of a group of a job's fields, by their names there."""
        return {field.removeprefix(group): self.values[name] for name, field in _FIELDS.items() if field.startswith(group)}


def _train_job(file: Path | None, given: _Given, path: Path | None, changes: list[str]) -> None:
    """Trains the job of a file, or of what was typed alone."""
    from penstock.cli.train_job import run_job

    _refuse(given.typed & set(_PLAN_ONLY), "goes with a plan file, not with a job")
    values = {**given.values, "path": str(path)}
    options = {field: values[name] for name, field in _FIELDS.items() if name in given.typed}
    run_job(file, options, changes, given.values["compare"], given.values["json"])


def _train_plan(
    file: Path, given: _Given, data: list[str], steps: int | None, path: Path | None, disturbance: Callable[[], Disturbance]
) -> None:
    """Trains as a plan file says, in processes of this machine or as one of those that torchrun started."""
    from penstock.plans.schema import read_plan

    _refuse(given.typed & set(_JOB_ONLY), "goes with a job, not with a plan file")
    plan, values = read_plan(file), given.values
    for name, missing in (("--data", not data), ("--steps", steps is None), ("--out", path is None)):
        if missing:
            whole = shell_words("penstock", "train", file, "--data", "DIR", "--steps", "N", "--out", "RUN")
            raise InputError(f"{name} is missing. A plan is trained with: {whole}")
    assert steps is not None
    if len(data) > 1:
        raise InputError(f"--data is given {len(data)} times; a plan takes one folder that `penstock prepare-data` wrote.")
    if values["device"] == "timed":
        _refuse_learning(given.typed)
    if not _is_under_torchrun() or (values["planners"] and os.environ.get("LOCAL_RANK", "0") == "0"):
        warm_up()  # it imports torch while this process does
    from penstock.jobs.job_file import SaveGroup, TrainGroup
    from penstock.jobs.starting import trainer_of, training_request

    # Not validated again: options are checked where they are read, and refused by their names.
    learning, saving = TrainGroup.model_construct(**given.fields("train.")), SaveGroup.model_construct(**given.fields("save."))
    request = training_request(
        plan, data[0], steps, str(path), learning, saving, resume=values["resume"], weights=values["weights"], disturbance=disturbance(),
        node=_node(values["node_rank"], values["master"]), spares=values["spares"],
    )  # fmt: skip
    go_on = f"go on from there with `{shell_words('--resume', path)}`"
    run_training(trainer_of(request, values["adapt"]), compare=values["compare"], json=values["json"], go_on=go_on)


def _is_under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


_FIELDS = {
    "model": "model.source", "weights": "model.weights", "data": "data.path", "tokenizer": "data.tokenizer", "path": "out",
    "cluster": "plan.cluster", "costs": "plan.costs", "tokens_per_batch": "plan.tokens_per_batch", "steps": "train.steps", "lr": "train.lr",
    "warmup": "train.warmup", "clip": "train.clip", "on_nan": "train.on_nan", "seed": "train.seed", "deterministic": "train.deterministic",
    "eval_every": "train.eval_every", "device": "train.device", "adapt": "train.adapt",
    "on_death": "train.on_death", "copies": "train.copies", "share_gpus": "train.share_gpus",
    "reserve_memory": "train.reserve_memory", "planners": "train.planners", "budget_steps": "train.budget_steps", "store": "train.store",
    "store_timeout": "train.store_timeout", "torch_profile": "train.torch_profile", "checkpoint_every": "save.every", "keep": "save.keep",
}  # fmt: skip
"""Options, and the fields of a job that they set."""
_PLAN_ONLY = ("resume", "slow", "disturb", "node_rank", "master", "spares")
_JOB_ONLY = ("model", "cluster", "costs", "tokens_per_batch", "tokenizer", "changes")


def _refuse(given: Set[str], why: str) -> None:
    if given:
        names = ", ".join("--" + {"changes": "set"}.get(name, name).replace("_", "-") for name in sorted(given))
        hint = " The same command again goes on where a job was." if "resume" in given else ""
        raise InputError(f"{names} {why}. Leave it out.{hint}")


def run_training(trainer: PlanTrainer, *, compare: bool, json: bool, go_on: str, more: Mapping[str, Any] | None = None) -> None:
    """Trains, and tells of every step and of the end; `more` goes into the object that `--json` prints, and `go_on` says how to go on."""
    request, under_torchrun = trainer.request, _is_under_torchrun()
    unit = "tokens" if request.plan.seq_length else "images"
    first = os.environ["RANK"] == "0" if under_torchrun else request.node is None or request.node.number == 0
    for note in trainer.notes() if first or not under_torchrun else ():
        say(f"note: {note}", to=err())
    verb = "rehearsing" if request.device == "timed" else "training"
    with progress(verb, request.steps - trainer.first_step, quiet=json or not first) as bar:

        def told(step: StepReport) -> None:
            busy = "" if step.gpu_utilisation is None else f", GPU {step.gpu_utilisation:.0%} busy"
            loss = "" if step.loss is None else f"loss {step.loss:.4f}, "
            bar.describe(f"{loss}{format_count(step.tokens_per_s)} {unit}/s{busy}")
            bar.advance()
            for note in step.notes:
                say(f"note: {note}", to=err())
            if step.evaluated is not None and not json:
                found = step.evaluated
                err().print(f"step {found.step}: held-out loss {found.loss:.4f}, accuracy {found.accuracy:.1%}", markup=False)

        result = trainer.join(told) if under_torchrun else trainer.train(told)
    if result.has_left:
        say("this node has left the run, which goes on without it", to=err())
        raise typer.Exit(128 + result.ended_by)
    if not first and (under_torchrun or not result.losses):  # the first tells, or who leads in its place
        raise typer.Exit(128 + result.ended_by if result.ended_by else 0)
    predicted = trainer.predicted(result) if compare else None
    if json:
        print_json({**(more or {}), **_summary(request.plan, result, predicted)})
    else:
        _show(request.plan, result, predicted, unit)
    if result.ended_by:
        raise _interrupted(result, request.steps, go_on)


def _show(plan: Plan, result: TrainResult, predicted: PredictedSteps | None, unit: str) -> None:
    done = plural(result.num_steps, "step")
    speed = f"{format_time(result.time_s)} a step, {format_count(result.tokens_per_s)} {unit}/s"
    if result.losses:
        told = f"trained {done}: loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}, {speed}; checkpoint in {result.checkpoint}"
    else:
        told = f"rehearsed {done} on timed devices: {speed}. Nothing was computed: there are no losses and no checkpoint."
    say(told)
    if predicted is not None:
        show_comparison(plan, result, predicted)


def _interrupted(result: TrainResult, steps: int, go_on: str) -> Interrupted:
    from penstock.runtime.interrupts import Interrupted

    name, done = signal.Signals(result.ended_by).name, result.first_step + result.num_steps
    where = f"Its checkpoint is in {result.checkpoint}; {go_on}."
    return Interrupted(result.ended_by, f"{name} ended the run after {done} of {plural(steps, 'step')}. {where}")


_LEARNING = (
    "share_gpus", "reserve_memory", "lr", "warmup", "clip", "on_nan", "eval_every", "checkpoint_every", "keep", "resume",
    "weights", "torch_profile", "deterministic", "adapt", "on_death", "copies",
)  # fmt: skip
"""Options that ask for what only devices that compute can give."""


def _refuse_learning(given: Set[str]) -> None:
    refused = ["--" + name.replace("_", "-") for name in _LEARNING if name in given]
    if refused:
        raise InputError(
            f"{', '.join(refused)}: a timed device computes nothing, so there is nothing to learn, notice, evaluate, save or go on from, "
            "and no memory to take. Leave out what is named, or use --device cpu or cuda."
        )


def _disturbance(slow: list[str], path: Path | None) -> Disturbance:
    from penstock.timing.disturbance import Disturbance

    whole_run = Disturbance.of_ranks(slower_ranks(slow))
    if path is None:
        return whole_run
    from penstock.timing.disturbance_file import read_disturbance

    story = read_disturbance(path)
    return Disturbance((*whole_run.changes, *story.changes), story.strikes)


def _node(rank: int | None, master: str) -> NodePlace | None:
    if (rank is None) != (not master):
        raise InputError("--node-rank and --master go together: which node this is, and where node 0 is met. Give both, or neither.")
    if rank is None:
        return None
    from penstock.runtime.nodes.place import node_place

    return node_place(rank, master)


def _check(reserve_memory: float, adapt: str) -> None:
    """Refuses a share that is none, and a way to adapt that there is not."""
    if adapt not in ("off", "watch", "move"):
        raise InputError(f"--adapt is '{adapt}'; off, watch or move was expected.")
    if not 0 <= reserve_memory < 1:
        raise InputError(f"--reserve-memory is {reserve_memory}; a share of the memory from 0 to below 1, such as 0.9, was expected.")


def _summary(plan: Plan, result: TrainResult, predicted: PredictedSteps | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "losses": [loss if math.isfinite(loss) else None for loss in result.losses],
        "evaluated": [{"step": one.step, "loss": one.loss, "accuracy": one.accuracy} for one in result.evaluated],
        "time_s": result.time_s,
        "tokens_per_s": result.tokens_per_s,
        "checkpoint": result.checkpoint,
        "ended_by": signal.Signals(result.ended_by).name if result.ended_by else None,
    }
    if predicted is not None:
        found |= comparison(plan, result, predicted)
    return found
