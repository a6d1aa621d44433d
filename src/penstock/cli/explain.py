"""`penstock explain`: where a plan's time, memory and money go, how it differs from others, and what would make it faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import (
    JsonFlag,
    VerboseFlag,
    format_bytes,
    format_count,
    format_part,
    format_time,
    format_usd,
    out,
    print_json,
    progress,
    say,
    table,
)
from penstock.cli.plan_words import choice_row, micro_batch_words, plan_name, plan_sentence
from penstock.errors import InputError, plural
from penstock.systems import SYSTEMS

if TYPE_CHECKING:
    from penstock.search import Choice, Relaxed, Rival
    from penstock.timing.iteration_estimate import Estimate, StageEstimate

__all__ = ["explain", "show_estimate"]

_TIME_COLUMNS = (
    "stage", "ops", "device", "tp", "dp", "forward", "backward", "recompute", "tp comm", "transfers", "host wait", "all",
    "bubble", "grad sync", "optimizer",
)  # fmt: skip
_SPARE = ("ops", "device", "tp", "dp")


def explain(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file (plan.json).")],
    against: Annotated[Path | None, typer.Option(help="Another plan: show what differs, as this plan minus that one.")] = None,
    costs: Annotated[
        str | None, typer.Option(help="roofline or profile:FILE; if not given, those the plan names; aceso:DIR for a plan file of "
                          "Aceso, dynapipe:DIR/NAME for a batch that `penstock batch --out` wrote.")
    ] = None,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Also search again: why the next best plans lost, and what would make training faster.")
    ] = False,
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:
    """Say where a plan's time, memory and money go, stage by stage, what the others wait for, and what the runtime cannot run of it.

    Example: penstock explain plan.json --against other.json
    """
    if costs and costs.partition(":")[0] in SYSTEMS:
        _explain_by_tables(plan, costs, json, {"--against": against is not None, "--what-if": what_if})
        return
    found = _estimate(plan, costs)
    other = _estimate(against, costs or found.source) if against is not None else None
    cannot = _unsupported(plan)
    beside, faster = _what_if(plan, costs, quiet=json) if what_if else ([], [])
    if json:
        print_json(_as_dict(plan, found, against, other) | {"unsupported": cannot} | (_what_if_dict(beside, faster) if what_if else {}))
        return
    say(_sentence(plan, costs, found), "")
    show_estimate(str(plan), found, verbose)
    say(*(f"cannot be trained yet: {problem}" for problem in cannot))
    if other is not None:
        out().print(_differences_table(str(plan), found, str(against), other))
    if what_if:
        _show_what_if(found, beside, faster)


def _explain_by_tables(path: Path, costs: str, json: bool, others: dict[str, bool]) -> None:
    """A plan file of another system by that system's own tables and rules."""
    from penstock.cli.search_tables import show_stages

    name, _, folder = costs.partition(":")
    score = SYSTEMS[name].score
    if score is None or not folder:
        known = ", ".join(f"{one}:DIR" for one, system in SYSTEMS.items() if system.score is not None)
        raise InputError(f"costs '{costs}': plans are scored by roofline, profile:FILE, and plan files of other systems by {known}.")
    for option in (option for option, given in others.items() if given):
        raise InputError(f"{option} does not go with --costs {costs}: the plan is scored as it is. Drop it.")
    found = score(folder, path)
    if json:
        print_json({"plan": path, "costs": costs, "time_s": found.time_s, "stages": found.stages})
        return
    say(f"{format_time(found.time_s)} an iteration by the tables' own rules; {found.note}", "")
    show_stages(found.title, found.stages)


def _estimate(path: Path, costs: str | None) -> Estimate:
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.schema import read_plan
    from penstock.plans.validity import require_valid
    from penstock.timing.estimate import estimate
    from penstock.timing.planned import clocked

    plan = read_plan(path)
    require_valid(plan, where=f"plan '{path}'")
    cluster = cluster_of(plan)
    return clocked(plan, estimate(plan, model_of(plan), cluster, open_costs(costs or plan.costs, cluster)))


def _sentence(path: Path, costs: str | None, found: Estimate) -> str:
    """The plan in one sentence, beside the bound that its search wrote into it if the costs are the same."""
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of
    from penstock.plans.schema import read_plan

    plan = read_plan(path)
    error = open_costs(costs or plan.costs, cluster_of(plan)).error
    known = plan.predicted if plan.predicted is not None and plan.predicted.costs == found.source else None
    return plan_sentence(plan, found, error, known.lower_bound_s if known else None)


