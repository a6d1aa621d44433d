"""`penstock train`: from a model and data to training in one command, or from a job file, or from a plan."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.compare import comparison, show_comparison
from penstock.cli.console import JsonFlag, err, format_count, format_time, print_json, progress, say
from penstock.cli.options import BIG, MAX_PLANNERS, MAX_SEARCH_STEPS, SEED, folder_to_write, slower_ranks, within
from penstock.errors import InputError
from penstock.processes.fork_server import warm_up

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.interrupts import Interrupted
    from penstock.runtime.request import NodePlace, StepTold, TrainResult
    from penstock.runtime.telemetry.predicting import PredictedSteps
    from penstock.runtime.trainer import PlanTrainer
    from penstock.timing.disturbance import Disturbance

__all__ = ["run_training", "train"]


def train(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN|JOB", help="A plan file, as `penstock search --out` writes it, or a job file (.yaml)."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model name, YAML file, hf:FOLDER or module:FILE.py:FUNCTION; it is planned for first.")] = "",
    data: Annotated[
        list[str] | None, typer.Option(help="JSONL, CSV, Parquet or text file, or folder of Hugging Face datasets; repeatable. Or a folder "
                                         "that `penstock prepare-data` wrote.")
    ] = None,
    path: Annotated[
        Path | None, typer.Option("--out", metavar="RUN", callback=folder_to_write, help="Folder for checkpoints, steps and spans.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(callback=within(1, BIG), help="Iterations in all, those before a checkpoint included; a job: one epoch."),
    ] = None,
    tokens_per_batch: Annotated[
        int | None, typer.Option(callback=within(1, BIG), help="Tokens of a global batch of a job, on average; 65,536 if not given.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="Devices of a job: `local`, a cluster file, or a shorthand such as 4xa100-40gb.")] = "local",
    costs: Annotated[
        str, typer.Option(help="Costs of a job: roofline, profile:FILE, measure (a minute, once); auto: measure on a GPU.")
    ] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer of a job: a file or folder; the model's own if not given.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change any field of a job, as in train.lr=1e-5; repeatable.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Print predicted against measured times and memory, and what differs most.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda; what the plan's cluster has if not given. timed: rehearse it, ops being waits. paced: train on the "
            "processor, at the pace of the plan's devices."
        ),
    ] = "",
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK=FACTOR", help="With timed and paced devices: this rank takes so many times as long; repeatable."),
    ] = None,
    disturb: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="What slows timed and paced devices down, or strikes ranks, and at which steps (YAML)."),
    ] = None,
    adapt: Annotated[
        str,
        typer.Option(metavar="off|watch|move", help="watch: notice slow ranks, say what could be done (`penstock events`); move: do it."),
    ] = "watch",
    on_death: Annotated[
        str,
        typer.Option(metavar="end|recover", help="When a rank dies or freezes: end, or go on with another process in its place."),
    ] = "end",
    copies: Annotated[
        int,
        typer.Option(metavar="STEPS", callback=within(0, BIG), help="With recover: steps between copies to go on from; 0: none."),
    ] = 10,
    spares: Annotated[
        int,
        typer.Option(metavar="N", callback=within(0, BIG), help="With recover: devices that take the place of lost ones."),
    ] = 0,
    node_rank: Annotated[
        int | None,
        typer.Option(metavar="R", callback=within(0, BIG), help="On several nodes: which of them this is; it starts those of its ranks."),
    ] = None,
    master: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="With --node-rank: where node 0 is met, whose address this is.")
    ] = "",
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Let several ranks run on one GPU, each with its part under MPS.")
    ] = False,
    reserve_memory: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of each GPU's memory to take at the start, such as 0.9; 0: as it is needed.")
    ] = 0.0,
    lr: Annotated[float, typer.Option(callback=within(0, 1e30), help="Highest learning rate.")] = 3e-4,
    warmup: Annotated[
        int, typer.Option(callback=within(0, BIG), help="Steps in which the learning rate rises; it then falls as a cosine.")
    ] = 0,
    clip: Annotated[
        float, typer.Option(callback=within(0, BIG), help="Largest norm of the gradients; 0: any, as asynchronous schedules need.")
    ] = 1.0,
    on_nan: Annotated[str, typer.Option(help="At a loss or gradients that are not finite: stop, or skip the update.")] = "stop",
    eval_every: Annotated[
        int, typer.Option(callback=within(0, BIG), help="Steps between evaluations on the held-out split; 0: never.")
    ] = 0,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            callback=within(0, BIG), help="Steps between checkpoints, of which there is one every ten minutes besides; 0: only at the end."
        ),
    ] = 500,
    keep: Annotated[
        int, typer.Option(callback=within(1, BIG), help="Checkpoints that stay, the newest ones; the best by evaluation stays besides.")
    ] = 2,
    resume: Annotated[str, typer.Option(metavar="CHECKPOINT", help="Go on from this checkpoint, or the latest of a folder.")] = "",
    weights: Annotated[
        str, typer.Option(metavar="SOURCE", help="Begin with the weights of hf:FOLDER (safetensors of Hugging Face) or of a checkpoint.")
    ] = "",
    planners: Annotated[
        int,
        typer.Option(
            callback=within(0, MAX_PLANNERS), help="Planner processes on each node; 0: every rank plans for itself (for debugging)."
        ),
    ] = 1,
    budget_steps: Annotated[
        int,
        typer.Option(
            callback=within(0, MAX_SEARCH_STEPS), help="Steps of search for each batch of dynamic micro-batches; 0: plan at once."
        ),
    ] = 0,
    store: Annotated[
        str, typer.Option(help="Store between planners and ranks, such as file:store.json; PENSTOCK_STORE, or one of its own if not given.")
    ] = "",
    store_timeout: Annotated[
        float, typer.Option(callback=within(0, BIG), help="Seconds that the store may be away before the run ends with a checkpoint.")
    ] = 60.0,
    torch_profile: Annotated[str, typer.Option(metavar="STEPS", help="Write torch.profiler traces of these steps, such as 3,4.")] = "",
    seed: Annotated[int, typer.Option(callback=within(0, SEED), help="Of weights, dropout and the order of samples.")] = 0,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="On a GPU: the same losses to the bit in every run, at some cost in speed.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Train a model on your own data in one command, repeat or go on with a job file, or run a plan; on this machine's devices, or as one
    of the processes that torchrun started.

    The same command again goes on where the run was.

    Example: penstock train --model gpt-tiny --data chats.jsonl --out run

    Example: penstock train run/job.yaml --out again --set train.lr=1e-5

    Example: penstock train plan.json --data data --steps 100 --out run --compare
    """
    _check(reserve_memory, adapt)
    under_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if file is None or file.suffix in (".yaml", ".yml"):
        from penstock.cli.train_job import run_job

        _refuse(given & set(_PLAN_ONLY), "goes with a plan file, not with a job")
        values = {name: str(path) if name == "path" else value for name, value in context.params.items()}
        run_job(file, {field: values[name] for name, field in _FIELDS.items() if name in given}, changes or [], compare, json)
        return
    _refuse(given & set(_JOB_ONLY), "goes with a job, not with a plan file")
    from penstock.plans.schema import read_plan

    plan = read_plan(file)
    for name, missing in (("--data", not data), ("--steps", steps is None), ("--out", path is None)):
        if missing:
            raise InputError(f"{name} is missing. A plan is trained with: penstock train {file} --data DIR --steps N --out RUN")
    assert data is not None and steps is not None and path is not None
    if len(data) > 1:
        raise InputError(f"--data is given {len(data)} times; a plan takes one folder that `penstock prepare-data` wrote.")
    if device == "timed":
        _refuse_learning(given)
    if not under_torchrun or (planners and os.environ.get("LOCAL_RANK", "0") == "0"):
        warm_up()  # it imports torch while this process does
    from penstock.jobs.job_file import SaveGroup, TrainGroup
    from penstock.jobs.starting import trainer_of, training_request

    # Not validated again: options are checked where they are read, and refused by their names.
    groups = {prefix: {field.removeprefix(prefix): context.params[name] for name, field in _FIELDS.items() if field.startswith(prefix)}
              for prefix in ("train.", "save.")}  # fmt: skip
    request = training_request(
        plan, data[0], steps, str(path), TrainGroup.model_construct(**groups["train."]), SaveGroup.model_construct(**groups["save."]),
        resume=resume, weights=weights, disturbance=_disturbance(slow or [], disturb), node=_node(node_rank, master), spares=spares,
    )  # fmt: skip
    run_training(trainer_of(request, adapt), compare=compare, json=json, go_on=f"go on from there with --resume '{path}'")


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


