"""`penstock demo`: measure a small model on this machine, plan for two processes, train with them, and compare with what was predicted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import JsonFlag, out, print_json, progress, say
from penstock.cli.options import folder_to_write

if TYPE_CHECKING:
    from penstock.costs.profiled import Profiled
    from penstock.search import Choice

__all__ = ["demo"]

_PROCESSES = 2
_MODEL, _CLUSTER, _GLOBAL_BATCH = "gpt-small", f"{_PROCESSES}xcpu", 16
_BUDGET_S = 45.0
_STEPS = 6


def demo(
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", callback=folder_to_write, help="Where profile, plan, data and run go.")
    ] = Path("runs/demo"),
    json: JsonFlag = False,
) -> None:
    """Measure a small GPT on this machine's processor, find a plan for two processes, explain it, and train with it for a few steps. Needs
    no GPU; about a minute.

    A second run uses the profile of the first.

    Example: penstock demo
    """
    from penstock.plans.schema import write_plan
    from penstock.search import best_plans

    source = _measured(folder / "profile.json", json)
    # Only tp 1 was measured: a modelled tp 2 beside it would compare unlike things.
    found = best_plans(_MODEL, _CLUSTER, _GLOBAL_BATCH, costs=source, max_tp=1, top=3)
    write_plan(folder / "plan.json", found[0].plan)
    if not json:
        _explain(found, folder)
    losses = _trained(folder, json)
    if json:
        from penstock.cli.plan_words import choice_row

        rows = [choice_row(choice) for choice in found]
        print_json({"profile": folder / "profile.json", "plan": folder / "plan.json", "plans": rows, "losses": losses})
        return
    _tell(folder)


def _trained(folder: Path, quiet: bool) -> list[float]:
    """The losses of a few steps with the plan, on the bundled texts; each demo trains anew."""
    from penstock.cli.compare import show_comparison
    from penstock.plans.schema import read_plan
    from penstock.runtime.request import StepTold, TrainRequest
    from penstock.runtime.trainer import PlanTrainer

    shutil.rmtree(folder / "run", ignore_errors=True)
    plan = read_plan(folder / "plan.json")
    trainer = PlanTrainer(TrainRequest(plan, str(_prepared(folder / "data")), _STEPS, str(folder / "run")))
    with progress(f"training {_MODEL} with {len(plan.ranks)} processes", _STEPS, quiet=quiet) as bar:

        def told(step: StepTold) -> None:
            bar.describe(f"loss {step.loss:.4f}")
            bar.advance()

        result = trainer.train(told)
    if not quiet:
        show_comparison(plan, result, trainer.predicted(result))
    return list(result.losses)


def _prepared(path: Path) -> Path:
    """The bundled texts with a tokenizer trained on them, made once."""
    from penstock.data.bundled import bundled_files
    from penstock.data.text.prepare import TextRequest, prepare_text

    if not path.exists():
        prepare_text(TextRequest(tuple(bundled_files()), path, train_tokenizer=2048, limits=(192, 63)))
    return path


def _measured(path: Path, quiet: bool) -> Profiled:
    """The model's costs on this processor, shared by as many processes as will train; what an earlier run measured is kept."""
    from penstock.costs.profiled import Profiled
    from penstock.models import resolve_model
    from penstock.profiling.run import Profiler
    from penstock.profiling.together import measure_together

    profiler = Profiler.open(path, "cpu")
    # The demo's micro-batches are padded; `penstock profile` on the same file would measure packed ones too.
    units = [unit for unit in profiler.units([resolve_model(_MODEL)], [1]) if unit.layout == "padded"]
    if not units:
        return Profiled.open(path)
    with progress(f"measuring {_MODEL} on this processor", len(units), quiet=quiet) as bar:

        def report(name: str) -> None:
            bar.describe(f"measuring {name}")
            bar.advance()

        measure_together(path, units, _PROCESSES, time_budget_s=_BUDGET_S, progress=report)
    return Profiled.open(path)


def _explain(found: list[Choice], folder: Path) -> None:
    from penstock.cli.explain import show_estimate
    from penstock.cli.plan_words import choices_table, plan_sentence

    plan, best = folder / "plan.json", found[0]
    say(plan_sentence(best.plan, best.estimate), "")
    out().print(choices_table(f"best uniform plans of {_MODEL} on {_CLUSTER}, global batch {_GLOBAL_BATCH}, as measured here", found))
    show_estimate(str(plan), best.estimate)


def _tell(folder: Path) -> None:
    plan = folder / "plan.json"
    say(
        "",
        f"measured costs are in {folder / 'profile.json'}, the best plan in {plan}. What to try next:",
        f"  penstock check {plan}",
        f"  penstock search --model {_MODEL} --cluster 4xcpu --global-batch 32 --costs profile:{folder / 'profile.json'}",
        "  penstock search --model gpt-1.3b --cluster 8xh200-141gb --global-batch 64 --costs profile:h200-141gb --out big.json",
        "  penstock explain big.json",
    )
