"""Timed devices: real processes, programs and transfers, but an op is a wait until the moment at which the cost model says it ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

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
from penstock.runtime.devices.clock import ClockSettings, DeviceClock, Pass
from penstock.runtime.executor import Executor
from penstock.runtime.telemetry.observing import Observer
from penstock.runtime.transport.process_groups import make_transport
from penstock.runtime.transport.slices import DTYPES
from penstock.runtime.transport.transport import Pending
from penstock.runtime.transport.world import World
from penstock.timing.workload import Workload

__all__ = ["MOST_PAYLOAD_BYTES", "TimedRank"]

MOST_PAYLOAD_BYTES = 64 * 1024
_STAMP_BYTES = 8


class TimedRank:
    """One rank of a plan as a timed device."""

    def __init__(self, world: World, settings: ClockSettings | None = None, observer: Observer | None = None) -> None:
        self.world, self.clock = world, DeviceClock(world, settings or ClockSettings())
        self.transport = make_transport(world)
        self.transport.warm_up()
        handlers = {
            Load: self._load, Forward: self._pass, Backward: self._pass, BackwardInput: self._pass,
            BackwardWeight: self._pass, SendStart: self._send, SendWait: self._sent, ReceiveStart: self._receive,
            ReceiveWait: self._received, Free: self.clock.freed, ReduceStart: self._nothing, ReduceWait: self._nothing,
            SyncTied: self._nothing, Step: self._step, StepStage: self._nothing,
        }  # fmt: skip
        self.executor = Executor(observer)
        for kind, handler in handlers.items():
            self.executor.register(kind, handler)
        self._sends: dict[tuple[str, int, int, int], Pending] = {}
        self._receives: dict[tuple[str, int, int, int], tuple[Pending, torch.Tensor, int]] = {}

    def run(self, program: Program, work: Workload) -> float:
        """Runs one iteration, with the times of its replica; its seconds from the common start until the last rank is done, by the clock
        on the wall."""
        self.clock.begin(program, work)
        self.executor.run(program)
        self.clock.end()
        return self.clock.wall_s

    def _nothing(self, step: object) -> None:
        pass

    def _load(self, step: Load) -> None:
        self.clock.loaded()

    def _pass(self, step: Pass) -> None:
        self.clock.passed(step, time.monotonic())

    def _send(self, step: SendStart) -> None:
        payload = torch.zeros(_payload_bytes(step.parts), dtype=torch.uint8)
        payload[:_STAMP_BYTES] = self.clock.stamp(step).view(torch.uint8)
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
        self.clock.received(buffer, payload[:_STAMP_BYTES].view(torch.float64))

    def _step(self, step: Step) -> None:
        self.clock.updated()


def _payload_bytes(parts: Sequence[Part]) -> int:
    """Bytes that travel for a message: its own, within the limits."""
    total = 0
    for part in parts:
        total += DTYPES[part.dtype].itemsize * torch.Size(part.sent_shape).numel()
    return max(_STAMP_BYTES, min(total, MOST_PAYLOAD_BYTES))
