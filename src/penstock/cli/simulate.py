"""`penstock simulate`: the timeline a plan would give, as a table, a drawing, a figure and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.batch_options import MemoryLimit, Order, Recompute, Split, ways_of
from penstock.cli.console import JsonFlag, VerboseFlag, format_bytes, format_part, format_share, format_time, out, print_json, say, table
from penstock.cli.options import file_to_write
from penstock.cli.simulated import SimulatedReplica, subjects
from penstock.errors import plural

if TYPE_CHECKING:
    from penstock.timing.execution import Execution

__all__ = ["simulate"]

_COLUMNS = ("device", "ranks", "stages", "computes", "bubble", "share", "sends", "in flight", "memory")
_SPARE = ("ranks", "stages", "sends")
_NAME_COLUMNS = 5
_ORDER_COLUMNS = ("order", "time", "bubble of the busiest device", "peak memory", "fits")


def simulate(
    plan: Annotated[Path | None, typer.Argument(metavar="[PLAN]", help="A plan file (plan.json); none with dynapipe:DIR/NAME.")] = None,
    lengths: Annotated[Path | None, typer.Option(help="Plan this batch (CSV of sample lengths) and simulate its slowest replica.")] = None,
    batch: Annotated[Path | None, typer.Option(help="Simulate the slowest replica of a batch that `penstock batch --out` planned.")] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="What if: the same stages in the order of another schedule, or one made for them: adaptive, greedy or search."),
    ] = None,
    costs: Annotated[str | None, typer.Option(help="roofline or profile:FILE; if not given, those the plan names. dynapipe:DIR/NAME "
                                              "with --lengths or --batch: its configuration NAME.")] = None,
    order: Order = "",
    split: Split = "",
    recompute: Recompute = "",
    memory_limit: MemoryLimit = None,
    trace: Annotated[
        Path | None, typer.Option(callback=file_to_write, help="Write a trace for ui.perfetto.dev (t.json, or t.json.gz).")
    ] = None,
    figure: Annotated[Path | None, typer.Option(callback=file_to_write, help="Draw the timeline into a .svg, .png or .pdf file.")] = None,
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:
    """Run one iteration of a plan in simulation: who computes when, who waits, what is sent, how memory rises and falls.

    Example: penstock simulate plan.json --trace t.json

    Example: penstock simulate plan.json --lengths lengths.csv --schedule greedy

    Example: penstock simulate plan.json --batch batch.json
    """
    from penstock.files import written_together
    from penstock.reports.figure import check_figure_path, write_figure
    from penstock.timing.execution import execute
    from penstock.timing.traces import write_trace

    if figure is not None:
        check_figure_path(figure)
    ways = ways_of(order, split, "", recompute, memory_limit)
    own, subject = subjects(plan, costs, lengths, batch, schedule, ways)
    run = execute(subject.schedule, subject.workload)
    orders = [] if schedule is None else [_order_row(own, execute(own.schedule, own.workload)), _order_row(subject, run)]
    with written_together():
        if trace is not None:
            write_trace(trace, run, [f"device {device}: ranks {ranks}" for device, ranks in enumerate(subject.words.ranks)])
        if figure is not None:
            time_s = run.makespan_s / subject.num_batches
            write_figure(figure, run, f"{plan.name if plan else costs}: {subject.what}, {format_time(time_s)}")
    if json:
        told = {"plan": plan, "lengths": lengths, "batch": batch, **_as_dict(subject, run)}
        print_json({**told, "orders": orders, "trace": trace, "figure": figure})
        return
    _show(str(plan or costs), subject, run, verbose)
    if orders:
        _show_orders(orders)
    say(*(f"{what} written to {path}" for path, what in ((trace, "trace"), (figure, "figure")) if path is not None))


def _order_row(subject: SimulatedReplica, run: Execution) -> dict[str, Any]:
    """The figures by which orders are compared."""
    busiest_s = float(max(run.device_busy_s()))
    return {
        "order": subject.order,
        "time_s": run.makespan_s / subject.num_batches,
        "bubble_share": 1 - busiest_s / run.pipeline_s if run.pipeline_s else 0.0,
        "peak_bytes": float(max(run.peak_bytes)),
        "fits": run.violation is None,
    }


def _show_orders(rows: list[dict[str, Any]]) -> None:
    texts = [
        [row["order"], format_time(row["time_s"]), f"{row['bubble_share']:.1%}", format_bytes(row["peak_bytes"]),
         "yes" if row["fits"] else "no"]
        for row in rows
    ]  # fmt: skip
    out().print(table("the plan's own order, and the one asked for", _ORDER_COLUMNS, texts))


def _devices(subject: SimulatedReplica, run: Execution) -> list[dict[str, Any]]:
    """The figures of each device."""
    from penstock.timing.order_memory import in_flight

    held, number = in_flight(run.schedule), subject.num_batches
    pipeline_s, both = run.pipeline_s / number, (run.device_busy_s() / number, run.sending_s() / number)
    rows = []
    for device, (ranks, busy_s, sending_s) in enumerate(zip(subject.words.ranks, *both, strict=True)):
        rows.append({
            "device": device,
            "ranks": ranks,
            "stages": subject.workload.stages_of(device),
            "busy_s": float(busy_s),
            "bubble_s": pipeline_s - float(busy_s),
            "bubble_share": 1 - float(busy_s) / pipeline_s if pipeline_s else 0.0,
            "sending_s": float(sending_s),
            "in_flight": held.by_device[device],
            "peak_bytes": float(run.peak_bytes[device]),
            "limit_bytes": float(subject.workload.limit_bytes[device]),
        })  # fmt: skip
    return rows


def _show(path: str, subject: SimulatedReplica, run: Execution, verbose: bool) -> None:
    say(*_sentences(subject, run), "")
    rows = [
        [row["device"], row["ranks"], ",".join(map(str, row["stages"])), format_time(row["busy_s"]), format_time(row["bubble_s"]),
         f"{row['bubble_share']:.1%}", format_time(row["sending_s"]) if row["sending_s"] else "-", row["in_flight"],
         f"{format_part(row['peak_bytes'], row['limit_bytes'])} ({row['peak_bytes'] / row['limit_bytes']:.0%})"]
        for row in _devices(subject, run)
    ]  # fmt: skip
    title = f"{path}: one iteration of the slowest replica, {subject.what}"
    out().print(table(title, _COLUMNS, rows, more=_SPARE, verbose=verbose))
    grid, _, legend = _drawing(run, max(40, out().width)).rpartition("\n")
    out().print(grid, markup=False, highlight=False, soft_wrap=True)
    say(legend, *(f"note: {note}" for note in subject.notes))


def _sentences(subject: SimulatedReplica, run: Execution) -> list[str]:
    """Sentences on how long it takes, how much of that is waiting, and how full devices get."""
    rows = _devices(subject, run)
    fullest = max(rows, key=lambda row: row["peak_bytes"] / row["limit_bytes"])
    idle = sum(row["bubble_share"] for row in rows) / len(rows)
    number = subject.num_batches
    several = "" if number == 1 else f" of {number} global batches without a break"
    sentences = [
        f"{subject.words.title}, {plural(subject.workload.num_micro_batches, 'micro-batch')}{several}: "
        f"{format_time(run.makespan_s / number)} {'' if number == 1 else 'each '}simulated, devices idle {format_share(idle)} of the "
        f"pipeline, {format_part(fullest['peak_bytes'], fullest['limit_bytes'])}; "
        f"{subject.words.training}{format_time(subject.predicted_s)} {subject.predicted} ({subject.source})."
    ]
    if run.violation is not None:
        over = run.violation
        sentences.append(
            f"this plan does not fit: device {over.device} holds {format_bytes(over.memory_bytes)} of {format_bytes(over.limit_bytes)} "
            f"after {format_time(over.time_s)}"
        )
    return sentences


def _drawing(run: Execution, width: int) -> str:
    """The timeline as text; of a long one the beginning, so that most actions have room for their names."""
    import numpy as np

    from penstock.reports.drawing import draw_text

    ran = np.isfinite(run.end_s)
    usual_s = float(np.median(run.end_s[ran] - run.start_s[ran]))
    return draw_text(run, width, until_s=usual_s * width / _NAME_COLUMNS or None, ascii_only="utf" not in out().encoding.lower())


def _as_dict(subject: SimulatedReplica, run: Execution) -> dict[str, Any]:
    from penstock.schedules.actions import format_schedule

    return {
        "schedule": subject.words.schedule,
        "order": subject.order,
        "replica": subject.replica,
        "num_micro_batches": subject.workload.num_micro_batches,
        "num_batches": subject.num_batches,
        "time_s": run.makespan_s / subject.num_batches,
        "predicted_s": subject.predicted_s,
        "costs": subject.source,
        "devices": _devices(subject, run),
        "violation": None if run.violation is None else run.violation._asdict(),
        "actions": format_schedule(run.schedule).splitlines(),
        "notes": list(subject.notes),
    }
