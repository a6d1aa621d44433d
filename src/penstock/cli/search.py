"""`penstock search`: the best plans for a model on a cluster."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, format_bytes, format_count, format_time, format_usd, out, print_json, progress, table
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.search import Choice

__all__ = ["choice_row", "choices_table", "search"]

_COLUMNS = ("kind", "pp", "tp", "dp", "replicas", "micro-batch", "recompute", "zero", "time", "tokens/s", "MFU", "peak memory", "price")


def search(
    model: Annotated[str, typer.Option(help="Model name, YAML file, traced description (.json) or hf:PATH.")],
    cluster: Annotated[str, typer.Option(help="Cluster file, `local`, or a shorthand such as 4xa100-40gb.")],
    global_batch: Annotated[int, typer.Option(help="Samples of one iteration.")],
    costs: Annotated[str, typer.Option(help="roofline, profile:FILE (or the name of a shipped profile).")] = "roofline",
    seq_length: Annotated[int | None, typer.Option(help="Tokens of a sample; the model's usual length if not given.")] = None,
    micro_batches: Annotated[str, typer.Option(help="Micro-batch sizes to try, such as 1,2,4; powers of two if not given.")] = "",
    memory_limit: Annotated[float | None, typer.Option(help="Use at most this many GB (10⁹ bytes) of each device.")] = None,
    top: Annotated[int, typer.Option(help="How many plans to show.")] = 5,
    path: Annotated[Path | None, typer.Option("--out", help="Write the best plan to this file.")] = None,
    json: JsonFlag = False,
) -> None:
    """Find the fastest plans: all uniform ones (equal stages, one tp degree, recompute none or full, ZeRO 0 or 1), and on equal devices
    also plans with stages of any size, cut between any two ops, with their own degrees and recomputed ops.

    Status 3 if no plan fits the devices' memory.

    Example: penstock search --model gpt-1.3b --cluster 4xa100-40gb --global-batch 64 --out plan.json
    """
    sizes, limit_bytes = _sizes(micro_batches), _limit_bytes(memory_limit)
    for name, value in (("--global-batch", global_batch), ("--seq-length", seq_length), ("--top", top)):
        if value is not None and value < 1:
            raise InputError(f"{name} is {value}; 1 or more was expected.")
    from penstock.plans.schema import write_plan
    from penstock.search import search_plans

    with progress("estimating plans", quiet=True) as bar:
        found = search_plans(
            model, cluster, global_batch, costs=costs, seq_length=seq_length, micro_batches=sizes, memory_limit_bytes=limit_bytes, top=top,
            progress=bar.advance,
        )  # fmt: skip
    if path is not None:
        write_plan(path, found[0].plan)
    if json:
        print_json({"model": model, "cluster": cluster, "costs": costs, "out": path, "plans": [choice_row(choice) for choice in found]})
        return
    out().print(choices_table(f"best plans of {model} on {cluster}, global batch {global_batch} ({costs})", found))
    for note in found[0].estimate.notes:
        out().print(f"note: {note}", markup=False, soft_wrap=True)
    if path is not None:
        out().print(f"wrote the first to {path}; `penstock explain {path}` says where its time goes.", markup=False, soft_wrap=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(f"--micro-batches is '{text}'; numbers such as 1,2,4 were expected.") from None
    if any(size < 1 for size in sizes):
        raise InputError(f"--micro-batches is '{text}'; sizes start at 1.")
    return sizes


def _limit_bytes(limit_gb: float | None) -> float:
    if limit_gb is None:
        return math.inf
    if not (math.isfinite(limit_gb) and limit_gb > 0):
        raise InputError(f"--memory-limit is {limit_gb}; a number of GB above 0 was expected.")
    return limit_gb * 1e9


def choice_row(choice: Choice) -> dict[str, Any]:
    """A plan in one flat object."""
    plan, found = choice.plan, choice.estimate
    return {
        "kind": choice.kind,
        "pp": plan.num_stages,
        "tp": choice.tp,
        "dp": choice.dp,
        "replicas": plan.num_replicas,
        "micro_batch": plan.micro_batching.samples,
        "num_micro_batches": found.num_micro_batches,
        "recompute": choice.recompute,
        "zero": plan.stages[0].zero,
        "time_s": found.time_s,
        "tokens_per_s": found.tokens_per_s,
        "samples_per_s": found.samples_per_s,
        "mfu": found.mfu,
        "peak_bytes": found.peak_bytes,
        "price_usd": found.price_usd,
        "price_usd_per_h": found.price_usd_per_h,
    }


def choices_table(title: str, choices: list[Choice]) -> Any:
    """The plans as a table, a row each."""
    rows = []
    for choice in choices:
        row = choice_row(choice)
        degrees = [row[name] for name in ("kind", "pp", "tp", "dp", "replicas", "micro_batch", "recompute", "zero")]
        speed = "-" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"])
        price = "-" if row["price_usd"] is None else format_usd(row["price_usd"])
        rows.append([*degrees, format_time(row["time_s"]), speed, f"{row['mfu']:.1%}", format_bytes(row["peak_bytes"]), price])
    return table(title, _COLUMNS, rows)
