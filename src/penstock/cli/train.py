"""`penstock train`: run a plan."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.compare import comparison, show_comparison
from penstock.cli.console import JsonFlag, err, format_count, format_time, out, print_json, progress
from penstock.cli.options import BIG, MAX_PLANNERS, MAX_SEARCH_STEPS, SEED, folder_to_write, within
from penstock.errors import InputError
from penstock.processes.fork_server import warm_up

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.interrupts import Interrupted
    from penstock.runtime.request import StepTold, TrainResult
    from penstock.runtime.run import Watching
    from penstock.runtime.settings import TrainingSettings
    from penstock.runtime.telemetry.predicting import PredictedSteps
    from penstock.timing.disturbance import Disturbance

__all__ = ["train"]


def train(
    context: typer.Context,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, as `penstock search --out` writes it.")],
    data: Annotated[str, typer.Option(help="Folder that `penstock prepare-data` wrote.")],
    steps: Annotated[int, typer.Option(callback=within(1, BIG), help="Iterations in all, those before a checkpoint included.")],
    path: Annotated[Path, typer.Option("--out", metavar="RUN", callback=folder_to_write, help="Folder for checkpoints, steps and spans.")],
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
        Path | None, typer.Option(metavar="FILE", help="With timed and paced devices: what slows them down, and at which steps (YAML).")
    ] = None,
    adapt: Annotated[
        str,
        typer.Option(metavar="off|watch|move", help="watch: notice slow ranks, say what could be done (`penstock events`); move: do it."),
    ] = "watch",
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
    """Train a plan's model on prepared data, on this machine's devices, or as one of the processes that torchrun started.

    Example: penstock train plan.json --data data --steps 100 --out run --compare
    """
    from penstock.plans.schema import read_plan

    given = read_plan(plan)
    _check(reserve_memory, adapt)
    if device == "timed":
        _refuse_learning(context)
    under_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    if not under_torchrun or (planners and os.environ.get("LOCAL_RANK", "0") == "0"):
        warm_up()  # it imports torch while this process does
    from penstock.runtime.request import PlanningSettings, TrainRequest
    from penstock.runtime.trainer import Trainer

    trainer = Trainer(TrainRequest(
        given, data, steps, str(path), _settings(given, steps, lr, warmup, clip, seed, on_nan, deterministic), device, eval_every,
        checkpoint_every=checkpoint_every, keep=keep, resume=resume, weights=weights, profile_steps=_steps(torch_profile),
        share_gpus=share_gpus, reserve_memory=reserve_memory,
        planning=PlanningSettings(planners, store, store_timeout, search_steps=budget_steps), disturbance=_disturbance(slow or [], disturb),
    ), _watching(adapt))  # fmt: skip
    unit = "tokens" if given.seq_length else "images"
    first = not under_torchrun or os.environ["RANK"] == "0"
    for note in trainer.notes() if first else ():
        err().print(f"note: {note}", markup=False, soft_wrap=True)
    with progress("rehearsing" if device == "timed" else "training", steps - trainer.first_step, quiet=json or not first) as bar:

        def told(step: StepTold) -> None:
            busy = "" if step.gpu_utilisation is None else f", GPU {step.gpu_utilisation:.0%} busy"
            loss = "" if step.loss is None else f"loss {step.loss:.4f}, "
            bar.describe(f"{loss}{format_count(step.tokens_per_s)} {unit}/s{busy}")
            bar.advance()
            for note in step.notes:
                err().print(f"note: {note}", markup=False, soft_wrap=True)
            if step.evaluated is not None and not json:
                found = step.evaluated
                err().print(f"step {found.step}: held-out loss {found.loss:.4f}, accuracy {found.accuracy:.1%}", markup=False)

        result = trainer.join(told) if under_torchrun else trainer.train(told)
    if not first:  # the first tells
        raise typer.Exit(128 + result.ended_by if result.ended_by else 0)
    predicted = trainer.predicted(result) if compare else None
    if json:
        print_json(_summary(given, result, predicted))
    else:
        _show(given, result, predicted, unit)
    if result.ended_by:
        raise _interrupted(result, steps, path)


def _show(plan: Plan, result: TrainResult, predicted: PredictedSteps | None, unit: str) -> None:
    done = "1 step" if result.num_steps == 1 else f"{result.num_steps} steps"
    speed = f"{format_time(result.time_s)} a step, {format_count(result.tokens_per_s)} {unit}/s"
    if result.losses:
        told = f"trained {done}: loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}, {speed}; checkpoint in {result.checkpoint}"
    else:
        told = f"rehearsed {done} on timed devices: {speed}. Nothing was computed: there are no losses and no checkpoint."
    out().print(told, markup=False, soft_wrap=True)
    if predicted is not None:
        show_comparison(plan, result, predicted)


def _interrupted(result: TrainResult, steps: int, path: Path) -> Interrupted:
    from penstock.runtime.interrupts import Interrupted

    name, done = signal.Signals(result.ended_by).name, result.first_step + result.num_steps
    where = f"Its checkpoint is in {result.checkpoint}; go on from there with --resume '{path}'."
    return Interrupted(result.ended_by, f"{name} ended the run after {done} of {steps} steps. {where}")


_LEARNING = (
    "share_gpus", "reserve_memory", "lr", "warmup", "clip", "on_nan", "eval_every", "checkpoint_every", "keep", "resume",
    "weights", "torch_profile", "deterministic", "adapt",
)  # fmt: skip
"""Options that ask for what only devices that compute can give."""


def _refuse_learning(context: typer.Context) -> None:
    given = [
        "--" + name.replace("_", "-") for name in _LEARNING if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    ]
    if given:
        raise InputError(
            f"{', '.join(given)}: a timed device computes nothing, so there is nothing to learn, notice, evaluate, save or go on from, "
            "and no memory to take. Leave out what is named, or use --device cpu or cuda."
        )


def _watching(adapt: str) -> Watching:
    from penstock.adapting.watching import move_run, obey_run, watch_run

    return {"off": obey_run, "watch": watch_run, "move": move_run}[adapt]


def _disturbance(slow: list[str], path: Path | None) -> Disturbance:
    from penstock.timing.disturbance import Disturbance

    whole_run = Disturbance.of_ranks(_slower(slow))
    if path is None:
        return whole_run
    from penstock.timing.disturbance_file import read_disturbance

    return Disturbance((*whole_run.changes, *read_disturbance(path).changes))


def _slower(given: list[str]) -> dict[int, float]:
    found = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise InputError(f"--slow is '{text}'; a rank and a factor such as 3=1.5 were expected.") from None
    return found


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--torch-profile is '{text}'; steps such as 3,4 were expected.") from None


def _check(reserve_memory: float, adapt: str) -> None:
    """Refuses a share that is none, and a way to adapt that there is not."""
    if adapt not in ("off", "watch", "move"):
        raise InputError(f"--adapt is '{adapt}'; off, watch or move was expected.")
    if not 0 <= reserve_memory < 1:
        raise InputError(f"--reserve-memory is {reserve_memory}; a share of the memory from 0 to below 1, such as 0.9, was expected.")


def _settings(
    plan: Plan, steps: int, lr: float, warmup: int, clip: float, seed: int, on_nan: str, deterministic: bool
) -> TrainingSettings:
    from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings

    rate = LearningRate(lr, warmup, steps, "cosine" if warmup else "constant", 0.1)
    return TrainingSettings(rate, OptimizerSettings(plan.optimizer), clip or None, seed, on_nan, deterministic)  # type: ignore[arg-type]


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