def _refuse(given: set[str], why: str) -> None:
    if given:
        names = ", ".join("--" + {"changes": "set"}.get(name, name).replace("_", "-") for name in sorted(given))
        hint = " The same command again goes on where a job was." if "resume" in given else ""
        raise InputError(f"{names} {why}. Leave it out.{hint}")


def run_training(trainer: PlanTrainer, *, compare: bool, json: bool, go_on: str, more: Mapping[str, Any] | None = None) -> None:
    """Trains, and tells of every step and of the end; `more` goes into the object that `--json` prints, and `go_on` says how to go on."""
    request, under_torchrun = trainer.request, "WORLD_SIZE" in os.environ and "RANK" in os.environ
    unit = "tokens" if request.plan.seq_length else "images"
    first = os.environ["RANK"] == "0" if under_torchrun else request.node is None or request.node.number == 0
    for note in trainer.notes() if first else ():
        say(f"note: {note}", to=err())
    verb = "rehearsing" if request.device == "timed" else "training"
    with progress(verb, request.steps - trainer.first_step, quiet=json or not first) as bar:

        def told(step: StepTold) -> None:
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
    done = "1 step" if result.num_steps == 1 else f"{result.num_steps} steps"
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
    return Interrupted(result.ended_by, f"{name} ended the run after {done} of {steps} steps. {where}")


_LEARNING = (
    "share_gpus", "reserve_memory", "lr", "warmup", "clip", "on_nan", "eval_every", "checkpoint_every", "keep", "resume",
    "weights", "torch_profile", "deterministic", "adapt", "on_death", "copies",
)  # fmt: skip
"""Options that ask for what only devices that compute can give."""


def _refuse_learning(given: set[str]) -> None:
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
