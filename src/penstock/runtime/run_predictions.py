"""What the plans of a run expected of its steps, read back from its folder: for traces and reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from penstock.plans.plan import Plan
from penstock.runtime.run_folder import read_request
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import predict_timelines
from penstock.timing.execution import Execution

__all__ = ["plan_in_force", "predicted_executions"]


def plan_in_force(plans: Collection[int], steps: Iterable[int]) -> dict[int, int]:
    """For each step the first step of the plan it ran under; `plans` are the first steps of all."""
    return {step: max((first for first in plans if first <= step), default=min(plans)) for step in steps}


def predicted_executions(run: str | Path, plans: Mapping[int, Plan], steps: Mapping[int, int]) -> dict[int, list[Execution]]:
    """The timeline of each replica in each of these steps, with the micro-batches that they had; PenstockError where nobody can say, as
    without the run's data. `steps` has the first step of the plan in force, by which `plans` has it."""
    found: dict[int, list[Execution]] = {}
    for first in sorted(set(steps.values())):
        own = [step for step, its in steps.items() if its == first]
        timelines = predict_timelines(*run_inputs(replace(read_request(run), plan=plans[first])), own)
        found |= dict(zip(own, timelines, strict=True))
    return found
