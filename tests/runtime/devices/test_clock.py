"""The clock of a device and what is asked of it while a run goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.programs.instructions import Backward, Forward, Program
from penstock.runtime.devices.clock import ClockSettings, DeviceClock
from penstock.timing.asked import ask
from penstock.timing.disturbance import Disturbance, DisturbanceChange
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


def test_a_slow_device_is_busy_longer_than_expected() -> None:
    """Which is what those who watch the run compare; a noise of its own on each rank, the same in every run."""
    slow = Disturbance.of_ranks({0: 3.0})
    passes = Forward(0, 0, 0, 0), Backward(0, 0)
    program = Program(0, 3, 0, 1, 1, 1, 1, (), (), passes)
    durations = np.array([0.002, 0.004]).reshape(2, 1, 1)
    clock = DeviceClock(_Others(), ClockSettings(disturbance=slow, lead_s=0.0))  # type: ignore[arg-type]
    clock.begin(program, workload_of(durations))
    for one in passes:
        clock.passed(one, 0.0)
    assert (clock.expected_s, clock.busy_s) == (pytest.approx(0.006), pytest.approx(0.018))


def test_noise_is_of_each_rank_and_the_same_in_every_run() -> None:
    def drawn(rank: int) -> list[float]:
        others = _Others()
        others.rank = rank
        clock = DeviceClock(others, ClockSettings(noise=0.1, seed=5))  # type: ignore[arg-type]
        return [clock._random.gauss(1.0, 0.1) for _ in range(4)]

    assert drawn(0) == drawn(0) != drawn(1)