def _unsupported(path: Path) -> list[str]:
    from penstock.plans.capabilities import unsupported
    from penstock.plans.references import model_of
    from penstock.plans.schema import read_plan

    plan = read_plan(path)
    return unsupported(plan, model_of(plan))


def _what_if(path: Path, costs: str | None, quiet: bool) -> tuple[list[Rival], list[Relaxed]]:
    """The next best plans, and the best plan with each limit relaxed."""
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of
    from penstock.plans.schema import read_plan
    from penstock.search import Choice, found_beside, relaxed, request_of, rivals
    from penstock.search.what_if import BUDGET_S

    plan = read_plan(path)
    request = request_of(plan, open_costs(costs or plan.costs, cluster_of(plan)))
    own = Choice.of(plan, request.estimator.estimate(plan), "exact").clocked()
    with progress("other plans", quiet=quiet) as bar:
        found = found_beside(request, BUDGET_S, lambda text: bar.describe(f"other plans: {text}"))
        rows = relaxed(request, [own, *found[:1]], BUDGET_S, lambda change: bar.describe(f"what if: {change}"))
    return rivals(own, found), rows


def show_estimate(name: str, found: Estimate, verbose: bool = False) -> None:
    """Prints the whole estimate: times and memory by stage, shares of the iteration, totals."""
    title = f"{name}: times per micro-batch; bubble, gradient sync and optimizer per iteration"
    out().print(table(title, _TIME_COLUMNS, [_time_row(stage, found) for stage in found.stages], more=_SPARE, verbose=verbose))
    out().print(_memory_table(found))
    out().print(_shares_table(found))
    say(*_facts(found), *(f"note: {note}" for note in found.notes))


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
        [stage.index, f"{format_part(row[-1], stage.limit_bytes)} ({row[-1] / stage.limit_bytes:.0%}{'' if stage.fits else ', too much'})",
         *(format_bytes(row[column]) for column in shown)]
        for stage, row in zip(found.stages, sizes, strict=True)
    ]  # fmt: skip
    return table("memory of the fullest device", ["stage", "all", *(names[column] for column in shown)], rows)


def _shares_table(found: Estimate) -> Any:
    rows = [[name, format_time(time_s), f"{time_s / found.time_s:.1%}"] for name, time_s in found.shares() if time_s]
    rows.append(["all", format_time(found.time_s), "100.0%"])
    return table(f"one iteration, seen from stage {found.bottleneck}", ["what", "time", "share"], rows)


def _facts(found: Estimate) -> list[str]:
    from penstock.plans.texts import format_counts

    micro_batches = f"{plural(found.num_micro_batches, 'micro-batch')} of {found.samples} per replica"
    if len(set(found.per_replica)) > 1:
        micro_batches = f"{format_counts(found.per_replica)} micro-batches of {found.samples}, replica {found.replica} being last"
    facts = [
        f"{format_time(found.time_s)} per iteration of {micro_batches}, {_quantity('samples_per_s', found.samples_per_s)} samples/s "
        f"({found.source})"
    ]
    if len(found.stages) > 1:
        slowest_s = found.stages[found.bottleneck].work.total_s
        facts.append(f"the others wait for stage {found.bottleneck}: {format_time(slowest_s)} per micro-batch")
    if found.price_usd is not None and found.price_usd_per_h is not None:
        facts.append(f"{format_usd(found.price_usd)} per iteration, {format_usd(found.price_usd_per_h)} per hour")
    facts += _divided(found)
    tight = max(found.stages, key=lambda stage: stage.memory.total_bytes / stage.limit_bytes)
    if not found.fits:
        needed, limit = format_bytes(tight.memory.total_bytes), format_bytes(tight.limit_bytes)
        facts.append(f"this plan does not fit: stage {tight.index} needs {needed} of {limit} on {tight.device}")
    return facts


