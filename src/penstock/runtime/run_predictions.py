"""What the plan's costs expect of the steps of a run, read back from its folder: for traces and reports."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.runtime.run_folder import read_request
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import predict_timelines
from penstock.timing.execution import Execution

__all__ = ["predicted_executions"]


def predicted_executions(run: str | Path, steps: Iterable[int]) -> dict[int, list[Execution]]:
    """The timeline of each replica in each of these steps, with the micro-batches that they had; PenstockError where nobody can say,
    as without the run's data."""
    steps = list(steps)
    return dict(zip(steps, predict_timelines(*run_inputs(read_request(run)), steps), strict=True))
