"""What one process measures of its steps under the plan in force: how long they took, and figures for whoever watches the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.programs.instructions import Program
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.telemetry.figures import RankFigures, StepMeter
from penstock.runtime.telemetry.observing import StageSpans

if TYPE_CHECKING:
    from penstock.data.loader import ProgramLoader
    from penstock.runtime.rank import Rank
    from penstock.runtime.steps.records import RunRecords

__all__ = ["StepMeasures"]

_BEHIND = 1.2
"""A machine that takes so many times as long as its paced devices says so."""


class StepMeasures:
    """By the clock on the wall, by those of paced devices, or, while somebody watches, by what passes should take."""

    def __init__(self, rank: Rank, loader: ProgramLoader, records: RunRecords, times: StageSpans) -> None:
        """`times` has the passes since the plan is in force."""
        self._rank, self._loader, self._records, self._times = rank, loader, records, times
        self._meter: StepMeter | None = None
        """On devices that keep no clock of their own."""
        self._usual_probe_s = 0.0
        """What a probe took when this process was left without work."""

    def watched(self) -> None:
        """Somebody wants figures from now on."""
        if self._rank.world.rank >= 0 and not isinstance(self._rank, PacedRank):
            self._meter = StepMeter(self._loader.planner, self._times)

    @property
    def lateness(self) -> int:
        """Steps after which the figures of one are known."""
        return self._meter.lateness if self._meter else 0

    def expect(self, program: Program) -> None:
        """A program has been issued, of which the next figures will be."""
        if self._meter is not None:
            self._meter.expect(program)

    def step_s(self, step: int, wall_s: float) -> float:
        """What a step took: by the clock on the wall, or by those of paced devices."""
        if not isinstance(self._rank, PacedRank):
            return wall_s
        clock = self._rank.clock
        if clock.wall_s > _BEHIND * clock.device_s and step >= self._times.first_iteration:
            took = f"step {step} took {clock.wall_s:.3g} s, they take {clock.device_s:.3g} s. The times that are told are theirs."
            self._records.note_once("pace", f"this machine computes more slowly than the paced devices: {took}")
        return clock.device_s

    def figures(self, wall_s: float) -> RankFigures:
        """What this rank measured in the step that has ended, or the one before it."""
        if isinstance(self._rank, PacedRank):
            clock = self._rank.clock
            return RankFigures(clock.busy_s, clock.expected_s, clock.data_wait_s, 0.0, clock.device_s)
        if self._meter is None:
            return RankFigures()
        if self._meter.refused is not None:
            self._records.note_once("costs", f"slow ranks will not be noticed, since nothing can be predicted: {self._meter.refused}")
        wait_s, data_s = self._loader.wait_s, self._loader.data_wait_s
        return self._meter.ended(wall_s, data_s, wait_s - data_s)

    def idle_figures(self, step: int) -> RankFigures:
        """What a process without work measures: a probe, over what that took when the process was left without."""
        probe_s = self._rank.probe_s(step)
        self._usual_probe_s = self._usual_probe_s or probe_s
        return RankFigures(probe_s, self._usual_probe_s)

    def pace(self, figures: RankFigures, count: int) -> float:
        """How long the passes of each of `count` steps took: over what was predicted of them, where anything is."""
        if self._meter is None:
            return self._times.passes_s / count
        return figures.compute_s / figures.predicted_s if figures.predicted_s else 0.0

    def memory(self) -> dict[str, int]:
        """The most that was allocated and reserved on a GPU, as fields of a record."""
        device = self._rank.world.device
        if device.type != "cuda":
            return {}
        return {"allocated_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.max_memory_reserved(device)}
