"""What a plan may choose and the runtime can run: one table for whoever makes, checks or runs plans.

choice                 valid                                        the runtime runs
schedule               those of `SCHEDULES`, by their rules         all of them
recompute              any ops, `MAX_PATTERNS` patterns a stage     all, but none under zero-bubble
tp, dp                 any per stage and per run of ops             all; ops that share a weight within a stage need the same tp
sequence_parallel      any stage                                    all
zero                   0 to 3; in a pipeline 0 or 1                 0 and 1
layout                 those of the model, `Model.layouts`          all
model                  the catalogue's families, traced modules     the families
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.plans.plan import MAX_PATTERNS

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["MAX_PATTERNS", "MAX_ZERO_IN_PIPELINE", "MAX_ZERO_RUN", "SCHEDULES", "SEARCHED_SCHEDULES", "ScheduleRules", "unsupported"]


@dataclass(frozen=True, slots=True)
class ScheduleRules:
    """What a schedule asks of a plan."""

    min_groups: int = 1
    """Device groups that it needs."""
    chunked: bool = False
    """Whether every group has several stages."""
    recomputes: bool = True
    searched: bool = True
    """Whether the search chooses it; any valid plan may name it."""


SCHEDULES = {
    "gpipe": ScheduleRules(searched=False),  # as fast as 1F1B, with more memory
    "1f1b": ScheduleRules(),
    "interleaved": ScheduleRules(min_groups=2, chunked=True),
    # A split backward pass keeps a linear op's input for its second half, so that recomputing would save nothing.
    "zero-bubble": ScheduleRules(min_groups=2, recomputes=False),
}
SEARCHED_SCHEDULES = tuple(name for name, rules in SCHEDULES.items() if rules.searched)
MAX_ZERO_IN_PIPELINE = 1
"""Each micro-batch of a pipeline would gather weights, or reduce gradients, again."""
MAX_ZERO_RUN = 1


def unsupported(plan: Plan, model: Model) -> list[str]:
    """What the runtime cannot run of a valid plan, each with the next step; nothing if it can run all of it."""
    return [*_model_problems(model), *_zero_problems(plan), *_tied_problems(plan, model)]


def _model_problems(model: Model) -> Iterator[str]:
    from penstock.models.catalog import FAMILIES

    if model.family not in FAMILIES:
        yield f"model '{model.name}' was traced: it can be planned, but has no modules to train. Use a model of {', '.join(FAMILIES)}."


def _zero_problems(plan: Plan) -> Iterator[str]:
    for index, stage in enumerate(plan.stages):
        if stage.zero > MAX_ZERO_RUN:
            yield f"stages.{index}.zero is {stage.zero}, but up to {MAX_ZERO_RUN} can be run. Use zero {MAX_ZERO_RUN}."


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
