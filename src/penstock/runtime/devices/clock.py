"""The clock of a device that takes as long as the cost model says: when it is free, and when each carry is there.

Moments are absolute, on the machine's clock, and travel with the messages, so that a process that wakes a little late does not make those
after it late:

    rank 0   │ F0 ends at 2.0 │──── message, there at 2.1 ───┐
    rank 1   (woke at 2.003)                                 │ F0 from 2.1 to 4.1, though it was heard of at 2.104

Only that much is forgiven (`ClockSettings.forgiven_s`). An op that is reached later than that, because the executor, a transfer, a lack of
buffers or another rank held it up, begins late, and all that waits for it too: otherwise the ranks would only repeat the simulation.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from penstock.plans.degrees import Axis, parts_of
from penstock.plans.ranks import seats_of
from penstock.programs.instructions import (
    BackwardWeight,
    Forward,
    Free,
    Program,
    ReduceStart,
    SendStart,
)
from penstock.runtime.telemetry.predicting import PASSES, Pass, passes_s
from penstock.runtime.transport.world import World
from penstock.timing.asked import AskedDisturbance
from penstock.timing.disturbance import Disturbance
from penstock.timing.workload import Workload

__all__ = ["ClockSettings", "DeviceClock"]


@dataclass(frozen=True)
class ClockSettings:
    """Settings of emulated devices: how they differ from what the cost model says."""

    noise: float = 0.0
    """Standard deviation of each op's time, as a share of it."""
    disturbance: Disturbance = field(default_factory=Disturbance)
    folder: str = ""
    """Of the run, where more of it can be asked for."""
    seed: int = 0
    forgiven_s: float = 0.01
    """Lateness of an op that is put down to the machine, which has fewer cores than ranks; more than that counts."""
    lead_s: float = 0.05
    """From the moment at which all ranks are there to the start of an iteration."""


