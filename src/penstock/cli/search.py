"""`penstock search`: the best plans for a model on a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, format_bytes, format_count, format_time, format_usd, out, print_json, progress, table
from penstock.cli.options import BATCH, BIG, Gradients, Precision, SeqLength, file_to_write, within
from penstock.cli.search_tables import TABLES, search_tables
from penstock.errors import InputError, near_misses
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, SEARCHED_SCHEDULES
from penstock.systems import TableSearch

if TYPE_CHECKING:
    from penstock.cli.export import Target
    from penstock.costs.source import CostSource
    from penstock.plans.plan import Plan
    from penstock.search import Choice, Outcome, Request
    from penstock.timing.estimate import Estimate

__all__ = ["choice_row", "choices_table", "parse_sizes", "search", "why_first", "write_plans"]

_COLUMNS = (
    "kind", "schedule", "pp", "tp", "dp", "replicas", "micro-batch", "recompute", "zero", "time", "tokens/s", "MFU", "peak memory", "price",
)  # fmt: skip
_SCHEDULES, _MAX_HOPS, _TOP = ",".join(SEARCHED_SCHEDULES), 7, 5
"""What is searched unless told."""


def search(
    model: Annotated[
        str,
        typer.Option(
            help="Model name, YAML file, traced description (.json) or hf:PATH. With aceso:DIR one of its models, such as gpt_1_3B, with "
            "fasop:DIR one of its settings."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            help="Cluster file, `local`, or a shorthand such as 4xa100-40gb. With aceso:DIR nodes x GPUs, such as 2x8; "
            "fasop:DIR's settings have their own."
        ),
    ] = "",
    global_batch: Annotated[
        int | None, typer.Option(callback=within(1, BATCH), help="Samples of one iteration; fasop:DIR's settings have their own.")
    ] = None,
    costs: Annotated[
        str,
        typer.Option(
            help="roofline, profile:FILE (or the name of a shipped profile); aceso:DIR or fasop:DIR: search that planner's own tables by "
            "its own rules."
        ),
    ] = "roofline",
    objective: Annotated[
        str, typer.Option(help="time, cost, time@cost<=USD or cost@time<=HOURS; all but time may leave nodes out.")
    ] = "time",
    seq_length: SeqLength = None,
    precision: Precision = None,
    gradients: Gradients = None,
    lengths: Annotated[
        Path | None, typer.Option(help="CSV of sample lengths: plan for micro-batches that are cut batch by batch, see `penstock batch`.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder that `penstock prepare-data` wrote: plan, in the same way, for the lengths of its samples.")
    ] = None,
    micro_batches: Annotated[str, typer.Option(help="Micro-batch sizes to try, such as 1,2,4; powers of two if not given.")] = "",
    schedules: Annotated[str, typer.Option(help=f"Schedules to choose from, besides {DEFAULT_SCHEDULE}.")] = _SCHEDULES,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            callback=within(0, BIG, above=True), help="Use at most this many GB (10⁹ bytes; with aceso:DIR 1000 of its MB) of each device."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(callback=within(1, BIG), help="Iterations to train for, for hours and money.")] = None,
    tokens: Annotated[
        float | None, typer.Option(callback=within(0, 1e18, above=True), help="Tokens to train for, instead of --steps.")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option(callback=within(0, BIG, above=True), help="Stop after this many seconds with the best plan so far.")
    ] = None,
    max_hops: Annotated[
        int, typer.Option(callback=within(0, 1000), help="Changes in a row by which the best plan is refined under the simulator.")
    ] = _MAX_HOPS,
    top: Annotated[int, typer.Option(callback=within(1, 1000), help="How many plans to show.")] = _TOP,
    path: Annotated[
        Path | None,
        typer.Option(
            "--out", callback=file_to_write,
            help="Write the plans here: the best to this file, the next to NAME.2.json, …; how they were found to NAME.search.json.",
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Rank by time alone: no simpler plan before a faster one, however near their times are.")
    ] = False,
    baselines: Annotated[bool, typer.Option("--baselines", help="Show what simpler searches find, from the same costs.")] = False,
    proof: Annotated[bool, typer.Option("--proof", help="Show how the bound came about.")] = False,
    export: Annotated[str, typer.Option(help="Also write the best plan for another system: FORMAT:PATH, as `penstock export --to`.")] = "",
    json: JsonFlag = False,
) -> None:
    """Find the fastest or the cheapest plans: stages cut between any two ops, each with its own devices, degrees and recomputed ops,
    on devices of any kinds; says how much faster than the best of them any plan could be.

    Ctrl-C, or the end of the time budget, gives the best plan so far. Status 3 if no plan fits.

    Example: penstock search --model gpt-1.3b --cluster 4xa100-40gb --global-batch 64 --out plan.json

    Example: penstock search --costs aceso:DIR --model gpt_1_3B --cluster 1x4 --global-batch 1024 --memory-limit 28 --out aceso.json
    """
    from penstock.cli.search_record import Trail, record_path, write_record
    from penstock.files import written_together
    from penstock.plans.precision import described_training
    from penstock.search import Objective, Request, num_steps
    from penstock.search import search as find

    target = _target(export)
    if costs.partition(":")[0] in TABLES:
        search_tables(
            TableSearch(costs, model, cluster, global_batch, parse_sizes(micro_batches), memory_limit), path, steps, json,
            {"objective": objective != "time", "seq_length": seq_length, "precision": precision, "gradients": gradients,
             "lengths": lengths, "data": data, "schedules": schedules != _SCHEDULES, "tokens": tokens, "time_budget": time_budget,
             "max_hops": max_hops != _MAX_HOPS, "top": top != _TOP, "baselines": baselines, "proof": proof, "export": export},
        )  # fmt: skip
        return
    if not cluster or global_batch is None:
        missing, hint = ("--cluster", "4xa100-40gb") if not cluster else ("--global-batch", "64")
        raise InputError(f"{missing} is missing. Give it, as in `{missing} {hint}`.")
    goal, names = Objective.parse(objective), _schedules(schedules)
    request = Request.of(
        model, cluster, global_batch, costs, seq_length, parse_sizes(micro_batches), _limit_bytes(memory_limit), names, precision,
        gradients,
    )  # fmt: skip
    if target:
        _check_export(target, request)
    if lengths is not None or data is not None:
        from penstock.cli.search_lengths import lengths_of, search_lengths

        _check_lengths(
            seq_length=lengths and seq_length, micro_batches=micro_batches, objective=not goal.is_time, baselines=baselines, proof=proof
        )
        source = lengths or data
        assert source is not None
        samples = lengths_of(request, lengths, data)
        plans = search_lengths(request, source, samples, top, time_budget, steps, tokens, json, path, strict)
        if target:
            _export(plans[0], target, path)
        return
    count = num_steps(request, steps, tokens)
    notes: list[str] = []
    trail = Trail()
    with progress("searching", quiet=json) as bar:

        def tell(text: str, best_s: float, bound_s: float) -> None:
            trail.note(text, best_s, bound_s)
            best = "-" if best_s == math.inf else format_time(best_s)
            gap = "" if math.inf in (best_s, bound_s) or not bound_s else f", at most {best_s / bound_s - 1:.1%} above the best possible"
            bar.describe(f"{text}: best {best}{gap}")

        if not goal.is_time:
            from penstock.search import chosen, offers

            found, _ = offers(request, count, lambda text, done, all_: bar.describe(f"{text} ({done} of {all_} clusters)"))
            offer = chosen(found, goal)
            request = request.on(offer.cluster)
            notes.append(f"of {cluster}, {offer.cluster.name} is best for {objective}")
        outcome = find(request, top=top, time_budget_s=time_budget or math.inf, watch=tell, max_hops=max_hops)
    # Under a limit of money or hours a slower plan may be one too many.
    strict = strict or not goal.is_time
    choices = outcome.choices if strict else outcome.simple_first
    rows = baseline_rows(request, outcome) if baselines else []
    with written_together():
        paths = write_plans(path, [choice.plan for choice in choices])
        if path is not None:
            asked = {
                "model": model, "cluster": cluster, "global_batch": global_batch, "costs": costs, "objective": objective, "steps": count,
                "seq_length": choices[0].plan.seq_length, "precision": choices[0].plan.precision, "micro_batches": micro_batches,
                "schedules": names, "memory_limit_gb": memory_limit, "strict": strict,
            }  # fmt: skip
            found_rows = [choice_row(choice, count) for choice in choices]
            write_record(record_path(path), asked, outcome, choices, found_rows, paths, rows, proof_rows(outcome), trail)
    if target:
        _export(choices[0].plan, target, path)
    best = choices[0]
    if json:
        print_json({
            "model": model, "cluster": cluster, "costs": costs, "objective": objective, "out": path, "files": paths,
            "seq_length": best.plan.seq_length, "precision": best.plan.precision, "gradients": best.plan.gradients,
            "notes": best.estimate.notes, "lower_bound_s": outcome.bound_s, "gap": outcome.gap, "stopped": outcome.stopped,
            "fastest_s": outcome.choices[0].estimate.time_s, "error": outcome.error, "strict": strict,
            "plans": [choice_row(choice, count) for choice in choices],
            **({"baselines": rows} if baselines else {}), **({"proof": proof_rows(outcome)} if proof else {}),
        })  # fmt: skip
        return
    out().print(choices_table(f"best plans of {model} on {cluster}, global batch {global_batch} ({costs})", choices))
    if rows:
        out().print(_baselines_table(rows))
    if proof:
        out().print(_proof_table(outcome))
    fastest = outcome.choices[0]
    notes += why_first(best.plan, best.estimate.time_s, fastest.plan, fastest.estimate.time_s, request.estimator.source)
    told = [f"note: {note}" for note in best.estimate.notes]
    for line in [described_training(best.plan), *notes, *_facts(outcome, best.estimate, count), *told]:
        out().print(line, markup=False, soft_wrap=True)
    if paths:
        out().print(
            f"wrote {', '.join(map(str, paths))}; `penstock explain {paths[0]}` says where its time goes.", markup=False, soft_wrap=True
        )


def _check_lengths(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise InputError(
                f"--{name.replace('_', '-')} does not go with --lengths or --data, whose batches are planned one by one, for time. "
                "Drop one of them."
            )


def _target(text: str) -> Target | None:
    """What `--export` names, checked before the search whose plan it is to get."""
    from penstock.cli.export import WEIGHTS, parse_target

    target = parse_target(text, "--export") if text else None
    if target and target.system == WEIGHTS:
        raise InputError(f"--export is '{text}': a plan has no weights. Export those of a checkpoint: penstock export RUN --to {text}")
    return target


def _check_export(target: Target, request: Request) -> None:
    from penstock.cli.export import check_model

    check_model(target, request.model)


def _export(plan: Plan, target: Target, path: Path | None) -> None:
    from penstock.cli.export import export_plan

    try:
        export_plan(plan, target, path or Path("plan.json"))
    except InputError as error:
        raise InputError(f"{error} The search was not in vain: its plans are in '{path}'." if path else str(error)) from None


def write_plans(path: Path | None, plans: Sequence[Plan]) -> list[Path]:
    """Writes the best plan to `path` and the next ones beside it; the files written."""
    from penstock.files import written_together
    from penstock.plans.schema import write_plan

    if path is None:
        return []
    paths = [path, *(path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(2, len(plans) + 1))]
    with written_together():
        for target, plan in zip(paths, plans, strict=True):
            write_plan(target, plan)
    return paths


def _facts(outcome: Outcome, best: Estimate, count: int) -> list[str]:
    facts = [
        f"times are the simulator's; by formula, with messages counted in full, no such plan takes less than "
        f"{format_time(outcome.bound_s)}, and the best found, {format_time(outcome.formula_s)}, is at most "
        f"{outcome.gap:.1%} above the best possible"
    ]
    if count > 1:
        usd = "" if best.price_usd is None else f" and {format_usd(best.price_usd * count)}"
        facts.append(f"{count:,} iterations take {best.time_s * count / 3600:,.2f} hours{usd}")
    if outcome.stopped:
        facts.append(
            f"stopped by the {outcome.stopped}" if outcome.stopped == "time budget" else "interrupted: these are the best plans so far"
        )
    return facts


def why_first(plan: Plan, time_s: float, fastest: Plan, fastest_s: float, source: CostSource) -> list[str]:
    """One line for a plan that is first without being the fastest, none for one that is."""
    from penstock.search import short_name

    return [] if plan is fastest else [
        f"{short_name(plan)} is {time_s / fastest_s - 1:.1%} slower than the best found, {short_name(fastest)} at "
        f"{format_time(fastest_s)}, within the error of ±{source.error:.0%} ({source.name}), and simpler (--strict ranks by time alone)"
    ]  # fmt: skip


def parse_sizes(text: str) -> list[int]:
    """Micro-batch sizes such as `1,2,4`."""
    try:
        sizes = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(f"--micro-batches is '{text}'; numbers such as 1,2,4 were expected.") from None
    if any(size < 1 for size in sizes):
        raise InputError(f"--micro-batches is '{text}'; sizes start at 1.")
    return sizes


def _schedules(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SEARCHED_SCHEDULES:
            known = f"It is never searched, though plans may name it. Searched: {', '.join(SEARCHED_SCHEDULES)}."
            raise InputError(f"--schedules has '{name}'. {known if name in SCHEDULES else near_misses(name, SEARCHED_SCHEDULES)}")
    return names


def _limit_bytes(limit_gb: float | None) -> float:
    return math.inf if limit_gb is None else limit_gb * 1e9


def choice_row(choice: Choice, count: int = 1) -> dict[str, Any]:
    """A plan in one flat object; hours and money for a number of iterations."""
    plan, found = choice.plan, choice.estimate
    total = {} if count == 1 else {
        "hours": found.time_s * count / 3600, "total_usd": None if found.price_usd is None else found.price_usd * count,
    }  # fmt: skip
    return {
        "kind": choice.kind, "schedule": plan.schedule, "pp": plan.num_groups, "tp": choice.tp, "dp": choice.dp,
        "replicas": plan.num_replicas, "micro_batch": plan.micro_batching.samples, "num_micro_batches": found.num_micro_batches,
        "per_replica": list(plan.micro_batching.per_replica), "recompute": choice.recompute,
        "zero": plan.stages[0].zero, "time_s": found.time_s, "tokens_per_s": found.tokens_per_s, "samples_per_s": found.samples_per_s,
        "mfu": found.mfu, "peak_bytes": found.peak_bytes, "price_usd": found.price_usd, "price_usd_per_h": found.price_usd_per_h, **total,
    }  # fmt: skip


def choices_table(title: str, choices: Sequence[Choice]) -> Any:
    """The plans as a table, a row each."""
    rows = []
    for choice in choices:
        row = choice_row(choice)
        degrees = [row[name] for name in ("kind", "schedule", "pp", "tp", "dp", "replicas", "micro_batch", "recompute", "zero")]
        if shares := row["per_replica"]:
            degrees[5] = f"{degrees[5]} ({max(shares)} to {min(shares)})"
        speed = "-" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"])
        price = "-" if row["price_usd"] is None else format_usd(row["price_usd"])
        rows.append([*degrees, format_time(row["time_s"]), speed, f"{row['mfu']:.1%}", format_bytes(row["peak_bytes"]), price])
    return table(title, _COLUMNS, rows)


def baseline_rows(request: Any, outcome: Outcome) -> list[dict[str, Any]]:
    """What simpler searches find."""
    from penstock.search import BASELINES, best_of

    rows = []
    for baseline in BASELINES:
        found = best_of(baseline, request)
        slower = None if found is None else found.estimate.time_s / outcome.choices[0].estimate.time_s - 1
        rows.append(
            {"name": baseline.name, "space": baseline.about, "slower": slower, "plan": None if found is None else choice_row(found)}
        )
    return rows


def _baselines_table(rows: list[dict[str, Any]]) -> Any:
    cells = []
    for row in rows:
        plan = row["plan"]
        if plan is None:
            cells.append([row["name"], row["space"], *["-"] * 6, "does not fit"])
            continue
        degrees = [plan[name] for name in ("pp", "tp", "replicas", "micro_batch", "recompute")]
        cells.append([row["name"], row["space"], *degrees, format_time(plan["time_s"]), f"{row['slower']:+.1%}"])
    columns = ["search", "space", "pp", "tp", "replicas", "micro-batch", "recompute", "time", "slower"]
    return table("what simpler searches find, from the same costs", columns, cells)


def proof_rows(outcome: Outcome) -> list[dict[str, Any]]:
    """How far each part of the space was excluded, the weakest first."""
    return [
        {"replicas": line.replicas, "micro_batch": line.micro_batch, "max_stages": line.subspace.max_stages,
         "devices_of_a_stage": sorted({option.num_devices for option in line.subspace.options}), "by_ops_s": line.by_ops_s,
         "by_stages_s": line.by_stages_s, "bound_s": line.bound_s}
        for line in outcome.proof
    ]  # fmt: skip


def _proof_table(outcome: Outcome) -> Any:
    rows = [
        [row["replicas"], row["micro_batch"], row["max_stages"], ", ".join(map(str, row["devices_of_a_stage"])),
         format_time(row["by_ops_s"]), "-" if row["by_stages_s"] is None else format_time(row["by_stages_s"]), format_time(row["bound_s"])]
        for row in proof_rows(outcome)[:12]
    ]  # fmt: skip
    columns = ["replicas", "micro-batch", "stages up to", "devices of a stage", "by ops", "by whole stages", "bound"]
    return table("nothing else can be faster than this, the weakest first (see docs/search.md)", columns, rows)
