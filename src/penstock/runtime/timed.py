"""Timed devices: real processes, programs and transfers, but an op is a wait until the moment at which the cost model says it ends.

Each rank keeps the clock of the device it stands for: when the device is free, when each carry is there. Moments are absolute, on the
machine's clock, and travel with the messages, so that a process that wakes a little late does not make those after it late:

    rank 0   │ F0 ends at 2.0 │──── message, there at 2.1 ───┐
    rank 1   (woke at 2.003)                                 │ F0 from 2.1 to 4.1, though it was heard of at 2.104

Only that much is forgiven (`TimedSettings.forgiven_s`). An op that is reached later than that, because the executor, a transfer, a lack of
buffers or another rank held it up, begins late, and all that waits for it too: otherwise the ranks would only repeat the simulation.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from penstock.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Free,
    Load,
    Part,
    Program,
    ReceiveStart,
    ReceiveWait,
    ReduceStart,
    ReduceWait,
    SendStart,
    SendWait,
    Step,
    StepStage,
    SyncTied,
)  # fmt: skip
from penstock.runtime.executor import Executor
from penstock.runtime.telemetry.observing import Observer
from penstock.runtime.transport.process_groups import make_transport
from penstock.runtime.transport.slices import DTYPES
from penstock.runtime.transport.transport import Pending
from penstock.runtime.transport.world import World
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from penstock.timing.workload import Workload

__all__ = ["LEAD_S", "MOST_PAYLOAD_BYTES", "TimedRank", "TimedSettings"]

MOST_PAYLOAD_BYTES = 64 * 1024
_STAMP_BYTES = 8
LEAD_S = 0.05
"""From the moment at which all ranks are there to the start of an iteration."""


@dataclass(frozen=True)
class TimedSettings:
    """How the devices differ from what the cost model says."""

    noise: float = 0.0
    """Standard deviation of each op's time, as a share of it."""
    slower: Mapping[int, float] = field(default_factory=dict)
    """Ranks whose ops take so many times as long."""
    seed: int = 0
    forgiven_s: float = 0.01
    """Lateness of an op that is put down to the machine, which has fewer cores than ranks; more than that counts."""


def sleep_until(moment: float) -> None:
    """Returns at an absolute moment of `time.monotonic`, at once if it has passed."""
    left = moment - time.monotonic()
    if left > 0:
        time.sleep(left)


