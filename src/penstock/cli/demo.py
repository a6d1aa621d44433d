"""`penstock demo`: measure a small model on this machine, plan for two processes, train with them, compare with what was predicted; and a
run that moves away from a device that becomes slow."""

from __future__ import annotations

import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import JsonFlag, format_time, out, print_json, progress, say
from penstock.cli.options import folder_to_write
from penstock.errors import plural, shell_words

if TYPE_CHECKING:
    from penstock.costs.profiled import Profiled
    from penstock.search import Choice

__all__ = ["demo"]

_PROCESSES = 2
_MODEL, _CLUSTER, _GLOBAL_BATCH = "gpt-small", f"{_PROCESSES}xcpu", 16
_BUDGET_S = 45.0
_VOCAB = 2048
_STEPS = 6
_SLOW_RANK, _SLOWER, _SLOW_FROM, _MOVING_STEPS = 2, 3.0, 10, 26


def demo(
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", callback=folder_to_write, help="Where profile, plan, data and run go.")
    ] = Path("runs/demo"),
    json: JsonFlag = False,
) -> None:
    """Measure a small GPT on this machine's processor, find a plan for two processes, explain it, and train with it for a few steps; then
    let a device of another run become slow, and see the run move away from it; both as a page to look at. Needs no GPU; about two minutes.

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
    events = _moved(folder, json)
    page = _reported(folder)
    if json:
        from penstock.cli.plan_words import choice_row

        rows = [choice_row(choice) for choice in found]
        files = {"profile": folder / "profile.json", "plan": folder / "plan.json", "report": page}
        print_json({**files, "plans": rows, "losses": losses, "events": events})
        return
    _tell(folder, page)


def _trained(folder: Path, quiet: bool) -> list[float]:
    """The losses of a few steps with the plan, on the bundled texts; each demo trains anew."""
    from penstock.cli.compare import show_comparison
    from penstock.plans.schema import read_plan
    from penstock.runtime.request import StepReport, TrainRequest
    from penstock.runtime.trainer import PlanTrainer

    shutil.rmtree(folder / "run", ignore_errors=True)
    plan = read_plan(folder / "plan.json")
    trainer = PlanTrainer(TrainRequest(plan, str(_prepared(folder / "data")), _STEPS, str(folder / "run")))
    with progress(f"training {_MODEL} with {plural(len(plan.ranks), 'process')}", _STEPS, quiet=quiet) as bar:

        def report(step: StepReport) -> None:
            bar.describe(f"loss {step.loss:.4f}")
            bar.advance()

        result = trainer.train(report)
    if not quiet:
        show_comparison(plan, result, trainer.predicted(result))
    return list(result.losses)


def _moved(folder: Path, quiet: bool) -> list[str]:
    """Trains on four paced devices, one of which becomes slow, and shows it: the run moves its work away, and trains on."""
    from penstock.adapting.events import read_events
    from penstock.adapting.watching import move_run
    from penstock.cli.events import show_events
    from penstock.plans.build import uniform_plan
    from penstock.runtime.request import PACED, PlanningSettings, TrainRequest
    from penstock.runtime.telemetry.steps import read_steps
    from penstock.runtime.trainer import PlanTrainer
    from penstock.timing.disturbance import Disturbance, DisturbanceChange

    run = folder / "moving"
    shutil.rmtree(run, ignore_errors=True)
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", global_batch=8, micro_batch=1, pp=4, layout="packed")
    plan = replace(plan, model={"base": "gpt-tiny", "vocab": _VOCAB})
    story = Disturbance((DisturbanceChange((_SLOW_RANK,), _SLOWER, first=_SLOW_FROM),))
    request = TrainRequest(
        plan, str(_prepared(folder / "data")), _MOVING_STEPS, str(run), device=PACED, checkpoint_every=0, disturbance=story,
        planning=PlanningSettings(1),
    )  # fmt: skip
    with progress("training gpt-tiny at the pace of four A100s, one of which becomes slow", _MOVING_STEPS, quiet=quiet) as bar:
        PlanTrainer(request, move_run).train(lambda step: bar.advance())
    found = list(read_events(run))
    if not quiet:
        out().print()
        say(f"four A100s, as this processor plays them; rank {_SLOW_RANK} takes {_SLOWER:g} times as long from step {_SLOW_FROM} on:")
        show_events(found)
        times_s = [step.time_s or 0.0 for step in read_steps(run / "steps.jsonl")]
        first = next((event.step for event in found if event.event == "moved"), _MOVING_STEPS)
        parts = (times_s[:_SLOW_FROM], times_s[_SLOW_FROM:first], times_s[first:] or times_s[-1:])
        before, slow, after = (format_time(statistics.median(part)) for part in parts)
        say(f"a step took {before}, {slow} while rank {_SLOW_RANK} was slow, and {after} after the move. Losses are those of a calm run.")
    return [event.text for event in found]


def _reported(folder: Path) -> Path:
    """The page of both runs: what they did, measured, above what was predicted of them."""
    from penstock.files import write_text
    from penstock.reports.report import report_of

    write_text(folder / "report.html", report_of([folder / "run", folder / "moving"]).html())
    return folder / "report.html"


def _prepared(path: Path) -> Path:
    """The bundled texts with a tokenizer trained on them, made once."""
    from penstock.data.bundled import bundled_files
    from penstock.data.text.prepare import TextRequest, prepare_text

    if not path.exists():
        prepare_text(TextRequest(tuple(bundled_files()), path, train_tokenizer=_VOCAB, limits=(192, 63)))
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


def _tell(folder: Path, page: Path) -> None:
    plan, profile = folder / "plan.json", folder / "profile.json"
    say(
        "",
        f"open {page} in a browser to see both runs: their timelines, what was predicted of them, and how the second one moved.",
        f"measured costs are in {profile}, the best plan in {plan}. What to try next:",
        f"  {shell_words('penstock', 'check', plan)}",
        f"  penstock search --model {_MODEL} --cluster 4xcpu --global-batch 32 {shell_words('--costs', f'profile:{profile}')}",
        "  penstock search --model gpt-1.3b --cluster 8xh200-141gb --global-batch 64 --costs profile:h200-141gb --out big.json",
        "  penstock explain big.json",
    )
