"""What a plan may choose and the runtime can run: one table for whoever makes, checks or runs plans.

choice                 valid                                        the runtime runs
schedule               those of `schedules.rules`                   all; asynchronous ones with one replica, fixed micro-batches,
                                                                    bf16 or fp32, no ZeRO, and no weight that two stages share
recompute              any ops, `MAX_PATTERNS` patterns a stage     all, where the schedule recomputes
tp, dp                 any per stage and per run of ops             all; ops that share a weight within a stage need the same tp
sequence_parallel      any stage                                    all
zero                   0 to 3; in a pipeline 0 or 1                 all
layout                 those of the model, `Model.layouts`          all
model                  the catalogue's families, traced modules     all; of modules those that their description names
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.plans.plan import MAX_PATTERNS
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["MAX_PATTERNS", "MAX_ZERO_IN_PIPELINE", "require_supported", "unsupported", "untrainable"]


MAX_ZERO_IN_PIPELINE = 1
"""Each micro-batch of a pipeline would gather weights, or reduce gradients, again."""


def unsupported(plan: Plan, model: Model) -> list[str]:
    """What the runtime cannot run of a valid plan, each with the next step; nothing if it can run all of it."""
    return [*untrainable(model), *_tied_problems(plan, model), *_asynchronous_problems(plan, model)]


def require_supported(plan: Plan, model: Model) -> None:
    """Refuses a valid plan that the runtime cannot run, with every reason."""
    if refused := unsupported(plan, model):
        raise InputError("the plan cannot be run:\n" + "\n".join(f"  {problem}" for problem in refused))


def untrainable(model: Model, schedules: Sequence[str] = ()) -> Iterator[str]:
    """Why the runtime can train the model, in its own precision, under no plan, or under none with one of some schedules."""
    from penstock.models.catalog import FAMILIES

    if model.family not in FAMILIES and "origin" not in model.config:
        yield (
            f"model '{model.name}' was traced from a module that its description does not name: it can be planned, but not trained. Import "
            f"it again, or use a model of {', '.join(FAMILIES)}."
        )
    for schedule in schedules:
        yield from _scale_problems(schedule, model.dtype)


def _by_itself(schedule: str) -> str:
    return f"schedule '{schedule}' updates each stage by itself, but"


def _scale_problems(schedule: str, precision: str) -> Iterator[str]:
    if SCHEDULES[schedule].asynchronous and precision == "fp16":
        yield f"{_by_itself(schedule)} fp16's loss scale is one for all. Use bf16 or fp32."


def _asynchronous_problems(plan: Plan, model: Model) -> Iterator[str]:
    """Stages that update by themselves agree with no other stage."""
    if not SCHEDULES[plan.schedule].asynchronous:
        return
    start = _by_itself(plan.schedule)
    if plan.num_replicas > 1:
        yield f"{start} there are {plan.num_replicas} replicas. Use one, or '{DEFAULT_SCHEDULE}'."
    for index, stage in enumerate(plan.stages):
        if stage.zero and max(stage.degrees.dp, *(run.dp for run in stage.runs), 1) > 1:
            yield f"{start} stages.{index} has zero {stage.zero}. Use 0, or '{DEFAULT_SCHEDULE}'."
    if plan.micro_batching.policy != "fixed":
        yield (
            f"{start} micro-batches are {plan.micro_batching.policy}, in an order that fits their lengths. Use fixed ones, "
            f"or '{DEFAULT_SCHEDULE}'."
        )
    yield from _scale_problems(plan.schedule, plan.precision)
    home = {op: index for index, stage in enumerate(plan.stages) for op in range(stage.first, stage.last)}
    numbers = {place.name: place.index for place in model.ops}
    for place in model.ops:
        owner = numbers.get(place.op.tied_to)
        if owner is not None and home[owner] != home[place.index]:
            yield (
                f"{start} '{place.op.tied_to}' and '{place.name}' share a weight on two stages. Use a model that shares none, "
                f"or '{DEFAULT_SCHEDULE}'."
            )


def _tied_problems(plan: Plan, model: Model) -> Iterator[str]:
    """Two ops that share a weight on one device hold one copy of it, so that it can be cut in one way only."""
    owners = {place.op.tied_to for place in model.ops} - {""}
    for index, stage in enumerate(plan.stages):
        first: dict[str, tuple[str, int]] = {}
        for place in model.ops[stage.first : stage.last]:
            owner = place.op.tied_to or place.name
            if owner not in owners:
                continue
            tp = stage.run_of(place.index).tp
            name, its_tp = first.setdefault(owner, (place.name, tp))
            if its_tp != tp:
                yield (
                    f"stages.{index} holds ops '{name}' and '{place.name}', which share a weight, with tp {its_tp} and {tp}. "
                    "Give both the same tp, or put them in different stages."
                )
