"""Plans in words: the sentence that answers first, and the table of plans beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_bytes, format_count, format_part, format_share, format_time, format_usd, table
from penstock.errors import first_of, shell_words

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.cli.fitted import FittedTable
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.search import Choice
    from penstock.timing.iteration_estimate import Estimate

__all__ = ["choice_row", "choices_table", "micro_batch_words", "next_steps", "plan_name", "plan_sentence", "ranks_words",
           "recomputed_words"]  # fmt: skip

_CUTS = {"grid": "equal stages", "exact": "between any two ops", "mixed": "degrees of each op"}
"""How plans of each kind (`Choice.kind`) divide the model."""
_COLUMNS = (
    "plan", "micro-batch", "recomputed", "time", "memory", "price", "tokens/s", "MFU", "replicas", "dp in each", "pp", "tp", "ZeRO",
    "schedule", "cut",
)  # fmt: skip
_SHOWN_REPLICAS = 4
_SPARE = _COLUMNS[6:]
"""What follows from the time, or what the plan's name and its micro-batch say in other words."""

_SAME = 0.005
"""Times by formula and by the clock that differ by no more than this share are one."""


def plan_name(plan: Plan) -> str:
    """A plan's name, such as `DP 8 + ZeRO-1`."""
    from penstock.search import short_name

    shares = plan.micro_batching.per_replica
    return short_name(plan) + (f", {max(shares)} to {min(shares)} micro-batches a replica" if shares else "")


def micro_batch_words(plan: Plan) -> str:
    """The samples of a micro-batch; `8 × 32` where dp 8 divides each of 256."""
    from penstock.search import degree_range

    samples, degrees = plan.micro_batching.samples, [stage.degrees.dp for stage in plan.stages]
    if not samples:
        return "by length"
    if max(degrees) == 1:
        return str(samples)
    parts = degree_range(degrees)
    return f"{parts} × {samples // parts}" if isinstance(parts, int) else f"{samples} over {parts}"


def ranks_words(groups: Sequence[Sequence[int]]) -> str:
    """The ranks of a stage in each replica, of many replicas the first: `0-3 | 4-7 | 8-11 and 5 more`."""
    from penstock.plans.texts import format_ranks

    most = _SHOWN_REPLICAS - (len(groups) > _SHOWN_REPLICAS)
    return first_of(list(map(format_ranks, groups)), most, " | ")


def recomputed_words(plan: Plan, model: Model) -> str:
    """Words for what is recomputed in backward passes, as `layers 3–19: attention`."""
    from penstock.plans.texts import described_ops

    return described_ops(model, (op for stage in plan.stages for first, last in stage.pattern() for op in range(first, last))) or "-"


def plan_sentence(plan: Plan, found: Estimate, error: float = 0.0, bound_s: float | None = None) -> str:
    """The answer: what the plan is, how fast, how full, and for what; with a bound, how far from the best possible it can be.

    `error` is how far the costs are off by what they say of themselves, as a share.
    """
    from penstock.plans.precision import described_training

    fullest = max(found.stages, key=lambda stage: stage.memory.total_bytes / stage.limit_bytes)
    per_s, unit = (found.samples_per_s, "samples") if found.tokens_per_s is None else (found.tokens_per_s, "tokens")
    price = "" if found.price_usd is None else f", {format_usd(found.price_usd)}"
    memory = format_part(fullest.memory.total_bytes, fullest.limit_bytes)
    parts = [
        f"{plan_name(plan)}, micro-batch {micro_batch_words(plan)}: {format_time(found.time_s)} a step"
        f"{f' ±{error * 100:.0f} %' if error else ''}, {format_count(per_s)} {unit}/s, {memory}, "
        f"MFU {format_share(found.mfu)}{price}",
        described_training(plan),
    ]
    if bound_s:
        hidden = " by formula, which hides no message behind compute" if found.time_s < found.formula_s * (1 - _SAME) else ""
        parts.append(f"at most {format_share(max(0.0, found.formula_s / bound_s - 1))} above the best possible{hidden}")
    return "; ".join(parts) + "."


def next_steps(plan: Plan, model: Model, path: Path | None, data: str = "DIR") -> str:
    """The commands that make use of a plan that was written to `path`."""
    from penstock.plans.capabilities import unsupported

    if path is None:
        return "Next: give --out plan.json to keep it."
    explain = shell_words("penstock", "explain", path)
    if problems := unsupported(plan, model):
        return f"Next: {explain} (it cannot be trained yet: {problems[0]})"
    train = shell_words("penstock", "train", path, "--data", data, "--steps", 100, "--out", "run")
    return f"Next: {train}; {explain} says where its time goes."


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


def choices_table(title: str, choices: Sequence[Choice], verbose: bool = False) -> FittedTable:
    """The plans as a table, a row each."""
    from penstock.plans.references import model_of

    model = model_of(choices[0].plan)
    return table(title, _COLUMNS, (_cells(choice, model) for choice in choices), more=_SPARE, verbose=verbose)


def _cells(choice: Choice, model: Model) -> list[Any]:
    plan, row = choice.plan, choice_row(choice)
    piped = plan.num_groups > 1
    name = plan_name(plan).replace(", recomputing", "")  # a column says what
    return [
        name, micro_batch_words(plan), recomputed_words(plan, model), format_time(row["time_s"]), format_bytes(row["peak_bytes"]),
        "-" if row["price_usd"] is None else format_usd(row["price_usd"]),
        "-" if row["tokens_per_s"] is None else format_count(row["tokens_per_s"]), f"{row['mfu']:.1%}", row["replicas"], row["dp"],
        row["pp"], row["tp"], row["zero"], plan.schedule if piped else "-",
        _CUTS[choice.kind] if piped or choice.kind == "mixed" else "-",
    ]  # fmt: skip
