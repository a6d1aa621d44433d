"""`penstock search --lengths` and `--data`: plans whose micro-batches are cut batch by batch, for samples of many lengths."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.cli.console import (
    format_bytes,
    format_count,
    format_part,
    format_share,
    format_time,
    format_usd,
    out,
    print_json,
    progress,
    say,
    table,
)  # fmt: skip
from penstock.cli.plan_words import next_steps, plan_name
from penstock.cli.search_answer import iterations_line, why_first
from penstock.cli.search_places import write_plans
from penstock.errors import plural, shell_words

if TYPE_CHECKING:
    from penstock.batching.plan import SampleLengths
    from penstock.batching.ways import BatchWays
    from penstock.plans.plan import Plan
    from penstock.search import LengthsChoice, Request

__all__ = ["lengths_of", "search_lengths"]

_COLUMNS = (
    "plan", "micro-batches", "tokens in one", "padding", "time", "tokens/s", "memory", "price", "above its bound", "replicas",
    "dp in each", "pp", "tp", "ZeRO",
)  # fmt: skip
_SPARE = _COLUMNS[8:]

_WAYS = {
    "uniform": "equally many samples padded to the longest", "budget": "similar lengths up to a budget of tokens",
    "across": "packed rows, attention across samples", "packed": "packed rows, attention inside samples",
}  # fmt: skip

_MOST = 200_000
"""Samples of a data set that are looked at, spread over all of it: some batches are drawn from them."""


def lengths_of(request: Request, lengths: Path | None, data: Path | None) -> list[SampleLengths]:
    """The samples to plan for: of a CSV file, or of prepared data as the request's model takes them, cut to its longest length."""
    from penstock.batching.lengths import read_lengths
    from penstock.batching.plan import SampleLengths
    from penstock.data.dataset import open_data
    from penstock.data.filled import filled_positions
    from penstock.data.forms import form_of
    from penstock.errors import InputError

    if (lengths is None) == (data is None):
        raise InputError("--lengths and --data both say which samples to plan for. Give one of them.")
    if lengths is not None:
        return read_lengths(lengths)
    assert data is not None
    found = open_data(data)
    found.check()
    filled = filled_positions(form_of(request.model, found), found, request.frame.seq_length, request.frame.dec_length)
    taken = np.union1d(np.linspace(0, len(filled.own) - 1, min(_MOST, len(filled.own))).astype(int), filled.own.argmax())
    return [SampleLengths(int(at), max(1, int(filled.own[at])), int(filled.dec[at])) for at in taken]


def search_lengths(
    request: Request, path: Path, samples: list[SampleLengths], top: int, time_budget: float | None, steps: int | None,
    tokens: float | None, json: bool, target: Path | None, strict: bool, ways: BatchWays, baselines: bool, verbose: bool = False,
) -> list[Plan]:  # fmt: skip
    """Searches, shows and writes; the plans, best first."""
    from penstock.search import search_for_lengths
    from penstock.search.lengths import usual_ways_s

    with progress("searching", quiet=json) as bar:
        found = search_for_lengths(  # the fastest is the second where a simpler one is offered first, and is named then
            request, samples, top=max(2, top), time_budget_s=time_budget or math.inf,
            watch=lambda text, best_s, bound_s: bar.describe(f"pipelines: {text}"),
            judging=lambda done, all_: bar.describe(f"planning batches for pipeline {done + 1} of {all_}"), strict=strict, ways=ways,
        )  # fmt: skip
    choices, fastest = found[:top], min(found, key=lambda choice: choice.time_s)
    plans = [choice.plan for choice in choices]
    paths = write_plans(target, plans)
    best = choices[0]
    notes = [*best.plan.notes, *request.estimator.source.notes(request.model)]
    count = steps or (math.ceil(tokens / best.num_tokens) if tokens else 1)
    usual = usual_ways_s(request, samples, best.plan) if baselines else {}
    if json:
        print_json({"lengths": path, "num_samples": len(samples), "iterations": count, "out": target, "files": paths,
                    "notes": notes, "plans": [_row(choice) for choice in choices],
                    **({"baselines": usual} if baselines else {})})  # fmt: skip
        return plans
    longest = max(sample.length for sample in samples)
    where = str(path) if path.is_dir() else "DIR"
    say(_sentence(best, request), next_steps(best.plan, request.model, paths[0] if paths else None, where), "")
    title = (
        f"best plans of {request.model.name} for {plural(len(samples), 'length')} up to {longest}, "
        f"global batch {request.frame.global_batch}"
    )
    out().print(table(title, _COLUMNS, map(_cells, choices), more=_SPARE, verbose=verbose))
    offer = why_first(best.plan, best.time_s, fastest.plan, fastest.time_s, request.estimator.source)
    price = best.plan.predicted.price_usd if best.plan.predicted else None
    say(*offer, *(f"note: {note}" for note in notes), *iterations_line(count, best.time_s, price))
    for name, time_s in usual.items():
        more = "" if time_s is None else f"{format_time(time_s)} a step, {format_share(time_s / best.time_s - 1)} more"
        say(f"the same pipeline with {_WAYS[name]}: {more or 'nothing fits'}")
    say(f"judged by {plural(len(best.batches), 'batch')}; a bound is what no micro-batching of the same pipeline is below")
    if paths:
        batch = shell_words("penstock", "batch", "--lengths", path, "--plan", paths[0])
        shown = "" if path.is_dir() else f" `{batch}` shows micro-batches."
        say(f"wrote {', '.join(map(str, paths))}.{shown}")
    return plans


def _sentence(best: LengthsChoice, request: Request) -> str:
    """The answer in the words of `plan_words.plan_sentence`."""
    from penstock.plans.precision import described_training

    error, bound = request.estimator.source.error, format_share(best.time_s / best.bound_s - 1)
    limit_bytes = min(limit for batch in best.batches for limits in batch.limit_bytes for limit in limits)
    return (
        f"{plan_name(best.plan)}, micro-batches by length: {format_time(best.time_s)} a step{f' ±{error * 100:.0f} %' if error else ''}, "
        f"{format_count(best.tokens_per_s)} tokens/s, {format_part(best.peak_bytes, limit_bytes)}, {format_share(best.padding_share)} "
        f"padding; {described_training(best.plan)}; at most {bound} above any micro-batching of this pipeline."
    )


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


def _cells(choice: LengthsChoice) -> list[Any]:
    row = _row(choice)
    return [
        plan_name(choice.plan), f"{row['num_micro_batches']:.0f}", format_count(row["tokens_per_micro_batch"]),
        f"{row['padding_share']:.1%}", format_time(row["time_s"]), format_count(row["tokens_per_s"]), format_bytes(row["peak_bytes"]),
        "-" if row["price_usd"] is None else format_usd(row["price_usd"]), f"{row['time_s'] / row['bound_s'] - 1:.1%}", row["replicas"],
        row["dp"], row["pp"], row["tp"], row["zero"],
    ]  # fmt: skip
