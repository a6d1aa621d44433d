"""`penstock search --lengths`: plans whose micro-batches are cut batch by batch, for samples of many lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_bytes, format_count, format_time, format_usd, out, print_json, progress, table

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.search import LengthsChoice, Request

__all__ = ["search_lengths"]

_COLUMNS = (
    "pp", "tp", "dp", "replicas", "zero", "micro-batches", "tokens in one", "padding", "time", "tokens/s", "to its bound", "peak memory",
    "price",
)  # fmt: skip


def search_lengths(
    request: Request, path: Path, top: int, time_budget: float | None, steps: int | None, tokens: float | None, json: bool,
    target: Path | None, strict: bool,
) -> list[Plan]:  # fmt: skip
    """Searches, shows and writes; the plans, best first."""
    from penstock.batching.lengths import read_lengths
    from penstock.cli.search import why_first, write_plans
    from penstock.search import search_for_lengths

    samples = read_lengths(path)
    with progress("searching", quiet=json) as bar:
        choices = search_for_lengths(
            request, samples, top=top, time_budget_s=time_budget or math.inf,
            watch=lambda text, best_s, bound_s: bar.describe(f"pipelines: {text}"),
            judging=lambda done, all_: bar.describe(f"planning batches for pipeline {done + 1} of {all_}"), strict=strict,
        )  # fmt: skip
    plans = [choice.plan for choice in choices]
    paths = write_plans(target, plans)
    best = choices[0]
    count = steps or (math.ceil(tokens / best.num_tokens) if tokens else 1)
    if json:
        print_json({"lengths": path, "num_samples": len(samples), "iterations": count, "out": target, "files": paths,
                    "plans": [_row(choice) for choice in choices]})  # fmt: skip
        return plans
    longest = max(sample.length for sample in samples)
    title = f"best plans of {request.model.name} for {len(samples):,} lengths up to {longest}, global batch {request.frame.global_batch}"
    out().print(table(title, _COLUMNS, [_cells(_row(choice)) for choice in choices]))
    fastest = min(choices, key=lambda choice: choice.time_s)
    offer = why_first(best.plan, best.time_s, fastest.plan, fastest.time_s, request.estimator.source)
    for line in [*offer, *_facts(best, count, path, paths)]:
        out().print(line, markup=False, soft_wrap=True)
    return plans


def _row(choice: LengthsChoice) -> dict[str, Any]:
    from penstock.search import degree_range

    plan, predicted = choice.plan, choice.plan.predicted
    assert predicted is not None
    return {
        "pp": plan.num_groups, "tp": degree_range([stage.degrees.tp for stage in plan.stages]),
        "dp": degree_range([stage.degrees.dp for stage in plan.stages]), "replicas": plan.num_replicas, "zero": plan.stages[0].zero,
        "num_micro_batches": choice.num_micro_batches, "tokens_per_micro_batch": choice.num_tokens / choice.num_micro_batches,
        "padding_share": choice.padding_share, "time_s": choice.time_s, "tokens_per_s": choice.tokens_per_s, "bound_s": choice.bound_s,
        "peak_bytes": choice.peak_bytes, "price_usd": predicted.price_usd,
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[Any]:
    return [
        row["pp"], row["tp"], row["dp"], row["replicas"], row["zero"], f"{row['num_micro_batches']:.0f}",
        format_count(row["tokens_per_micro_batch"]),
        f"{row['padding_share']:.1%}", format_time(row["time_s"]), format_count(row["tokens_per_s"]),
        f"{row['time_s'] / row['bound_s'] - 1:.1%}", format_bytes(row["peak_bytes"]),
        "-" if row["price_usd"] is None else format_usd(row["price_usd"]),
    ]  # fmt: skip


def _facts(best: LengthsChoice, count: int, lengths: Path, paths: Sequence[Path]) -> list[str]:
    facts = [f"judged by {len(best.batches)} batches; `to its bound`: how much slower than any micro-batching of the same pipeline can be"]
    if count > 1:
        price = best.plan.predicted.price_usd if best.plan.predicted else None
        usd = "" if price is None else f" and {format_usd(price * count)}"
        facts.append(f"{count:,} iterations take {best.time_s * count / 3600:,.2f} hours{usd}")
    if paths:
        facts.append(f"wrote {', '.join(map(str, paths))}; `penstock batch --lengths {lengths} --plan {paths[0]}` shows micro-batches.")
    return facts
