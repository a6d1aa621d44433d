"""`penstock train`: run a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, err, format_count, format_time, out, print_json, progress, table
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.costs.estimate import Estimate
    from penstock.plans.plan import Plan
    from penstock.runtime.trainer import Progress, TrainResult

__all__ = ["show_comparison", "train"]


def train(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, as `penstock search --out` writes it.")],
    data: Annotated[str, typer.Option(help="Folder that `penstock prepare-data` wrote.")],
    steps: Annotated[int, typer.Option(help="Iterations in all, those before a checkpoint included.")],
    path: Annotated[Path, typer.Option("--out", metavar="RUN", help="Folder for checkpoints, steps and spans.")],
    compare: Annotated[bool, typer.Option("--compare", help="Print predicted against measured times of each stage.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda; what the plan's cluster has if not given.")] = "",
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Let several ranks run on one GPU, each with its part under MPS.")
    ] = False,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 3e-4,
    warmup: Annotated[int, typer.Option(help="Steps in which the learning rate rises; it then falls as a cosine.")] = 0,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradients; 0: any.")] = 1.0,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations on the held-out split; 0: never.")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: only at the end.")] = 0,
    resume: Annotated[str, typer.Option(help="Checkpoint, or folder of them, to go on from.")] = "",
    torch_profile: Annotated[str, typer.Option(metavar="STEPS", help="Write torch.profiler traces of these steps, such as 3,4.")] = "",
    seed: Annotated[int, typer.Option(help="Of weights, dropout and the order of samples.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Train a plan's model on prepared data, on this machine's devices, or as one of the processes that torchrun started.

    Example: penstock train plan.json --data data --steps 100 --out run --compare
    """
    from penstock.plans.schema import read_plan

    given = read_plan(plan)
    trainer = _trainer(
        given, data, steps, path, device, share_gpus, lr, warmup, clip, eval_every, checkpoint_every, resume, seed, _steps(torch_profile)
    )
    under_torchrun = "WORLD_SIZE" in os.environ and "RANK" in os.environ
    first = not under_torchrun or os.environ["RANK"] == "0"
    with progress("training", steps, quiet=json or not first) as bar:

        def told(step: Progress) -> None:
            bar.describe(f"loss {step.loss:.4f}, {format_count(step.tokens_per_s)} tokens/s")
            bar.advance()
            if step.evaluated is not None and not json:
                found = step.evaluated
                err().print(f"step {found.step}: held-out loss {found.loss:.4f}, accuracy {found.accuracy:.1%}", markup=False)

        result = trainer.join(told) if under_torchrun else trainer.train(told)
    if not first:
        return
    estimate = _estimate(given) if compare else None
    if json:
        print_json(_summary(result, estimate))
        return
    out().print(
        f"trained {len(result.losses)} steps: loss {result.losses[0]:.4f} → {result.losses[-1]:.4f}, {format_time(result.time_s)} a step, "
        f"{format_count(result.tokens_per_s)} tokens/s; checkpoint in {result.checkpoint}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    if estimate is not None:
        _show(result, estimate)


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--torch-profile is '{text}'; steps such as 3,4 were expected.") from None


def _trainer(
    plan: Plan, data: str, steps: int, path: Path, device: str, share_gpus: bool, lr: float, warmup: int, clip: float, eval_every: int,
    checkpoint_every: int, resume: str, seed: int, profile_steps: tuple[int, ...],
) -> Any:  # fmt: skip
    for name, value in (
        ("--steps", steps - 1),
        ("--warmup", warmup),
        ("--eval-every", eval_every),
        ("--checkpoint-every", checkpoint_every),
    ):
        if value < 0:
            raise InputError(f"{name} is {value + (name == '--steps')}; a number of steps was expected.")
    from penstock.runtime.learning_rate import LearningRate
    from penstock.runtime.optimizer import OptimizerSettings
    from penstock.runtime.trainer import Trainer, TrainRequest
    from penstock.runtime.update import TrainingSettings

    rate = LearningRate(lr, warmup, steps, "cosine" if warmup else "constant", 0.1)
    settings = TrainingSettings(rate, OptimizerSettings(plan.optimizer), clip or None, seed)  # type: ignore[arg-type]
    return Trainer(
        TrainRequest(
            plan,
            data,
            steps,
            str(path),
            settings,
            device,
            eval_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            profile_steps=profile_steps,
            share_gpus=share_gpus,
        )
    )


def _estimate(plan: Plan) -> Estimate:
    from penstock.costs.estimate import Estimator
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of

    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan)


def _rows(result: TrainResult, estimate: Estimate) -> list[dict[str, Any]]:
    """Predicted and measured seconds of each stage for one micro-batch."""
    rows = []
    for stage in estimate.stages:
        measured = result.stages[stage.index]
        passes = max(1, measured.num_passes)
        rows.append(
            {
                "stage": stage.index,
                "forward_predicted_s": stage.work.forward_s,
                "forward_measured_s": measured.forward_s / passes,
                "backward_predicted_s": stage.work.backward_s + stage.work.recompute_s,
                "backward_measured_s": measured.backward_s / passes,
            }
        )
    return rows


def _summary(result: TrainResult, estimate: Estimate | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "losses": result.losses,
        "evaluated": [{"step": one.step, "loss": one.loss, "accuracy": one.accuracy} for one in result.evaluated],
        "time_s": result.time_s,
        "tokens_per_s": result.tokens_per_s,
        "checkpoint": result.checkpoint,
    }
    if estimate is not None:
        found |= {"predicted_time_s": estimate.time_s, "stages": _rows(result, estimate)}
    return found


def show_comparison(plan: Plan, result: TrainResult) -> None:
    """Predicted against measured times of each stage, and of a step."""
    _show(result, _estimate(plan))


def _show(result: TrainResult, estimate: Estimate) -> None:
    columns = ("stage", "forward predicted", "measured", "backward predicted", "measured", "measured / predicted")
    rows = []
    for row in _rows(result, estimate):
        stage, *times = row.values()
        ratio = (times[1] + times[3]) / max(1e-12, times[0] + times[2])
        rows.append([stage, *map(format_time, times), f"{ratio:.2f}"])
    rows.append(["step", "", "", format_time(estimate.time_s), format_time(result.time_s), f"{result.time_s / estimate.time_s:.2f}"])
    out().print(table(f"one micro-batch on each stage, and one step ({estimate.source})", columns, rows))
