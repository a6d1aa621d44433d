"""How long a run goes without a checkpoint, by a clock of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.runtime.checkpoints.intervals import SaveInterval
from penstock.runtime.run import Run
from penstock.runtime.steps.messages import StepMessage
from penstock.runtime.telemetry.steps import StepRecord


def test_ten_minutes_or_a_hundred_times_what_the_last_one_cost() -> None:
    interval = SaveInterval(_last_s=100.0)
    assert not interval.is_over(699.0) and interval.is_over(700.0)
    interval.saved(700.0, 702.0)
    assert not interval.is_over(1301.0) and interval.is_over(1302.0)
    interval.saved(1302.0, 1312.0)
    assert not interval.is_over(2311.0) and interval.is_over(2312.0)


@pytest.mark.parametrize(("late", "is_first", "busy", "expected"), [(1, 1, 0, 1), (0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0)])
def test_the_first_process_asks_for_one_that_no_rank_still_writes(late: int, is_first: int, busy: int, expected: int) -> None:
    other = StepMessage(is_saving=bool(busy), record=StepRecord(3))

    def gather(own: torch.Tensor) -> torch.Tensor:
        return torch.stack([own, torch.tensor([other.row()], dtype=torch.float64)])

    stub: Any = SimpleNamespace(
        step=4, members=(0, 1), is_first=bool(is_first), request=SimpleNamespace(steps=9), watcher=None, _store_error=None,
        saves=SimpleNamespace(is_late=bool(late), is_saving=False, copied=0.0), world=SimpleNamespace(ranks=(1,)),
        worker=SimpleNamespace(asked_to_end=lambda: 15, groups=SimpleNamespace(gather=gather)), _order=lambda: b"",
    )  # fmt: skip
    told = Run._agreed(stub, [StepMessage()])
    assert (told.ended_by, told.is_due) == (15, bool(expected))
