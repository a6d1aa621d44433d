"""What a user should know of a plan and the data it is to train on, before the first step: lengths that differ, and what is cut off."""

from __future__ import annotations

from dataclasses import replace

from penstock.data.dataset import open_data
from penstock.data.filled import FilledPositions, filled_positions
from penstock.data.forms import form_of
from penstock.errors import PenstockError, plural, shell_words
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import predict_steps
from penstock.schedules.rules import SCHEDULES

__all__ = ["data_notes"]

_FAR = 1.5
"""How many times longer than the data's samples a plan's may be before it is worth a word."""


def data_notes(request: TrainRequest) -> list[str]:
    """Sentences, each with its numbers and what to do; none where plan and data go together."""
    plan, model = request.plan, model_of(request.plan)
    if not model.seq_length:
        return []
    data = open_data(request.data)
    filled = filled_positions(form_of(model, data, prompt_loss=request.prompt_loss), data, plan.seq_length, plan.dec_length)
    notes = []
    if plan.micro_batching.policy == "fixed" and plan.seq_length > _FAR * filled.mean:
        notes.append(_shorter(request, filled))
    if filled.num_truncated:
        notes.append(
            f"{filled.num_truncated:,} of {len(filled.own):,} samples are cut to fit the plan's {plan.seq_length:,} tokens"
            f"{f' (and {plan.dec_length:,} of the target)' if plan.dec_length else ''}: {filled.tokens_lost:,} of {filled.tokens:,} tokens "
            f"({filled.tokens_lost / filled.tokens:.1%}) are not trained on. "
            "A plan with a larger --seq-length keeps them."
        )
    return notes


def _shorter(request: TrainRequest, filled: FilledPositions) -> str:
    plan = request.plan
    gain = _gain(request)
    faster = f", about {gain:.1f}× faster by the plan's own costs" if gain >= 1.1 else ""
    return (
        f"this plan assumes {plural(plan.seq_length, 'token')} a sample; those of '{request.data}' have {filled.mean:,.0f} on average. "
        f"`{shell_words('penstock', 'search', '--data', request.data)} …` plans micro-batches for the lengths that are there{faster}."
    )


def _gain(request: TrainRequest) -> float:
    """The speed-up of the first step with micro-batches made for its lengths, on the same stages; 1 where that is not
    known: schedules whose micro-batches have no prices of their own, or nothing that fits."""
    plan = request.plan
    if not SCHEDULES[plan.schedule].whole_passes:
        return 1.0
    layout = "packed" if "packed" in model_of(plan).layouts else "padded"
    dynamic = replace(request, plan=replace(plan, micro_batching=MicroBatching(layout, "dynamic")))
    try:
        fixed_s = predict_steps(*run_inputs(request), range(1)).time_s
        source, planner = run_inputs(dynamic)
        data, batches = source.open()
        return fixed_s / planner.batch_plan(data, batches[0]).predicted_s
    except PenstockError:
        return 1.0
