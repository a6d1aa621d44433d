"""A plan in words: what was chosen, what it is expected to take, and why it was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.schedules.rules import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["degree_range", "model_title", "plan_in_words", "short_name"]


def degree_range(values: Sequence[int]) -> int | str:
    """The value, or the range of values where they differ."""
    return values[0] if min(values) == max(values) else f"{min(values)}-{max(values)}"


def short_name(plan: Plan) -> str:
    """A plan in a few words, such as `DP 8 + ZeRO-1` or `PP 4 × TP 2 × DP 2, zero-bubble`."""
    stages = plan.stages
    degrees = {
        "PP": [plan.num_groups], "TP": [stage.degrees.tp for stage in stages],
        "DP": [stage.degrees.dp * plan.num_replicas for stage in stages],
    }  # fmt: skip
    words = " × ".join(f"{name} {degree_range(sizes)}" for name, sizes in degrees.items() if max(sizes) > 1) or "one device"
    level = max(stage.zero for stage in stages)
    words += f" + ZeRO-{level}" if level else ""
    words += f", {plan.schedule}" if plan.schedule != DEFAULT_SCHEDULE else ""
    return words + (", recomputing" if any(stage.pattern() for stage in stages) else "")


def model_title(plan: Plan) -> str:
    """What a plan trains, in a word: the name of its model, or of the one that it is a variant of, else its family."""
    if isinstance(plan.model, str):
        return plan.model
    return str(next((plan.model[key] for key in ("name", "base", "family") if plan.model.get(key)), "a model"))


def plan_in_words(plan: Plan) -> str:
    """Some lines for people: the division, the batches, the prediction, and the notes, which say why."""
    from penstock.plans.precision import described_training

    batching = plan.micro_batching
    cut = f"micro-batches of {plural(batching.samples, 'sample')}" if batching.samples else "micro-batches cut for each batch"
    lines = [
        f"plan of {model_title(plan)} for {plural(len(plan.ranks), 'device')}: {short_name(plan)}",
        f"  {plural(plan.global_batch, 'sample')} a step in {batching.layout} {cut}; {described_training(plan)}",
    ]
    if (predicted := plan.predicted) is not None:
        speed = "" if predicted.tokens_per_s is None else f", {predicted.tokens_per_s:,.0f} tokens/s"
        lines.append(f"  {predicted.time_s:.3g} s a step{speed}, by {predicted.costs}")
    return "\n".join([*lines, *(f"  {note}" for note in plan.notes)])
