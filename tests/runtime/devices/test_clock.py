"""The clock of a device and what is asked of it while a run goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.programs.instructions import Program
from penstock.runtime.devices.clock import ClockSettings, DeviceClock
from penstock.timing.asked import ask
from penstock.timing.disturbance import DisturbanceChange
from penstock.timing.workload import workload_of


class _Others:
    """A world of two ranks, of which the other has seen nothing yet."""

    rank, ranks = 0, (0, 1)
    plan: Any = SimpleNamespace(stages=())

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        other = values.clone()
        other[1:] = 0
        return torch.stack([values, other])


def test_a_clock_waits_for_ranks_that_have_not_seen_a_change(tmp_path: Path) -> None:
    clock = DeviceClock(_Others(), ClockSettings(folder=str(tmp_path), lead_s=0.0))  # type: ignore[arg-type]
    ask(tmp_path, DisturbanceChange((0,), 2.0))
    clock.begin(Program(0, 3, 0, 1, 1, 1, 1, (), (), ()), workload_of(np.ones((4, 1, 1)), 0.0))
    assert clock._disturbance.seen() == 1 and clock._disturbance.now.compute(0, 3) == 1.0