def _divided(found: Estimate) -> Iterator[str]:
    """Which stages divide more than their ops: tokens, and what ranks with equal weights would otherwise each hold."""
    from penstock.plans.texts import format_ranks

    by_rows = [stage.index for stage in found.stages if stage.sequence_parallel]
    if by_rows:
        yield f"sequence_parallel in stages {format_ranks(by_rows)}: between products each tp rank holds some of the tokens"
    shared = ("", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")
    for level in (1, 2, 3):
        own = [stage.index for stage in found.stages if stage.zero == level]
        if own:
            yield f"ZeRO-{level} in stages {format_ranks(own)}: ranks with equal weights divide {shared[level]}"


def _totals(found: Estimate) -> dict[str, float | None]:
    """The figures by which two plans are compared."""
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


_SMALL = 0.001
"""Parts that differ by less than this share of the time are not named."""


def _show_what_if(found: Estimate, beside: list[Rival], faster: list[Relaxed]) -> None:
    rows = []
    for rival in beside:
        choice, least_s = rival.choice, _SMALL * found.time_s
        worse, better = (
            ", ".join(f"{name} {format_time(abs(time_s))}" for name, time_s in parts if abs(time_s) > least_s) or "-"
            for parts in ([part for part in rival.parts_s if part[1] > 0], [part for part in rival.parts_s if part[1] < 0])
        )
        rows.append([*_of_plan(choice), format_time(choice.estimate.time_s), f"{rival.slower:+.1%}", worse, better])
    columns = ["plan", "micro-batch", "time", "slower", "takes more", "takes less"]
    out().print(table(f"the best plans of other kinds, against this one's {format_time(found.time_s)}", columns, rows))
    say(_verdict(found, beside, faster[0]), "")
    out().print(table("what would make training faster, one change at a time, each with the best plan found",
                      ["change", "time", "saved", "plan", "micro-batch"], map(_relaxed_row, faster)))  # fmt: skip
    say(*(f"{change.change}: {change.note}" for change in faster if change.note))


def _of_plan(choice: Choice) -> list[str]:
    return [plan_name(choice.plan), micro_batch_words(choice.plan)]


def _relaxed_row(row: Relaxed) -> list[Any]:
    if row.choice is None:
        return [row.change, *["-"] * 4]
    gain = "-" if row.gain is None else f"{row.gain:.1%}"
    return [row.change, format_time(row.choice.estimate.time_s), gain, *_of_plan(row.choice)]


def _verdict(found: Estimate, beside: list[Rival], best: Relaxed) -> str:
    """Why the first of the others lost, or that a plan did not."""
    if best.time_s is not None and best.time_s < found.time_s * (1 - 1e-9):
        saved = 1 - best.time_s / found.time_s
        return f"a faster plan was found: {format_time(best.time_s)}, {saved:.1%} less; `penstock search` finds and writes it"
    if not beside:
        return "no plan of another kind was found that fits"
    if not found.fits:
        return "the plans above fit, this one does not"
    name, time_s = max(beside[0].parts_s, key=lambda part: part[1])
    return f"the runner-up lost most by its {name}: {format_time(time_s)} more in each iteration"


def _what_if_dict(beside: list[Rival], faster: list[Relaxed]) -> dict[str, Any]:
    return {
        "rivals": [
            {**choice_row(rival.choice), "slower": rival.slower, "differences_s": dict(rival.parts_s)} for rival in beside
        ],
        "what_if": [
            {"change": row.change, "time_s": row.time_s, "gain": row.gain, "note": row.note,
             "plan": None if row.choice is None else choice_row(row.choice)} for row in faster
        ],
    }  # fmt: skip


def _as_dict(path: Path, found: Estimate, against: Path | None, other: Estimate | None) -> dict[str, Any]:
    data: dict[str, Any] = {"plan": path, "estimate": _estimate_dict(found)}
    if other is not None:
        data |= {"against": against, "other": _estimate_dict(other), "differences": _differences(found, other)}
    return data


_WORK = ("forward_s", "backward_s", "recompute_s", "tp_s", "transfer_in_s", "transfer_out_s", "waiting_s", "total_s")
"""What a stage takes for one micro-batch, by cause; the last is the sum of the others."""


def _estimate_dict(found: Estimate) -> dict[str, Any]:
    """All fields, with the sums that a reader would otherwise compute."""
    data = {**dataclasses.asdict(found), "peak_bytes": found.peak_bytes, "shares_s": dict(found.shares())}
    for stage, row in zip(found.stages, data["stages"], strict=True):
        row["work"] = {name: getattr(stage.work, name) for name in _WORK}
        row["memory"]["total_bytes"] = stage.memory.total_bytes
    return data
