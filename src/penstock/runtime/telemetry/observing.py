"""Observers are told of every instruction that an executor runs: several at once, and one that adds up where each stage's time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from penstock.programs.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Program, ReceiveWait

if TYPE_CHECKING:
    from penstock.runtime.transport.world import World

__all__ = ["Observer", "Observers", "StageSpans", "StageTime", "slowest_stages"]


class Observer(Protocol):
    """Told of every instruction: telemetry, and the launcher's eye on where each rank is."""

    def begin(self, program: Program) -> None:
        """A program is about to run."""

    def at(self, index: int) -> None:
        """Instruction `index` of the program is about to run."""

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """It has run."""


class Observers:
    """Tells several observers everything."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begin(self, program: Program) -> None:
        """A program is about to run."""
        for observer in self._observers:
            observer.begin(program)

    def at(self, index: int) -> None:
        """An instruction is about to run."""
        for observer in self._observers:
            observer.at(index)

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """It has run."""
        for observer in self._observers:
            observer.done(index, start_ns, end_ns)


@dataclass
class StageTime:
    """Seconds that one stage took on this rank, by the host's clock."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    """For activations and gradients of its neighbours."""
    num_passes: int = 0
    """Forward passes."""


class StageSpans:
    """Adds up the passes of each stage from `first_iteration` on: those before may still warm up."""

    def __init__(self, first_iteration: int = 0) -> None:
        self.first_iteration = first_iteration
        self.stages: dict[int, StageTime] = {}
        self._instructions: tuple[Instruction, ...] = ()

    def begin(self, program: Program) -> None:
        """A program is about to run."""
        counts = program.training and program.iteration >= self.first_iteration
        self._instructions = program.instructions if counts else ()

    def at(self, index: int) -> None:
        """An instruction is about to run."""

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """It has run."""
        if not self._instructions:
            return
        step, time_s = self._instructions[index], (end_ns - start_ns) * 1e-9
        if isinstance(step, Forward):
            own = self.stages.setdefault(step.stage, StageTime())
            own.forward_s += time_s
            own.num_passes += 1
        elif isinstance(step, Backward | BackwardInput | BackwardWeight):
            self.stages.setdefault(step.stage, StageTime()).backward_s += time_s
        elif isinstance(step, ReceiveWait):
            stage = step.cut + 1 if step.what == "activation" else step.cut
            self.stages.setdefault(stage, StageTime()).wait_s += time_s


def slowest_stages(world: World, times: StageSpans) -> dict[int, StageTime]:
    """Each stage on the rank that took longest for it, the same on every rank."""
    import torch

    own = torch.zeros(world.plan.num_stages, 4, dtype=torch.float64)
    for stage, one in times.stages.items():
        own[stage] = torch.tensor([one.forward_s, one.backward_s, one.wait_s, one.num_passes])
    ranks = world.gather(own)
    slowest = ranks[:, :, :2].sum(2).argmax(0)
    found = [ranks[rank, stage].tolist() for stage, rank in enumerate(slowest.tolist())]
    return {stage: StageTime(forward, backward, wait, int(passes)) for stage, (forward, backward, wait, passes) in enumerate(found)}
