"""The options of `penstock search`, some of which other verbs have too, and what is meant by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import BATCH, BIG, file_to_write, within
from penstock.errors import InputError, near_misses
from penstock.schedules.rules import ASYNCHRONOUS_SCHEDULES, DEFAULT_SCHEDULE, SCHEDULES, SEARCHED_SCHEDULES

__all__ = [
    "MAX_HOPS", "SCHEDULE_NAMES", "TOP", "Baselines", "ClusterName", "Costs", "Data", "Export", "GlobalBatch", "Goal", "Lengths",
    "MaxHops", "MemoryLimit", "MicroBatches", "ModelName", "PlanFile", "Proof", "Schedules", "Steps", "Strict", "TableCuts",
    "TimeBudget", "Tokens", "Top", "limit_bytes", "parse_schedules", "parse_sizes",
]  # fmt: skip

SCHEDULE_NAMES, MAX_HOPS, TOP = ",".join(SEARCHED_SCHEDULES), 7, 5
"""What is searched unless told."""

ModelName = Annotated[
    str,
    typer.Option(
        help="Model name (`penstock list models`), YAML file, traced description (.json), hf:PATH or module:FILE.py:FUNCTION. With "
        "aceso:DIR or dynapipe:DIR one of its models, such as gpt_1_3B, with fasop:DIR one of its settings."
    ),
]
ClusterName = Annotated[
    str,
    typer.Option(
        help="Cluster file, `local`, or a shorthand such as 4xa100-40gb (`penstock list devices`, `list clusters`). With aceso:DIR or "
        "dynapipe:DIR nodes x GPUs, such as 2x8; fasop:DIR's settings have their own."
    ),
]
GlobalBatch = Annotated[
    int | None, typer.Option(callback=within(1, BATCH), help="Samples of one iteration; fasop:DIR's settings have their own.")
]
Costs = Annotated[
    str,
    typer.Option(
        help="roofline, profile:FILE (or the name of a shipped profile); aceso:DIR, fasop:DIR or dynapipe:DIR: search that planner's own "
        "tables by its own rules."
    ),
]
Goal = Annotated[str, typer.Option(help="time, cost, time@cost<=USD or cost@time<=HOURS; all but time may leave nodes out.")]
TableCuts = Annotated[
    str,
    typer.Option(
        help="With aceso:DIR, where plans are cut and recompute: at any op of the tables (ops), only where an op here begins too, so that "
        "`penstock import` rounds nothing (both), or so and between whole layers (blocks)."
    ),
]
Lengths = Annotated[
    Path | None, typer.Option(help="CSV of sample lengths: plan for micro-batches that are cut batch by batch, see `penstock batch`.")
]
Data = Annotated[
    Path | None, typer.Option(help="Folder that `penstock prepare-data` wrote: plan, in the same way, for the lengths of its samples.")
]
MicroBatches = Annotated[str, typer.Option(help="Micro-batch sizes to try, such as 1,2,4; all that divide the batch if not given.")]
Schedules = Annotated[str, typer.Option(help=f"Schedules to choose from, besides {DEFAULT_SCHEDULE}.")]
MemoryLimit = Annotated[
    float | None,
    typer.Option(
        callback=within(0, BIG, above=True), help="Use at most this many GB (10⁹ bytes; with aceso:DIR 1000 of its MB) of each device."
    ),
]
Steps = Annotated[int | None, typer.Option(callback=within(1, BIG), help="Iterations to train for, for hours and money.")]
Tokens = Annotated[float | None, typer.Option(callback=within(0, 1e18, above=True), help="Tokens to train for, instead of --steps.")]
TimeBudget = Annotated[
    float | None, typer.Option(callback=within(0, BIG, above=True), help="Stop after this many seconds with the best plan so far.")
]
MaxHops = Annotated[
    int, typer.Option(callback=within(0, 1000), help="Changes in a row by which the best plan is refined under the simulator.")
]
Top = Annotated[int, typer.Option(callback=within(1, 1000), help="How many plans to show.")]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        callback=file_to_write,
        help="Write the plans here: the best to this file, the next to NAME.2.json, …; how they were found to NAME.search.json.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Rank by time alone: no simpler plan before a faster one, however near their times are.")
]
Baselines = Annotated[bool, typer.Option("--baselines", help="Show what simpler searches find, from the same costs.")]
Proof = Annotated[bool, typer.Option("--proof", help="Show how the bound came about.")]
For = Annotated[
    str,
    typer.Option("--for", help="Only plans that this system can express: megatron, torchtitan, deepspeed, aceso, fasop, dynpipe, runtime."),
]
Export = Annotated[str, typer.Option(help="Also write the best plan for another system: FORMAT:PATH, as `penstock export --to`.")]


def parse_sizes(text: str) -> list[int]:
    """Micro-batch sizes such as `1,2,4`."""
    try:
        sizes = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(f"--micro-batches is '{text}'; numbers such as 1,2,4 were expected.") from None
    if any(size < 1 for size in sizes):
        raise InputError(f"--micro-batches is '{text}'; sizes start at 1.")
    return sizes


def parse_schedules(text: str) -> list[str]:
    """Schedules such as `1f1b,zero-bubble`, of those that are searched."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    apart = [name for name in names if name in ASYNCHRONOUS_SCHEDULES]
    if apart and len(set(names)) > 1:
        raise InputError(
            f"--schedules is '{text}': '{apart[0]}' updates weights after every micro-batch, so that its plans learn otherwise than those "
            "of the other schedules. Search for it alone."
        )
    for name in names:
        if name not in (*SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES):
            searched = (*SEARCHED_SCHEDULES, *ASYNCHRONOUS_SCHEDULES)
            known = f"It is never searched, though plans may name it. Searched: {', '.join(searched)}."
            raise InputError(f"--schedules has '{name}'. {known if name in SCHEDULES else near_misses(name, searched)}")
    return names


def limit_bytes(limit_gb: float | None) -> float:
    """The bytes of a device that may be used."""
    return math.inf if limit_gb is None else limit_gb * 1e9
