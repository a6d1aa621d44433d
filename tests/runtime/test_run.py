"""A run's records: an evaluation is the mean over the held-out batches."""

from __future__ import annotations

from types import SimpleNamespace

from penstock.runtime.rank import Evaluated
from penstock.runtime.request import EvalRecord
from penstock.runtime.run import Run


def test_an_evaluation_is_the_mean_over_its_batches() -> None:
    run = Run.__new__(Run)  # only what an evaluation needs; what a rank finds in one batch is held against plain torch elsewhere
    found = {"one": Evaluated(2.0, 0.5), "two": Evaluated(5.0, 0.25), "three": Evaluated(2.0, 0.75)}
    run.rank = SimpleNamespace(evaluate=lambda program, source: found[program])  # type: ignore[assignment]
    run._held_out, run._evaluations = None, list(found)  # type: ignore[assignment]
    assert run._evaluate(7) == EvalRecord(7, 3.0, 0.5)
