"""What `penstock train --compare` shows: predicted beside measured times and memory, and what differs most, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_bytes, format_time, out, say, table

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.request import TrainResult
    from penstock.runtime.telemetry.parts import StepDifference
    from penstock.runtime.telemetry.predicting import PredictedSteps

__all__ = ["cause_sentence", "comparison", "show_comparison"]

_SUBJECTS = {
    "forward": "forward passes of {stages}", "backward": "backward passes of {stages}", "update": "the optimizer's update on rank {rank}",
    "transfers": "transfers and waiting for other ranks on rank {rank}", "loading": "loading micro-batches on rank {rank}",
    "host": "the host beside its passes on rank {rank}", "planning": "waiting for plans of micro-batches on rank {rank}",
    "pauses": "evaluations and checkpoints between steps",
}  # fmt: skip
"""What took longer, or less long, for each part of a step."""


def cause_sentence(cause: StepDifference, stages: Sequence[int]) -> str:
    """One sentence with the numbers; `stages` are those of the cause's rank."""
    names = f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
    subject = _SUBJECTS[cause.part].format(stages=names, rank=cause.rank)
    if cause.is_host:
        subject = f"the host, which issues work no faster, made {subject}"
    took = ("take " if cause.is_host else "took ") + format_time(abs(cause.difference_s))
    whole_s = abs(cause.measured_s - cause.predicted_s)
    return (
        f"A step took {format_time(cause.measured_s)}, {format_time(cause.predicted_s)} were predicted: {subject} {took} "
        f"{'more' if cause.difference_s > 0 else 'less'} than predicted, the largest cause of the {format_time(whole_s)} between them."
    )


def comparison(plan: Plan, result: TrainResult, predicted: PredictedSteps) -> dict[str, Any]:
    """Predicted and measured parts of a step and the largest cause of their difference, as plain data for `--json`."""
    from penstock.plans.ranks import seats_of
    from penstock.runtime.telemetry.parts import largest_cause

    cause = largest_cause(predicted.parts, result.ranks)
    seats = seats_of(plan)
    ranks = [
        {
            "rank": rank, "stages": [seat.stage for seat in seats[rank]], "predicted": asdict(predicted.parts[rank]),
            "measured": asdict(own.parts), "issuing_s": own.issuing_s, "predicted_bytes": predicted.peak_bytes.get(rank),
            "measured_bytes": own.peak_bytes,
        } for rank, own in result.ranks.items()
    ]  # fmt: skip
    told = None if cause is None else cause_sentence(cause, [seat.stage for seat in seats[cause.rank]])
    return {
        "predicted_time_s": predicted.time_s, "stages": [_stage(result, predicted, ranks, stage) for stage in range(plan.num_stages)],
        "ranks": ranks, "cause": None if cause is None else {**asdict(cause), "sentence": told},
    }  # fmt: skip


def _stage(result: TrainResult, predicted: PredictedSteps, ranks: Sequence[dict[str, Any]], stage: int) -> dict[str, Any]:
    """Predicted and measured seconds of a stage for one micro-batch, and bytes of its fullest rank."""
    measured = result.stages[stage]
    passes = max(1, measured.num_passes)
    held = {
        how: max((rank[f"{how}_bytes"] for rank in ranks if stage in rank["stages"] and rank[f"{how}_bytes"] is not None), default=None)
        for how in ("predicted", "measured")
    }
    return {
        "stage": stage, "forward_predicted_s": predicted.forward_s[stage], "forward_measured_s": measured.forward_s / passes,
        "backward_predicted_s": predicted.backward_s[stage], "backward_measured_s": measured.backward_s / passes,
        "memory_predicted_bytes": held["predicted"], "memory_measured_bytes": held["measured"],
    }  # fmt: skip


def show_comparison(plan: Plan, result: TrainResult, predicted: PredictedSteps) -> None:
    """Prints both tables and the sentence, in 80 columns."""
    found = comparison(plan, result, predicted)
    columns = ("stage", "forward", "measured", "backward", "measured", "memory", "measured")
    rows = []
    for row in found["stages"]:
        stage, *values = row.values()
        rows.append([stage, *map(format_time, values[:4]), *("-" if size is None else format_bytes(size) for size in values[4:])])
    out().print(table("one micro-batch on each stage, predicted and measured", columns, rows))
    if not found["ranks"]:
        return
    cause = found["cause"]
    shown = next((one for one in found["ranks"] if cause is None or one["rank"] == cause["rank"]), found["ranks"][0])
    rows = [[name.removesuffix("_s"), *_times(shown["predicted"][name], time_s)] for name, time_s in shown["measured"].items()]
    rows.append(["step", *_times(*(sum(shown[how].values()) for how in ("predicted", "measured")))])
    out().print(table(f"one step on rank {shown['rank']}, on average", ("part", "predicted", "measured", "difference"), rows))
    lines = [] if cause is None else [cause["sentence"]]
    if shown["issuing_s"] is not None:
        lines.append(f"The host issued the passes of a step in {format_time(shown['issuing_s'])}.")
    if shown["measured_bytes"] is None:
        lines.append("Memory is not measured on CPU, nor on timed devices.")
    lines.append(f"Predictions are by {predicted.source}.")
    say(*lines)


def _times(predicted_s: float, measured_s: float) -> list[str]:
    return [format_time(time_s) for time_s in (predicted_s, measured_s, measured_s - predicted_s)]
