"""`penstock batch`: plans one global batch for a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli.console import JsonFlag, format_bytes, format_count, format_time, out, print_json, table
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.batching.plan import BatchPlan, MicroBatch

__all__ = ["batch"]

_SHOWN = 40


def batch(
    lengths: Annotated[Path, typer.Option(help="CSV of the batch: sample_id,enc_len,dec_len, or a column length.")],
    plan: Annotated[Path, typer.Option(help="A plan file (plan.json).")],
    costs: Annotated[str, typer.Option(help="roofline, profile:FILE or a shipped profile; the plan's own if not given.")] = "",
    budget_steps: Annotated[
        int | None,
        typer.Option(help="Steps of search for micro-batches, and for their order; what the batch suggests if not given, 0 for none."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same plan.")] = 0,
    too_long: Annotated[Literal["refuse", "drop", "truncate"], typer.Option(help="What to do with samples that fit no device.")] = "refuse",
    path: Annotated[Path | None, typer.Option("--out", help="Write the planned batch to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Plan one global batch: which samples run together, on which replica, in which order, recomputing what; time and memory to expect.

    The layout (padded or packed) and the recomputation patterns to choose from are the plan's. Status 3 if a sample fits nowhere.

    Example: penstock batch --lengths lengths.csv --plan plan.json --out batch.json
    """
    from penstock.batching.lengths import read_lengths
    from penstock.batching.planner import plan_for
    from penstock.files import write_json
    from penstock.plans.schema import read_plan

    if budget_steps is not None and budget_steps < 0:
        raise InputError(f"--budget-steps is {budget_steps}; 0 or more were expected.")
    if seed < 0:
        raise InputError(f"--seed is {seed}; 0 or more was expected.")
    found = plan_for(read_plan(plan), read_lengths(lengths), costs=costs, steps=budget_steps, seed=seed, too_long=too_long)
    if path is not None:
        write_json(path, found.to_dict())
    if json:
        print_json({**_summary(found), "out": path, "batch": found.to_dict()})
        return
    _show(found)
    if path is not None:
        out().print(f"wrote it to {path}.", markup=False, soft_wrap=True)


def _summary(found: BatchPlan) -> dict[str, Any]:
    return {
        "predicted_s": found.predicted_s,
        "bound_s": found.bound_s,
        "num_micro_batches": found.num_micro_batches,
        "num_tokens": found.num_tokens,
        "padding_share": found.padding_share,
        "peak_bytes": found.peak_bytes,
        "orders": [replica.order for replica in found.replicas],
        "dropped": len(found.dropped),
        "truncated": len(found.truncated),
    }


def _show(found: BatchPlan) -> None:
    speed = format_count(found.num_tokens / found.predicted_s)
    gap = f", at least {format_time(found.bound_s)} for any plan" if found.bound_s else ""
    out().print(f"{format_time(found.predicted_s)} per iteration ({speed} tokens/s{gap}; {found.costs})", markup=False, soft_wrap=True)
    out().print(
        f"{found.num_micro_batches} micro-batches, {format_count(found.num_tokens)} tokens, {found.padding_share:.1%} padding, "
        f"{found.steps} steps of search", markup=False, soft_wrap=True,
    )  # fmt: skip
    for index, replica in enumerate(found.replicas):
        rows = [_row(number, one) for number, one in enumerate(replica.micro_batches)]
        if len(rows) > _SHOWN:
            rows = [*rows[: _SHOWN - 1], ["…", "", "", "", "", ""]]
        order = "" if replica.order == "planned" else f", in the order '{replica.order}'"
        out().print(table(f"replica {index}: {format_time(replica.predicted_s)}{order}", _COLUMNS, rows))
        peaks = zip(replica.warm_up, replica.peak_bytes, found.limit_bytes[index], strict=True)
        stages = [[s, ahead, format_bytes(peak), format_bytes(limit)] for s, (ahead, peak, limit) in enumerate(peaks)]
        out().print(table("", ("stage", "forwards ahead", "peak memory", "limit"), stages))
    for what, samples in (("dropped", found.dropped), ("truncated", found.truncated)):
        for sample in samples:
            out().print(f"note: sample {sample.id} of {sample.length} tokens was {what}.", markup=False, soft_wrap=True)


_COLUMNS = ("micro-batch", "layout", "samples", "shape", "tokens", "recomputation by stage")


def _row(number: int, one: MicroBatch) -> list[Any]:
    shape = f"{one.num_rows} × {one.row_length}" if one.layout == "padded" else f"longest {max(one.lengths)}"
    if one.dec_row_length:
        shape += f" / {one.dec_row_length}"
    patterns = " ".join("-" if pattern == 0 else str(pattern) for pattern in one.recompute)
    return [number, one.layout, len(one.samples), shape, one.num_tokens, patterns]
