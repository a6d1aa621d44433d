"""`penstock explain`: where a plan's time, memory and money go, and how it differs from another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, format_bytes, format_count, format_time, format_usd, out, print_json, table

if TYPE_CHECKING:
    from penstock.costs.estimate import Estimate, StageEstimate

__all__ = ["explain", "show_estimate"]

_TIME_COLUMNS = (
    "stage", "ops", "device", "tp", "dp", "forward", "backward", "recompute", "tp comm", "transfers", "host wait", "all",
    "bubble", "grad sync", "optimizer",
)  # fmt: skip


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file (plan.json).")],
    against: Annotated[Path | None, typer.Option(help="Another plan: show what differs, as this plan minus that one.")] = None,
    costs: Annotated[str | None, typer.Option(help="roofline or profile:FILE; if not given, those the plan names.")] = None,
    json: JsonFlag = False,
) -> None:
    """Say where a plan's time, memory and money go, stage by stage, and what the others wait for.

    Example: penstock explain plan.json --against other.json
    """
    found = _estimate(plan, costs)
    other = _estimate(against, costs or found.source) if against is not None else None
    if json:
        print_json(_as_dict(plan, found, against, other))
        return
    show_estimate(str(plan), found)
    if other is not None:
        out().print(_differences_table(str(plan), found, str(against), other))


def _estimate(path: Path, costs: str | None) -> Estimate:
    from penstock.costs.estimate import estimate
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.schema import read_plan
    from penstock.plans.validity import require_valid

    plan = read_plan(path)
    require_valid(plan, where=f"plan '{path}'")
    cluster = cluster_of(plan)
    return estimate(plan, model_of(plan), cluster, open_costs(costs or plan.costs, cluster))


def show_estimate(name: str, found: Estimate) -> None:
    """Prints the whole estimate: times and memory by stage, shares of the iteration, totals."""
    out().print(table(f"{name}: times per micro-batch; bubble, gradient sync and optimizer per iteration", _TIME_COLUMNS,
                      [_time_row(stage, found) for stage in found.stages]))  # fmt: skip
    out().print(_memory_table(found))
    out().print(_shares_table(found))
    for line in _facts(found):
        out().print(line, markup=False, soft_wrap=True)
    for note in found.notes:
        out().print(f"note: {note}", markup=False, soft_wrap=True)


def _time_row(stage: StageEstimate, found: Estimate) -> list[Any]:
    work = stage.work
    times = (
        work.forward_s, work.backward_s, work.recompute_s, work.tp_s, work.transfer_in_s + work.transfer_out_s, work.waiting_s,
        work.total_s, stage.bubble_s, stage.sync_s, stage.optimizer_s,
    )  # fmt: skip
    mark = "*" if stage.index == found.bottleneck and len(found.stages) > 1 else ""
    cells = [format_time(time_s) if time_s else "-" for time_s in times]
    return [f"{stage.index}{mark}", stage.num_ops, stage.device, stage.degrees.tp, stage.degrees.dp, *cells]


def _memory_table(found: Estimate) -> Any:
    """A row for each stage, a column for each purpose that any stage has."""
    names = [name for name, _, _ in found.stages[0].memory.rows()[:-1]]
    sizes = [[size for _, size, _ in stage.memory.rows()] for stage in found.stages]
    shown = [column for column in range(len(names)) if any(row[column] for row in sizes)]
    rows = [
        [stage.index, *(format_bytes(row[column]) for column in shown), format_bytes(row[-1]), format_bytes(stage.limit_bytes),
         f"{row[-1] / stage.limit_bytes:.0%}" + ("" if stage.fits else " does not fit")]
        for stage, row in zip(found.stages, sizes, strict=True)
    ]  # fmt: skip
    return table("memory of the fullest device", ["stage", *(names[column] for column in shown), "total", "limit", "used"], rows)


def _shares_table(found: Estimate) -> Any:
    rows = [[name, format_time(time_s), f"{time_s / found.time_s:.1%}"] for name, time_s in found.shares() if time_s]
    rows.append(["all", format_time(found.time_s), "100.0%"])
    return table(f"one iteration, seen from stage {found.bottleneck}", ["what", "time", "share"], rows)


def _facts(found: Estimate) -> list[str]:
    count, tokens = found.num_micro_batches, "" if found.tokens_per_s is None else f", {format_count(found.tokens_per_s)} tokens/s"
    facts = [
        f"{format_time(found.time_s)} per iteration of {count} micro-batch{'es' if count > 1 else ''} of {found.samples} per replica"
        f"{tokens}, {_quantity('samples_per_s', found.samples_per_s)} samples/s, MFU {found.mfu:.1%} ({found.source})"
    ]
    if len(found.stages) > 1:
        slowest_s = found.stages[found.bottleneck].work.total_s
        facts.append(f"the others wait for stage {found.bottleneck}: {format_time(slowest_s)} per micro-batch")
    if found.price_usd is not None and found.price_usd_per_h is not None:
        facts.append(f"{format_usd(found.price_usd)} per iteration, {format_usd(found.price_usd_per_h)} per hour")
    tight = max(found.stages, key=lambda stage: stage.memory.total_bytes / stage.limit_bytes)
    if not found.fits:
        needed, limit = format_bytes(tight.memory.total_bytes), format_bytes(tight.limit_bytes)
        facts.append(f"this plan does not fit: stage {tight.index} needs {needed} of {limit} on {tight.device}")
    return facts


def _totals(found: Estimate) -> dict[str, float | None]:
    """What two plans are compared by."""
    return {
        "time_s": found.time_s,
        **{f"{name.replace(' ', '_')}_s": time_s for name, time_s in found.shares()},
        "tokens_per_s": found.tokens_per_s,
        "samples_per_s": found.samples_per_s,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        "price_usd": found.price_usd,
    }


def _differences(found: Estimate, other: Estimate) -> dict[str, float | None]:
    mine, its = _totals(found), _totals(other)
    return {name: None if (a := mine[name]) is None or (b := its[name]) is None else a - b for name in mine}


def _differences_table(name: str, found: Estimate, other_name: str, other: Estimate) -> Any:
    mine, its, differences = _totals(found), _totals(other), _differences(found, other)
    rows = []
    for key, difference in differences.items():
        if not (mine[key] or its[key]):
            continue
        ratio = f"{difference / base:+.1%}" if difference is not None and (base := its[key]) else "-"
        change = "-" if difference is None else ("+" if difference > 0 else "") + _quantity(key, difference)
        rows.append([_label(key), _quantity(key, mine[key]), _quantity(key, its[key]), change, ratio])
    return table(f"{name} against {other_name}", ["what", "this", "other", "difference", "relative"], rows)


def _label(key: str) -> str:
    words = {"time_s": "iteration", "tokens_per_s": "tokens/s", "samples_per_s": "samples/s", "mfu": "MFU", "peak_bytes": "peak memory"}
    return words.get(key) or key.removesuffix("_s").removesuffix("_usd").replace("_", " ")


def _quantity(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key.endswith("_per_s"):
        return f"{value:,.4g}" if abs(value) < 1000 else format_count(value)
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key == "mfu":
        return f"{value:.1%}"
    return format_usd(value) if key.endswith("_usd") else format_time(value)


def _as_dict(path: Path, found: Estimate, against: Path | None, other: Estimate | None) -> dict[str, Any]:
    data: dict[str, Any] = {"plan": path, "estimate": _estimate_dict(found)}
    if other is not None:
        data |= {"against": against, "other": _estimate_dict(other), "differences": _differences(found, other)}
    return data


def _estimate_dict(found: Estimate) -> dict[str, Any]:
    """All fields, with the sums that a reader would otherwise compute."""
    data = {**dataclasses.asdict(found), "peak_bytes": found.peak_bytes, "shares_s": dict(found.shares())}
    for stage, row in zip(found.stages, data["stages"], strict=True):
        row["work"]["total_s"] = stage.work.total_s
        row["memory"]["total_bytes"] = stage.memory.total_bytes
    return data
