"""`penstock simulate`: the timeline a plan would give, as a table, a drawing, a figure and a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.batch_options import MemoryLimit, Order, Recompute, Split, ways_of
from penstock.cli.configured import CONFIGURED, configured_costs
from penstock.cli.console import JsonFlag, VerboseFlag, format_bytes, format_part, format_share, format_time, out, print_json, say, table
from penstock.cli.options import file_to_write
from penstock.cli.plan_words import plan_name, ranks_words
from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import BatchPlan
    from penstock.batching.ways import BatchWays
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.schedules.actions import Schedule
    from penstock.timing.execution import Execution
    from penstock.timing.workload import Workload

__all__ = ["simulate"]

_COLUMNS = ("device", "ranks", "stages", "computes", "bubble", "share", "sends", "in flight", "memory")
_SPARE = ("ranks", "stages", "sends")
_NAME_COLUMNS = 5
_ORDER_COLUMNS = ("order", "time", "bubble of the busiest device", "peak memory", "fits")


@dataclass(frozen=True)
class _Words:
    """What is told of a plan, or of a configuration of another system."""

    title: str
    """Which model on which devices."""
    ranks: list[str]
    """The ranks of each device group, in one replica or in all."""
    training: str = ""
    """Precision and the like with a semicolon, where something says it."""
    schedule: str | None = None


@dataclass(frozen=True)
class _Subject:
    """What is simulated: one replica."""

    words: _Words
    order: str
    """The plan's schedule, how its batch was ordered, or the order to look at instead."""
    replica: int | None
    """None: all replicas run as many micro-batches, and the slowest stands for them."""
    what: str
    workload: Workload
    schedule: Schedule
    predicted: str
    """Where `predicted_s` comes from."""
    predicted_s: float
    source: str
    notes: tuple[str, ...] = ()
    num_batches: int = 1
    """Global batches without a break between them, under an asynchronous schedule; times are told of one."""


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
    if lengths is not None and batch is not None:
        raise InputError("--lengths plans a batch and --batch has one planned. Give one of them.")
    ways = ways_of(order, split, "", recompute, memory_limit)
    if lengths is None and (ways.cuts or recompute or memory_limit is not None):
        raise InputError("--order, --split, --recompute and --memory-limit say how a batch is planned. Give its --lengths.")
    given = lengths or batch
    if costs is not None and costs.partition(":")[0] in CONFIGURED:
        if plan is not None or given is None:
            raise InputError(f"--costs {costs}: the configuration is the plan. Give --lengths or --batch, and no plan file.")
        own = subject = _configured(costs, given, lengths is None, ways)
        if schedule is not None:
            subject = _made_order(schedule, own)
    elif plan is None:
        raise InputError("a plan file is missing, as in `penstock simulate plan.json`; with --costs dynapipe:DIR/NAME there is none.")
    else:
        asked = _asked(plan, costs)
        own = subject = _planned(*asked) if given is None else _batched(given, lengths is None, ways, *asked)
        if schedule is not None:
            subject = _reordered(schedule, own, given is not None, *asked)
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


def _asked(path: Path, costs: str | None) -> tuple[Plan, Model, Cluster, CostSource]:
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.schema import read_plan
    from penstock.plans.validity import require_valid

    plan = read_plan(path)
    require_valid(plan, where=f"plan '{path}'")
    cluster = cluster_of(plan)
    return plan, model_of(plan), cluster, open_costs(costs or plan.costs, cluster)


