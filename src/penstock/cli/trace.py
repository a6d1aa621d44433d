"""`penstock trace`: what every rank of a run did and when, beside what was predicted of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import JsonFlag, err, out, print_json, table
from penstock.cli.options import file_to_write, parse_steps
from penstock.errors import InputError, PenstockError

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.telemetry.spans_reader import RankSpans
    from penstock.runtime.telemetry.spans_trace import Predictions

__all__ = ["trace"]

_LAST = 10
"""Steps that are shown unless others are asked for: a viewer holds no whole run."""


def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given.")],
    path: Annotated[
        Path,
        typer.Option("--out", metavar="TRACE", callback=file_to_write, help="Trace to write for ui.perfetto.dev (t.json, or t.json.gz)."),
    ],
    steps: Annotated[str, typer.Option(help=f"A step (3) or a range of them (10-19); if not given, the last {_LAST}.")] = "",
    measured_only: Annotated[bool, typer.Option("--measured-only", help="Leave out what the plan's costs predict.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write one trace of all ranks of a run: compute, waits and transfers, with the predicted ones of each rank right below.

    Works while a run goes on, and after one that was killed.

    Example: penstock trace run --steps 20-24 --out trace.json
    """
    from penstock.runtime.run_folder import plan_of_run
    from penstock.runtime.run_predictions import kept_plans, plan_in_force
    from penstock.runtime.telemetry.spans_reader import read_run
    from penstock.runtime.telemetry.spans_trace import write_trace

    plan_of_run(run)
    plans = kept_plans(run)
    ranks = read_run(run, {rank for plan in plans.values() for rank in plan.ranks})
    known = sorted({step for one in ranks for step in one.iterations})
    chosen = _chosen(steps, known, run)
    ranks = [one.only(chosen) for one in ranks]
    in_force = plan_in_force(plans, chosen)
    predicted = None if measured_only else _predicted(run, plans, in_force)
    numbers = {step: sorted(plans).index(first) for step, first in in_force.items()} if len(plans) > 1 else {}
    write_trace(path, ranks, predicted, numbers)
    rows = [_row(one) for one in ranks]
    if json:
        print_json({"run": run, "trace": path, "steps": chosen, "predicted": predicted is not None, "ranks": rows})
        return
    shown = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
    columns = ("rank", "steps", "spans", "lost", "computes", "waits", "transfers", "idle")
    cells = [[f"{value:.1%}" if isinstance(value, float) else value for value in row.values()] for row in rows]
    out().print(table(f"{run}: {shown} of {known[0]} to {known[-1]}", columns, cells))
    beside = "" if predicted is None else ", predicted beside measured"
    out().print(f"trace written to {path}{beside}; open it in https://ui.perfetto.dev", markup=False, soft_wrap=True)


def _chosen(text: str, known: list[int], run: Path) -> list[int]:
    """The steps that are asked for, of those that some rank has begun."""
    if not known:
        raise InputError(f"run '{run}' has not begun its first step: its span files hold no iteration.")
    if not text:
        return known[-_LAST:]
    first, last = parse_steps(text)
    for end in (first, last):
        if end not in known:
            raise InputError(f"--steps is '{text}', but step {end} was not run. Run '{run}' has steps {known[0]} to {known[-1]}.")
    return [step for step in known if first <= step <= last]


def _predicted(run: Path, plans: Mapping[int, Plan], steps: Mapping[int, int]) -> Predictions | None:
    """Predicts every rank's spans under the plan in force in each step, with the micro-batches that the step had; None, with a
    note, where nobody can say. `steps` has the first step of that plan, by which `plans` has it."""
    from penstock.plans.ranks import device_of_ranks
    from penstock.runtime.run_predictions import predicted_executions
    from penstock.runtime.telemetry.spans_trace import predicted_spans

    try:
        timelines = predicted_executions(run, plans, steps)
    except PenstockError as error:
        err().print(f"note: without a prediction: {error}", markup=False, soft_wrap=True)
        return None
    return {
        step: {rank: predicted_spans(replicas[replica], device) for rank, (replica, device) in device_of_ranks(plans[steps[step]]).items()}
        for step, replicas in timelines.items()
    }


def _row(one: RankSpans) -> dict[str, float]:
    """Mean shares of a rank's time in its steps."""
    import numpy as np

    from penstock.runtime.telemetry.spans_reader import iteration_shares

    shares = [iteration_shares(one, step) for step in one.iterations] or [np.zeros(3)]
    compute, wait, transfer = np.mean(shares, axis=0).tolist()
    return {
        "rank": one.rank, "steps": len(one.iterations), "spans": len(one.spans), "lost": one.num_lost,
        "compute": compute, "wait": wait, "transfer": transfer, "idle": max(0.0, 1 - compute - wait - transfer),
    }  # fmt: skip