class TimedRank:
    """One rank of a plan as a timed device."""

    def __init__(self, world: World, settings: TimedSettings | None = None, observer: Observer | None = None) -> None:
        self.world = world
        self.settings = settings or TimedSettings()
        self.transport = make_transport(world)
        self.transport.warm_up()
        handlers = {
            Load: self._nothing, Forward: self._forward, Backward: self._backward, BackwardInput: self._backward,
            BackwardWeight: self._weights, SendStart: self._send, SendWait: self._sent, ReceiveStart: self._receive,
            ReceiveWait: self._received, Free: self._free, ReduceStart: self._nothing, ReduceWait: self._reduced,
            SyncTied: self._nothing, Step: self._step, StepStage: self._nothing,
        }  # fmt: skip
        self.executor = Executor(observer)
        for kind, handler in handlers.items():
            self.executor.register(kind, handler)
        self.device_s = 0.0
        """Of the last iteration: its seconds by the devices' own clocks, which do not know how late the machine woke."""
        self._random = random.Random(f"{self.settings.seed} {world.rank}")
        self._ready: dict[int, float] = {}
        """When what lies in each buffer is there."""
        self._sends: dict[tuple[str, int, int, int], Pending] = {}
        self._receives: dict[tuple[str, int, int, int], tuple[Pending, torch.Tensor, int]] = {}
        self._start()

    def _start(self) -> None:
        self._now = 0.0
        """When the device is free."""
        self._links: dict[int, float] = {}
        self._last: dict[int, float] = {}
        """When the last backward pass of each stage ended; with its gradients summed, when they were."""

    def run(self, program: Program, work: Workload) -> float:
        """Runs one iteration, with the times of its replica; its seconds from the common start until the last rank is done, by the clock
        on the wall."""
        self._start()
        here = torch.tensor([time.monotonic()], dtype=torch.float64)
        begin = self.world.gather(here).max().item() + LEAD_S
        self._now = begin
        self._work = work
        sleep_until(begin)
        self.executor.run(program)
        sleep_until(self._now)
        ended, woke = self.world.gather(torch.tensor([self._now, time.monotonic()], dtype=torch.float64)).max(0).values.tolist()
        self.device_s = ended - begin
        return woke - begin

    def _nothing(self, step: object) -> None:
        pass

    def _busy(self, kind: int, stage: int, micro_batch: int, ready: float) -> float:
        """The device is busy for an op's time from the moment it is free and the op is ready; when it ends."""
        time_s = self._work.durations_s[kind, stage, micro_batch] * self.settings.slower.get(self.world.rank, 1.0)
        if self.settings.noise:
            time_s *= max(0.0, self._random.gauss(1.0, self.settings.noise))
        self._now = max(self._now, ready, time.monotonic() - self.settings.forgiven_s) + time_s
        sleep_until(self._now)
        return self._now

    def _forward(self, step: Forward) -> None:
        end = self._busy(FORWARD, step.stage, step.micro_batch, 0.0 if step.source is None else self._ready[step.source])
        if step.result is not None:
            self._ready[step.result] = end

    def _backward(self, step: Backward | BackwardInput) -> None:
        kind = BACKWARD if isinstance(step, Backward) else INPUT_GRAD
        end = self._busy(kind, step.stage, step.micro_batch, 0.0 if step.source is None else self._ready[step.source])
        if step.result is not None:
            self._ready[step.result] = end
        self._last[step.stage] = end

    def _weights(self, step: BackwardWeight) -> None:
        self._last[step.stage] = self._busy(WEIGHT_GRAD, step.stage, step.micro_batch, 0.0)

    def _send(self, step: SendStart) -> None:
        direction = 0 if step.what == "activation" else 1
        time_s = float(self._work.transfers_s[direction, step.cut, step.micro_batch])
        link, start = int(self._work.links[direction, step.cut]), self._ready[step.buffer]
        if link >= 0:
            start = max(start, self._links.get(link, 0.0))
            self._links[link] = start + time_s
        if not self._work.overlap:
            self._now = max(self._now, start + time_s)
        payload = torch.zeros(_payload_bytes(step.parts), dtype=torch.uint8)
        payload[:_STAMP_BYTES] = torch.tensor([start + time_s], dtype=torch.float64).view(torch.uint8)
        self._sends[step.what, step.cut, step.micro_batch, step.peer] = self.transport.send([payload], step.peer)

    def _sent(self, step: SendWait) -> None:
        self._sends.pop((step.what, step.cut, step.micro_batch, step.peer)).wait()

    def _receive(self, step: ReceiveStart) -> None:
        payload = torch.empty(_payload_bytes(step.parts), dtype=torch.uint8)
        pending = self.transport.receive([payload], step.peer)
        self._receives[step.what, step.cut, step.micro_batch, step.peer] = (pending, payload, step.buffer)

    def _received(self, step: ReceiveWait) -> None:
        pending, payload, buffer = self._receives.pop((step.what, step.cut, step.micro_batch, step.peer))
        pending.wait()
        there = payload[:_STAMP_BYTES].view(torch.float64).item()
        self._ready[buffer] = max(self._ready.get(buffer, 0.0), there)
        sleep_until(there)

    def _free(self, step: Free) -> None:
        for number in step.buffers:
            self._ready.pop(number, None)

    def _reduced(self, step: ReduceWait) -> None:
        """Sums wait for the slowest rank that holds the same weights."""
        assert self.executor.program is not None
        starts = (one for one in self.executor.program.instructions if isinstance(one, ReduceStart) and one.stage == step.stage)
        for group in next(starts).groups:
            latest = torch.tensor([self._last.get(step.stage, self._now)], dtype=torch.float64)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=self.world.group(group.ranks))
            self._last[step.stage] = latest.item()

    def _step(self, step: Step) -> None:
        """What follows the last backward passes: beside each other where transfers overlap, else in turn."""
        ends = [self._now]
        for stage, last in sorted(self._last.items(), key=lambda entry: entry[1]):
            begin = last if self._work.overlap else max(last, ends[-1])
            ends.append(begin + float(self._work.after_s[stage]))
        self._now = max(ends)


def _payload_bytes(parts: Sequence[Part]) -> int:
    """Bytes that travel for a message: its own, within the limits."""
    total = 0
    for part in parts:
        total += DTYPES[part.dtype].itemsize * torch.Size(part.sent_shape).numel()
    return max(_STAMP_BYTES, min(total, MOST_PAYLOAD_BYTES))
