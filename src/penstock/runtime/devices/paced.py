"""Paced devices: ranks compute for real on the processor, then wait until the moment at which the cost model says that the plan's device
would be done. Losses are real, and times are the devices' to the last digit, however busy the machine is."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.models.ops import Model
from penstock.plans.plan import Plan
from penstock.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Free,
    Load,
    Program,
    ReceiveStart,
    ReceiveWait,
    SendStart,
    Step,
)
from penstock.runtime.devices.clock import ClockSettings, DeviceClock
from penstock.runtime.optimizing.update import StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.source import Source
from penstock.runtime.telemetry.predicting import ProgramTimes
from penstock.runtime.transport.world import ProcessGroups

__all__ = ["PacedRank"]


class PacedRank(Rank):
    """A rank that trains at the pace of the plan's devices; evaluations are not paced."""

    times: ProgramTimes
    """Of the plan in force; to be set before it trains."""

    def __init__(
        self, model: Model, groups: ProcessGroups, settings: TrainingSettings | None = None, clock: ClockSettings | None = None
    ) -> None:  # fmt: skip
        super().__init__(model, groups, settings)
        # The machine is always late, for it computes as well: only the devices' own moments count.
        self._clock_settings = replace(clock or ClockSettings(), forgiven_s=math.inf, lead_s=0.0)
        self._stamps: dict[tuple[str, int, int, int], tuple[int, torch.Tensor]] = {}

    def adopt(self, plan: Plan, *, keep: bool = False, members: Sequence[int] | None = None) -> None:
        super().adopt(plan, keep=keep, members=members)
        self.clock = DeviceClock(self.world, self._clock_settings)

    def abandon(self) -> None:
        super().abandon()
        self._stamps.clear()

    def train(self, program: Program, source: Source) -> StepResult:
        self.clock.begin(program, self.times.workload(program))
        result = super().train(program, source)
        self.clock.end()
        return result

    def probe_s(self, step: int) -> float:
        """Seconds that a second's work of an undisturbed device takes now, by the clock of the devices."""
        return self.clock.slower(self.groups.own, step)

    def load(self, step: Load) -> None:
        super().load(step)
        if self._program.training:
            self.clock.loaded()

    def forward(self, step: Forward) -> None:
        since = time.monotonic()
        super().forward(step)
        if self._program.training:
            self.clock.passed(step, since)

    def backward_input(self, step: Backward | BackwardInput) -> None:
        since = time.monotonic()
        super().backward_input(step)
        self.clock.passed(step, since)

    def backward_weight(self, step: BackwardWeight) -> None:
        since = time.monotonic()
        super().backward_weight(step)
        self.clock.passed(step, since)

    def beside(self, step: SendStart | ReceiveStart) -> list[torch.Tensor]:
        """The moment at which a message is there travels with it."""
        if not self._program.training:
            return []
        if isinstance(step, SendStart):
            return [self.clock.stamp(step)]
        stamp = torch.empty(1, dtype=torch.float64)
        self._stamps[_key(step)] = step.buffer, stamp
        return [stamp]

    def receive_wait(self, step: ReceiveWait) -> None:
        super().receive_wait(step)
        if self._program.training:
            self.clock.received(*self._stamps.pop(_key(step)))

    def free(self, step: Free) -> None:
        super().free(step)
        self.clock.freed(step)

    def step(self, step: Step) -> None:
        super().step(step)
        self.clock.updated()


def _key(step: Any) -> tuple[str, int, int, int]:
    return step.what, step.cut, step.micro_batch, step.peer