def _planned(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> _Subject:
    """Equal micro-batches, as the plan has them."""
    from penstock.timing.planned import planned_pipeline

    found = planned_pipeline(plan, model, cluster, source)
    where = "by the closed formula that bounds are of, where no message is hidden behind compute"
    replica = found.estimate.replica if plan.micro_batching.per_replica else None
    what = f"schedule {plan.schedule}" if plan.num_groups > 1 else "one stage"
    return _Subject(
        _words(plan, replica), plan.schedule, replica, what, found.workload, found.schedule, where, found.estimate.time_s,
        found.estimate.source, found.estimate.notes, found.num_batches,
    )  # fmt: skip


def _words(plan: Plan, replica: int | None) -> _Words:
    from penstock.plans.precision import described_training
    from penstock.plans.texts import format_ranks

    groups = [stage.devices for stage in plan.stages[: plan.num_groups]]
    ranks = [ranks_words(group) if replica is None else format_ranks(group[replica]) for group in groups]
    return _Words(plan_name(plan), ranks, f"{described_training(plan)}; ", plan.schedule)


def _batched(path: Path, is_planned: bool, ways: BatchWays, plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> _Subject:
    """Micro-batches planned for the lengths of a batch: in a file already, or now."""
    from penstock.batching.lengths import read_lengths
    from penstock.batching.plan import read_batch_plan
    from penstock.batching.planned import planned_costs

    if is_planned:
        batch = _fitting(read_batch_plan(path), path, plan)
        prices = planned_costs(plan, model, cluster, source, *batch.longest)
    else:
        samples = read_lengths(path)
        longest, longest_dec = max(sample.length for sample in samples), max(sample.dec_length for sample in samples)
        prices = ways.limited(planned_costs(plan, model, cluster, source, longest, longest_dec))
        batch = ways.planned(samples, prices)
    replica = max(range(len(batch.replicas)), key=lambda index: batch.replicas[index].predicted_s)
    return _slowest(batch, prices, path, replica, _words(plan, replica))


def _slowest(batch: BatchPlan, prices: PipelineCosts, path: Path, replica: int, words: _Words) -> _Subject:
    from penstock.batching.workloads import batch_workload

    own = batch.replicas[replica]
    what = f"{len(own.micro_batches)} of {batch.num_micro_batches} micro-batches of {path.name}"
    return _Subject(
        words, own.order, replica, what, batch_workload(prices, own.micro_batches, replica), own.schedule, "by the planner of batches",
        batch.predicted_s, batch.costs,
    )  # fmt: skip


def _configured(costs: str, path: Path, is_planned: bool, ways: BatchWays) -> _Subject:
    """A batch in a configuration of another system, planned already or now."""
    from penstock.batching.lengths import read_lengths
    from penstock.batching.plan import read_batch_plan
    from penstock.batching.workloads import require_priced

    samples = [] if is_planned else read_lengths(path)
    prices = ways.limited(configured_costs(costs, samples))
    batch = read_batch_plan(path) if is_planned else ways.planned(samples, prices)
    require_priced(batch, prices, f"batch '{path}'")
    replica = max(range(len(batch.replicas)), key=lambda index: batch.replicas[index].predicted_s)
    return _slowest(batch, prices, path, replica, _Words(costs, [f"of stage {s}" for s in range(prices.num_stages)]))


def _fitting(batch: BatchPlan, path: Path, plan: Plan) -> BatchPlan:
    """The batch, if it was planned for as many replicas and stages as the plan has."""
    replicas, stages = len(batch.replicas), {len(replica.schedule) for replica in batch.replicas}
    if replicas != plan.num_replicas or stages != {plan.num_groups}:
        raise InputError(
            f"batch '{path}' is for {replicas} replicas of {', '.join(map(str, sorted(stages)))} stages, the plan has "
            f"{plan.num_replicas} of {plan.num_groups}. Give the plan it was made with."
        )
    patterns = [len(stage.recompute) or 1 for stage in plan.stages]
    for micro in (micro for replica in batch.replicas for micro in replica.micro_batches):
        if len(micro.recompute) > len(patterns) or any(used >= known for used, known in zip(micro.recompute, patterns, strict=False)):
            raise InputError(f"batch '{path}' uses recomputation patterns that the plan does not have. Give the plan it was made with.")
    return batch


def _reordered(name: str, own: _Subject, dynamic: bool, plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> _Subject:
    """The same stages and micro-batches in another order."""
    from penstock.ordering.choose import MADE, ORDERS
    from penstock.plans.validity import require_valid
    from penstock.schedules.rules import SCHEDULES

    if name not in ORDERS:
        raise InputError(f"--schedule is '{name}'. {near_misses(name, ORDERS)}")
    if name in MADE and SCHEDULES[plan.schedule].asynchronous:
        raise InputError(f"--schedule {name}: under '{plan.schedule}' the order says when weights are updated. Use one of the schedules.")
    if name in SCHEDULES and not dynamic:
        other = replace(plan, schedule=name, predicted=None)
        require_valid(other, model, cluster, where=f"the plan under the schedule '{name}'")
        return _planned(other, model, cluster, source)
    return _made_order(name, own)


def _made_order(name: str, own: _Subject) -> _Subject:
    """The same micro-batches in an order made for them, or in that of a plain schedule."""
    from penstock.ordering.choose import MADE, ORDERS, order_of
    from penstock.schedules.rules import SCHEDULES

    if name not in ORDERS:
        raise InputError(f"--schedule is '{name}'. {near_misses(name, ORDERS)}")
    if name in SCHEDULES and not SCHEDULES[name].whole_passes:
        plain = ", ".join(known for known, rules in SCHEDULES.items() if rules.whole_passes)
        raise InputError(f"--schedule {name}: micro-batches of a batch run in whole passes. Use {plain} or {', '.join(MADE)}.")
    return replace(own, order=name, what=f"{own.what}, order {name}", schedule=order_of(name, own.workload))


def _order_row(subject: _Subject, run: Execution) -> dict[str, Any]:
    """What there is to compare orders by."""
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


def _devices(subject: _Subject, run: Execution) -> list[dict[str, Any]]:
    """What is told of each device."""
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


def _show(path: str, subject: _Subject, run: Execution, verbose: bool) -> None:
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


def _sentences(subject: _Subject, run: Execution) -> list[str]:
    """How long it takes, how much of that is waiting, how full devices get; by formula beside it."""
    rows = _devices(subject, run)
    fullest = max(rows, key=lambda row: row["peak_bytes"] / row["limit_bytes"])
    idle = sum(row["bubble_share"] for row in rows) / len(rows)
    number = subject.num_batches
    several = "" if number == 1 else f" of {number} global batches without a break"
    sentences = [
        f"{subject.words.title}, {subject.workload.num_micro_batches} micro-batches{several}: {format_time(run.makespan_s / number)} "
        f"{'' if number == 1 else 'each '}simulated, devices idle {format_share(idle)} of the pipeline, "
        f"{format_part(fullest['peak_bytes'], fullest['limit_bytes'])}; "
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


def _as_dict(subject: _Subject, run: Execution) -> dict[str, Any]:
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
