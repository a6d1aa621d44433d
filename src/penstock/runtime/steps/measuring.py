"""What one process measures of its steps under the plan in force: its part of a step's record, and figures for whoever watches the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.models.micro_batch import MicroBatch
from penstock.programs.instructions import Program
from penstock.runtime.devices.paced import PacedRank
from penstock.runtime.telemetry.figures import RankFigures, StepMeter
from penstock.runtime.telemetry.flops import PeakTimes
from penstock.runtime.telemetry.observing import StageSpans
from penstock.runtime.telemetry.spans import COMPUTE, SpanRecorder
from penstock.runtime.telemetry.steps import StepRecord, padding_share

if TYPE_CHECKING:
    from penstock.data.loader import ProgramLoader
    from penstock.runtime.optimizing.update import StepResult
    from penstock.runtime.rank import Rank
    from penstock.runtime.steps.records import RunRecords

__all__ = ["Measured", "StepMeasures"]

_BEHIND = 1.2
"""A machine that takes so many times as long as its paced devices says so."""


@dataclass(frozen=True)
class Measured:
    """One rank's measurements of a program; where it has several steps, each is given the same part of the time."""

    figures: RankFigures
    pace: float
    """How long the passes of a step took, over what was predicted of them where anything is."""
    time_s: float
    wait_s: float
    """For the program."""
    busy_s: float
    """Of that time, how long the device computed."""


class StepMeasures:
    """Times steps by the wall clock, by the clocks of paced devices, or, while somebody watches, against the predicted times of passes."""

    def __init__(
        self, rank: Rank, loader: ProgramLoader, records: RunRecords, spans: SpanRecorder, times: StageSpans, peaks: PeakTimes | None
    ) -> None:
        """`times` has the passes since the plan is in force; with `peaks` records say how well the devices were used."""
        self._rank, self._loader, self._records, self._spans, self._times = rank, loader, records, spans, times
        self._peaks = peaks
        self._meter: StepMeter | None = None
        """On devices that keep no clock of their own."""
        self._usual_probe_s = 0.0
        """What a probe took when this process was left without work."""
        self._position, self._wait_s = 0, 0.0

    def watched(self) -> None:
        """Compares passes with predicted times from now on: somebody watches."""
        if self._rank.world.rank >= 0 and not isinstance(self._rank, PacedRank):
            self._meter = StepMeter(self._loader.planner, self._times)

    @property
    def lateness(self) -> int:
        """Steps after which the figures of one are known."""
        return self._meter.lateness if self._meter else 0

    def begin(self) -> None:
        """Begins to measure a program, which this rank has waited for."""
        self._position, self._wait_s = self._spans.position, self._loader.wait_s

    def expect(self, program: Program) -> None:
        """Has the next figures compared with this program, whose instructions have all been issued."""
        if self._meter is not None:
            self._meter.expect(program)

    def ended(self, program: Program, wall_s: float) -> Measured:
        """Measurements of a program that has ended, `wall_s` after the one before it."""
        count = program.num_batches
        whole_s = self._whole_s(program.iteration, wall_s)
        self._times.step_done(wall_s, self._wait_s, self._rank.update.exchanges, count)
        figures = self._figures(wall_s).shared_out(count)
        busy_s = float(self._spans.busy_ns(self._position)[COMPUTE]) * 1e-9
        return Measured(figures, self._pace(figures, count), whole_s / count, self._wait_s / count, busy_s / count)

    def record(
        self, measured: Measured, step: int, micro_batches: Sequence[MicroBatch], result: StepResult, loss: float, norm: float | None
    ) -> StepRecord:
        """The run's record of a step, by what this rank measured; other replicas' samples are taken to cost as much for each token."""
        tokens, time_s = int(result.tokens.item()), measured.time_s
        mfu = None if self._peaks is None else self._peaks.time_s(micro_batches, tokens) / time_s
        return StepRecord(
            step, loss, time_s, tokens, tokens / time_s, mfu, result.rate, gradient_norm=norm, skipped=result.skipped,
            bubble_share=max(0.0, 1.0 - measured.busy_s / time_s), planning_wait_s=measured.wait_s,
            padding_share=padding_share(micro_batches), **self.memory(), **self._records.gpu_sample(),
        )  # fmt: skip

    def idle_figures(self, step: int) -> RankFigures:
        """Figures of a process without work: the time of a probe, over that of its first one."""
        probe_s = self._rank.probe_s(step)
        self._usual_probe_s = self._usual_probe_s or probe_s
        return RankFigures(probe_s, self._usual_probe_s)

    def memory(self) -> dict[str, int]:
        """The most that was allocated and reserved on a GPU, as fields of a record."""
        device = self._rank.world.device
        if device.type != "cuda":
            return {}
        return {"allocated_bytes": torch.cuda.max_memory_allocated(device), "reserved_bytes": torch.cuda.max_memory_reserved(device)}

    def _whole_s(self, step: int, wall_s: float) -> float:
        """Time of a program: by the wall clock, or by that of a paced device."""
        if not isinstance(self._rank, PacedRank):
            return wall_s
        clock = self._rank.clock
        if clock.wall_s > _BEHIND * clock.device_s and step >= self._times.first_iteration:
            took = f"step {step} took {clock.wall_s:.3g} s, they take {clock.device_s:.3g} s. The times that are told are theirs."
            self._records.note_once("pace", f"this machine computes more slowly than the paced devices: {took}")
        return clock.device_s

    def _figures(self, wall_s: float) -> RankFigures:
        """Figures of the program that has ended, or on a GPU of the one before it."""
        if isinstance(self._rank, PacedRank):
            clock = self._rank.clock
            return RankFigures(clock.busy_s, clock.expected_s, clock.data_wait_s, 0.0, clock.device_s)
        if self._meter is None:
            return RankFigures()
        if self._meter.refused is not None:
            self._records.note_once("costs", f"slow ranks will not be noticed, since nothing can be predicted: {self._meter.refused}")
        wait_s, data_s = self._loader.wait_s, self._loader.data_wait_s
        return self._meter.ended(wall_s, data_s, wait_s - data_s)

    def _pace(self, figures: RankFigures, count: int) -> float:
        if self._meter is None:
            return self._times.passes_s / count
        return figures.compute_s / figures.predicted_s if figures.predicted_s else 0.0
