"""`penstock batch`: plans one global batch for a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.batch_options import MemoryLimit, Order, Recompute, Schedule, Split, ways_of
from penstock.cli.configured import CONFIGURED, configured_costs
from penstock.cli.console import (
    JsonFlag,
    VerboseFlag,
    format_bytes,
    format_count,
    format_share,
    format_time,
    out,
    print_json,
    progress,
    say,
    table,
)
from penstock.cli.options import MAX_SEARCH_STEPS, SEED, file_to_write, within
from penstock.errors import InputError, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.costs import PipelineCosts
    from penstock.batching.fitting import TooLong
    from penstock.batching.plan import BatchPlan, SampleLengths
    from penstock.batching.ways import BatchWays
    from penstock.models.micro_batch import MicroBatch

__all__ = ["batch"]

_SHOWN = 40


def batch(
    lengths: Annotated[Path, typer.Option(help="CSV of the batch: sample_id,enc_len,dec_len, or a column length.")],
    plan: Annotated[Path | None, typer.Option(help="A plan file (plan.json); none with dynapipe:DIR/NAME.")] = None,
    costs: Annotated[str, typer.Option(help="roofline, profile:FILE or a shipped profile; the plan's own if not given. dynapipe:DIR/NAME "
                                       "plans by DynaPipe's tables for the configuration NAME of its configs.json.")] = "",
    free_layers: Annotated[bool, typer.Option(help="dynapipe: move layers between the stages to suit this batch.")] = False,
    budget_steps: Annotated[
        int | None,
        typer.Option(
            callback=within(0, MAX_SEARCH_STEPS),
            help="Steps of search for micro-batches, and for their order; what the batch suggests if not given, 0 for none.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(callback=within(0, SEED), help="The same seed gives the same plan.")] = 0,
    order: Order = "",
    split: Split = "",
    schedule: Schedule = "",
    recompute: Recompute = "",
    memory_limit: MemoryLimit = None,
    too_long: Annotated[Literal["refuse", "drop", "truncate"], typer.Option(help="What to do with samples that fit no device.")] = "refuse",
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Show beside it what the usual ways to cut a batch would take: padded, packed, budgets.")
    ] = False,
    path: Annotated[Path | None, typer.Option("--out", callback=file_to_write, help="Write the planned batch to this file.")] = None,
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:  # fmt: skip
    """Plan one global batch: which samples run together, on which replica, in which order, recomputing what; time and memory to expect.

    The layout (padded or packed) and the recomputation patterns to choose from are the plan's. Status 3 if a sample fits nowhere.

    Example: penstock batch --lengths lengths.csv --plan plan.json --out batch.json

    Example: penstock batch --lengths lengths.csv --costs dynapipe:DIR/gptA
    """
    from penstock.batching.baselines import baseline_rows
    from penstock.batching.lengths import read_lengths
    from penstock.files import write_json

    ways = ways_of(order, split, schedule, recompute, memory_limit)
    with progress("reading lengths", quiet=True) as bar:
        samples = read_lengths(lengths)
        bar.describe(f"planning {plural(len(samples), 'sample')}")
        found, prepared = _planned(samples, plan, costs, free_layers, budget_steps, seed, too_long, ways)
    usual = baseline_rows(samples, prepared, too_long) if baselines else []
    if path is not None:
        write_json(path, found.to_dict())
    if json:
        compared = {"baselines": [{"method": one.method, **_figures(one)} for one in usual]} if baselines else {}
        print_json({**_summary(found), **compared, "out": path, "batch": found.to_dict()})
        return
    _show(found, verbose)
    if baselines:
        out().print(table("the same batch, cut as usual", _BASELINE_COLUMNS, [_baseline_row(one, found) for one in (found, *usual)]))
    if path is not None:
        say(f"wrote it to {path}.")


def _planned(
    samples: Sequence[SampleLengths], plan: Path | None, costs: str, free_layers: bool, budget_steps: int | None, seed: int,
    too_long: TooLong, ways: BatchWays,
) -> tuple[BatchPlan, PipelineCosts]:  # fmt: skip
    """The batch under a plan, or in a configuration of another system; and what it was priced by."""
    from penstock.batching.planner import costs_of_batch, plan_with_orders
    from penstock.batching.search import usual_steps
    from penstock.plans.schema import read_plan

    def steps(prepared: PipelineCosts) -> int:
        usual = 0 if ways.cuts else usual_steps(prepared, len(samples))
        return usual if budget_steps is None else budget_steps

    if costs.partition(":")[0] in CONFIGURED:
        if plan is not None:
            raise InputError(f"--plan does not go with --costs {costs}, whose configuration is the plan. Drop one of them.")
        prepared = ways.limited(configured_costs(costs, samples, free_layers))
        return ways.planned(samples, prepared, steps=steps(prepared), seed=seed, too_long=too_long, bound=True), prepared
    if free_layers:
        raise InputError("--free-layers belongs to --costs dynapipe:DIR/NAME; a plan's stages stay as they are. Drop it.")
    if plan is None:
        raise InputError("--plan is missing. Give a plan file, as in `--plan plan.json`, or --costs dynapipe:DIR/NAME.")
    prepared = ways.limited(costs_of_batch(read_plan(plan), samples, costs))
    if ways.cuts or ways.schedule:
        return ways.planned(samples, prepared, steps=steps(prepared), seed=seed, too_long=too_long, bound=True), prepared
    return plan_with_orders(samples, prepared, steps=budget_steps, seed=seed, too_long=too_long), prepared


def _figures(found: BatchPlan) -> dict[str, Any]:
    return {
        "predicted_s": found.predicted_s,
        "num_micro_batches": found.num_micro_batches,
        "num_tokens": found.num_tokens,
        "padding_share": found.padding_share,
        "peak_bytes": found.peak_bytes,
    }


def _summary(found: BatchPlan) -> dict[str, Any]:
    return {
        **_figures(found),
        "bound_s": found.bound_s,
        "orders": [replica.order for replica in found.replicas],
        "dropped": len(found.dropped),
        "truncated": len(found.truncated),
    }


def _show(found: BatchPlan, verbose: bool) -> None:
    speed = format_count(found.num_tokens / found.predicted_s)
    gap = f"; no way to cut it takes less than {format_time(found.bound_s)}" if found.bound_s else ""
    say(
        f"{plural(found.num_micro_batches, 'micro-batch')}: {format_time(found.predicted_s)} a step, {speed} tokens/s, "
        f"{format_bytes(found.peak_bytes)} at most, {format_share(found.padding_share)} padding{gap}; {format_count(found.num_tokens)} "
        f"tokens, {plural(found.steps, 'step')} of search ({found.costs}).", ""
    )  # fmt: skip
    for index, replica in enumerate(found.replicas):
        order = "" if replica.order == "planned" else f", in the order '{replica.order}'"
        shown = replica.micro_batches if verbose else replica.micro_batches[:_SHOWN]
        title = f"replica {index}: {format_time(replica.predicted_s)}{order}"
        out().print(table(title, _COLUMNS, [_row(number, one) for number, one in enumerate(shown)]))
        if more := len(replica.micro_batches) - len(shown):
            say(f"and {plural(more, 'more micro-batch')} (--verbose shows all)", "")
        peaks = zip(replica.warm_up, replica.peak_bytes, found.limit_bytes[index], strict=True)
        stages = [[s, ahead, format_bytes(peak), format_bytes(limit)] for s, (ahead, peak, limit) in enumerate(peaks)]
        out().print(table("", ("stage", "forwards ahead", "peak memory", "limit"), stages))
    for what, samples in (("dropped", found.dropped), ("truncated", found.truncated)):
        say(*(f"note: sample {sample.id} of {plural(sample.length, 'token')} was {what}." for sample in samples))


_BASELINE_COLUMNS = ("way", "time", "longer by", "micro-batches", "padding", "peak memory")


def _baseline_row(one: BatchPlan, found: BatchPlan) -> list[Any]:
    longer = "-" if one is found else f"{one.predicted_s / found.predicted_s - 1:.1%}"
    padding, peak = f"{one.padding_share:.1%}", format_bytes(one.peak_bytes)
    return [one.method, format_time(one.predicted_s), longer, one.num_micro_batches, padding, peak]


_COLUMNS = ("micro-batch", "layout", "samples", "shape", "tokens", "recomputation by stage")


def _row(number: int, one: MicroBatch) -> list[Any]:
    shape = f"{one.num_rows} × {one.row_length}" if one.layout == "padded" else f"longest {max(one.lengths)}"
    if one.dec_row_length:
        shape += f" / {one.dec_row_length}"
    patterns = " ".join("-" if pattern == 0 else str(pattern) for pattern in one.recompute) if any(one.recompute) else "-"
    return [number, one.layout, len(one.samples), shape, one.num_tokens, patterns]
