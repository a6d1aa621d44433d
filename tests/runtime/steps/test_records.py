"""What is told of a run: by its first process alone, notes once and with the next step, and that a record has ended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from penstock.runtime.request import EvalRecord, StepReport
from penstock.runtime.run_folder import STEPS
from penstock.runtime.steps.records import RunRecords, TrainedStep
from penstock.runtime.telemetry.steps import StepRecord, read_steps


def records_of(out: Path, told: list[Any], *, is_first: bool = True) -> Any:
    worker: Any = SimpleNamespace(rank=0, shared_gpu=False, groups=SimpleNamespace(device=torch.device("cpu")), tell=told.append)
    return RunRecords(worker, out, SimpleNamespace(error=None), is_first=is_first, anew=True)  # type: ignore[arg-type]


def test_a_step_is_written_and_told_with_the_notes_before_it(tmp_path: Path) -> None:
    told: list[Any] = []
    records, evaluated = records_of(tmp_path, told), EvalRecord(4, 2.0, 0.5)
    records.plan_number = 2
    records.note("one.", "two.")
    for note in ("slow.", "slower."):
        records.note_once("pace", note)
    records.tell(TrainedStep(StepRecord(3, 5.5, 0.5, 50, 100.0), "0a", evaluated))
    records.tell(TrainedStep(StepRecord(4), "0b"))
    records.close()
    first, second = told
    assert first == StepReport(3, 5.5, 100.0, None, evaluated, ("one.", "two.", "slow."))
    assert (second.step, second.notes) == (4, ()) and second.loss != second.loss
    written = read_steps(tmp_path / STEPS)
    assert [(one.step, one.samples, one.plan) for one in written] == [(3, "0a", 2), (4, "0b", 2)]
    assert [(one.held_out_loss, one.held_out_accuracy) for one in written] == [(2.0, 0.5), (None, None)]
    assert records.evaluated == [evaluated]


def test_others_say_nothing_but_know_what_was_evaluated(tmp_path: Path) -> None:
    told: list[Any] = []
    records, evaluated = records_of(tmp_path, told, is_first=False), EvalRecord(4, 2.0, 0.5)
    records.note("unheard.")
    records.tell(TrainedStep(StepRecord(3), "0a", evaluated))
    records.flush()
    records.close()
    assert not told and not list(tmp_path.iterdir()) and records.evaluated == [evaluated]


def test_a_record_that_ends_is_told_once(tmp_path: Path) -> None:
    told: list[Any] = []
    records = records_of(tmp_path, told)
    records._spans.error = OSError("no space left")
    for step in range(2):
        records.tell(TrainedStep(StepRecord(step), ""))
    records.close()
    assert [one.notes for one in told] == [("spans are no longer recorded: no space left.",), ()]