def sleep_until(moment: float) -> None:
    """Returns at an absolute moment of `time.monotonic`, at once if it has passed."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


class DeviceClock:
    """The clock of one rank's device. All ranks of the plan begin and end an iteration together."""

    def __init__(self, world: World, settings: ClockSettings) -> None:
        self.world, self.settings = world, settings
        self.device_s = 0.0
        """Of the last iteration: its seconds by the devices' own clocks, which do not know how late the machine woke."""
        self.wall_s = 0.0
        """Of the last iteration: until the last rank was done, by the clock on the wall."""
        self.busy_s = 0.0
        """Of the last iteration: what this device computed, waits left out."""
        self.expected_s = 0.0
        """The same, were it not slowed."""
        self.data_wait_s = 0.0
        """Of the last iteration: how long it waited for samples."""
        self._random = random.Random(f"{settings.seed} {world.rank}")
        self._ready: dict[int, float] = {}
        """When what lies in each buffer is there."""
        self._disturbance = AskedDisturbance(settings.disturbance, settings.folder)
        self._together = _tensor_parallel_ranks(world)
        """Of each stage here: ranks that go through its passes side by side, because they divide its ops."""

    def begin(self, program: Program, work: Workload) -> None:
        """All ranks start the iteration at one moment; `work` has the times of the program's replica."""
        self._program, self._work, step = program, work, program.iteration
        self._links: dict[int, float] = {}
        self._last: dict[int, float] = {}
        """When the last backward pass of each stage ended."""
        self._ready.clear()
        moments, seen = self._gathered(time.monotonic(), self._disturbance.seen()).unbind(1)
        self._disturbance.agree(int(seen.min()))
        self._begin = moments.max().item() + self.settings.lead_s
        self._now = self._begin
        """When the device is free."""
        self.busy_s = self.data_wait_s = 0.0
        self.expected_s = passes_s(program, work)
        factor = self._disturbance.now.data(step)
        # Loading runs beside the step before, from its start on: what is left of it now is waited for.
        left_s = 0.0 if factor is None else factor * self.expected_s - self.device_s
        self._loaded = self._begin + max(0.0, left_s) if self.device_s else self._begin
        sleep_until(self._begin)

    def slower(self, rank: int, step: int) -> float:
        """The slow-down of a device in a step that has no work for it."""
        self._disturbance.agree(self._disturbance.seen())
        return self._disturbance.now.compute(rank, step)

    def end(self) -> None:
        """Returns when the last device is done."""
        sleep_until(self._now)
        ended, woke = self._gathered(self._now, time.monotonic()).amax(0).tolist()
        self.device_s, self.wall_s = ended - self._begin, woke - self._begin

    def loaded(self) -> None:
        """The samples of this iteration are there."""
        self.data_wait_s += max(0.0, self._loaded - self._now)
        self._now = max(self._now, self._loaded)

    def passed(self, step: Pass, since: float) -> None:
        """The device is busy for a pass from the moment it is free and the pass is ready; returns when it ends. `since`: when the executor
        came to it."""
        source = getattr(step, "source", None)
        time_s = float(self._work.durations_s[PASSES[type(step)], step.stage, step.micro_batch])
        time_s *= self._disturbance.now.compute(self.world.rank, self._program.iteration_of(step.micro_batch))
        if self.settings.noise:
            time_s *= max(0.0, self._random.gauss(1.0, self.settings.noise))
        self.busy_s += time_s
        ready = 0.0 if source is None else self._ready[source]
        self._now = max(self._now, ready, since - self.settings.forgiven_s) + time_s
        if self._disturbance.now.changes and step.stage in self._together and not isinstance(step, BackwardWeight):
            latest = torch.tensor([self._now], dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=self.world.group(self._together[step.stage]))
            self._now = latest.item()
        sleep_until(self._now)
        result = getattr(step, "result", None)
        if result is not None:
            self._ready[result] = self._now
        if not isinstance(step, Forward):
            self._last[step.stage] = self._now

    def stamp(self, step: SendStart) -> torch.Tensor:
        """The moment at which a message arrives, which travels with it."""
        direction = 0 if step.what == "activation" else 1
        time_s = float(self._work.transfers_s[direction, step.cut, step.micro_batch])
        time_s *= self._disturbance.now.link(self.world.rank, step.peer, self._program.iteration_of(step.micro_batch))
        link, start = int(self._work.links[direction, step.cut]), self._ready[step.buffer]
        if link >= 0:
            start = max(start, self._links.get(link, 0.0))
            self._links[link] = start + time_s
        if not self._work.overlap:
            self._now = max(self._now, start + time_s)
        return torch.tensor([start + time_s], dtype=torch.float64)

    def link_factor(self, peer: int) -> float:
        """The slow-down of messages to another rank in the last iteration, over their predicted time."""
        return self._disturbance.now.link(self.world.rank, peer, self._program.iteration + self._program.num_batches - 1)

    def received(self, buffer: int, stamp: torch.Tensor) -> None:
        """A message has come; returns at the moment that its stamp says."""
        there = stamp.item()
        self._ready[buffer] = max(self._ready.get(buffer, 0.0), there)
        sleep_until(there)

    def freed(self, step: Free) -> None:
        """Buffers are empty."""
        for number in step.buffers:
            self._ready.pop(number, None)

    def updated(self) -> None:
        """Times gradient sums and update, which follow the last backward passes: beside each other where transfers overlap, else in turn.
        Sums wait for the slowest rank that holds the same weights."""
        own = [self._last.get(stage, 0.0) for stage in range(self._program.num_stages)]
        table = self._gathered(*own).tolist()
        row = dict(zip(self.world.ranks, table, strict=True))
        for start in self._program.instructions:
            if isinstance(start, ReduceStart):
                holders = {rank for group in start.groups for rank in group.ranks}
                latest = max((row[rank][start.stage] for rank in holders), default=0.0)
                self._last[start.stage] = max(self._last.get(start.stage, self._now), latest)
        ends = [self._now]
        for stage, last in sorted(self._last.items(), key=lambda entry: entry[1]):
            begin = last if self._work.overlap else max(last, ends[-1])
            ends.append(begin + float(self._work.after_s[stage]))
        self._now = max(ends)

    def _gathered(self, *values: float) -> torch.Tensor:
        return self.world.gather(torch.tensor(values, dtype=torch.float64))


def _tensor_parallel_ranks(world: World) -> dict[int, tuple[int, ...]]:
    """The largest tensor-parallel group of each stage that a rank works on; stages without any are left out."""
    found = {}
    for seat in seats_of(world.plan).get(world.rank, ()):
        stage = world.plan.stages[seat.stage]
        groups = (part.degrees.group(Axis.TP, seat.index, stage.devices[seat.replica]) for part in parts_of(stage))
        largest = max(groups, key=len)
        if len(largest) > 1:
            found[seat.stage] = tuple(largest)
    return found
