"""What a rank of a test's run does besides: it asks for plans itself, at steps that no busy machine can put off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.adapting.asking import ask_for
from penstock.adapting.watching import obey_run
from penstock.plans.plan import Plan
from penstock.runtime.run import Run
from penstock.runtime.steps.messages import StepWatcher

__all__ = ["LEAD", "ask_and_obey"]

LEAD = 4
"""Steps before a plan is to be in force at which it is asked for."""


def ask_and_obey(run: Run, plans: Mapping[int, Plan]) -> StepWatcher:
    """Has the first process ask for each plan some steps before the run is to have it; the first as soon as it can."""
    watcher: Any = obey_run(run)
    after = watcher.after

    def asking(step: int, figures: Any) -> Sequence[str]:
        if (at := step + LEAD) in plans:
            ask_for(run.request.out, plans[at], 0 if at == min(plans) else at)
        return after(step, figures)  # type: ignore[no-any-return]

    if run.is_first:
        watcher.after = asking
    return watcher  # type: ignore[no-any-return]
