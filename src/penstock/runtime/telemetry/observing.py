"""Observers are told of every instruction that an executor runs: several at once, and one that adds up where each stage's time went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Protocol

from penstock.programs.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Load,
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
)
from penstock.runtime.telemetry.moments import Moment, moment, seconds
from penstock.runtime.telemetry.parts import RankTimes, StepParts

if TYPE_CHECKING:
    import torch

__all__ = ["Observer", "Observers", "StageSpans", "StageTime", "slowest_stages", "times_of_ranks"]


class Observer(Protocol):
    """Told of every instruction: telemetry, and the launcher's eye on where each rank is."""

    def begin(self, program: Program) -> None:
        """A program is about to run."""

    def at(self, index: int) -> None:
        """Instruction `index` of the program is about to run."""

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """Instruction `index` has run."""


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
        """Instruction `index` has run."""
        for observer in self._observers:
            observer.done(index, start_ns, end_ns)


@dataclass
class StageTime:
    """Seconds that one stage took on this rank: on its GPU, or on the processor."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    wait_s: float = 0.0
    """For activations and gradients of its neighbours."""
    num_passes: int = 0
    """Forward passes."""


_PARTS: dict[type[Instruction], str] = {
    Forward: "forward_s", Backward: "backward_s", BackwardInput: "backward_s", BackwardWeight: "backward_s", StepStage: "backward_s",
    Step: "update_s", Load: "loading_s", SendStart: "transfers_s", SendWait: "transfers_s", ReceiveStart: "transfers_s",
    ReceiveWait: "transfers_s", ReduceStart: "transfers_s", ReduceWait: "transfers_s", SyncTied: "transfers_s",
}  # fmt: skip
"""The part of a step that each kind of instruction belongs to; the host does the rest. Costs have the update after each backward pass of
asynchronous schedules in that pass."""
_ON_DEVICE = ("forward_s", "backward_s", "update_s")


class StageSpans:
    """Adds up the passes of each stage, and the parts of each step, from `first_iteration` on: those before may still warm up.

    Where a GPU computes (`device`), the host only issues its work: passes and updates are then timed on the device's own stream. What is
    left of a step is transfers and waiting, but for what loading and issuing took while the device had nothing to do.
    """

    def __init__(self, first_iteration: int = 0, device: torch.device | None = None) -> None:
        self.first_iteration = first_iteration
        self.gpu = device if device is not None and device.type == "cuda" else None
        self.stages: dict[int, StageTime] = {}
        self._instructions: tuple[Instruction, ...] = ()
        self._sums = dict.fromkeys([field.name for field in fields(StepParts)], 0.0)
        self._issuing_s, self._whole_s, self._num_steps = 0.0, 0.0, 0
        self.passes_s = 0.0
        """Passes of the last step of which all is known: the one that has ended last, or on a GPU the one before it."""
        self.issued_s = 0.0
        """Of these passes, how long the host took to issue them; 0 where it computes them."""
        self._passes_before_s, self._issuing_before_s, self._issued_last_s = 0.0, 0.0, 0.0
        self._begun: Moment = None
        self._spans: list[tuple[Instruction | None, Moment, Moment]] = []
        """On the device, of the step that runs; None: what its update waited for."""
        self._before: list[tuple[Instruction | None, Moment, Moment]] = []
        """Of the step before it, which the device has surely behind it when the next has ended."""

    def begin(self, program: Program) -> None:
        """A program is about to run."""
        counts = program.training and program.iteration >= self.first_iteration
        self._instructions = program.instructions if counts else ()

    def at(self, index: int) -> None:
        """An instruction is about to run."""
        if self.gpu is not None and self._instructions and _PARTS.get(type(self._instructions[index])) in _ON_DEVICE:
            self._begun = moment(self.gpu)

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """Instruction `index` has run."""
        if not self._instructions:
            return
        step, time_s = self._instructions[index], (end_ns - start_ns) * 1e-9
        part = _PARTS.get(type(step))
        if self.gpu is not None and part in _ON_DEVICE:
            self._spans.append((step, self._begun, moment(self.gpu)))
            self._issuing_s += time_s if part != "update_s" else 0.0
        elif part is not None:
            self._add(step, time_s)

    def _add(self, step: Instruction | None, time_s: float) -> None:
        if step is None:
            self._sums["update_s"] -= time_s
            self._sums["transfers_s"] += time_s
            return
        self._sums[_PARTS[type(step)]] += time_s
        if isinstance(step, Forward):
            own = self.stages.setdefault(step.stage, StageTime())
            own.forward_s += time_s
            own.num_passes += 1
        elif isinstance(step, Backward | BackwardInput | BackwardWeight):
            self.stages.setdefault(step.stage, StageTime()).backward_s += time_s
        elif isinstance(step, ReceiveWait):
            stage = step.cut + 1 if step.what == "activation" else step.cut
            self.stages.setdefault(stage, StageTime()).wait_s += time_s

    def step_done(
        self, time_s: float, planning_s: float, exchanges: Iterable[tuple[Moment, Moment]] = (), num_steps: int = 1
    ) -> None:
        """A step, or several in one program, has ended, of which so much was waiting for its program, and in whose update ranks exchanged
        something meanwhile."""
        if self._instructions:
            self._num_steps += num_steps
            self._whole_s += time_s
            self._sums["planning_s"] += planning_s
            self._settle()
            total_s = self._sums["forward_s"] + self._sums["backward_s"]
            self.passes_s, self._passes_before_s = total_s - self._passes_before_s, total_s
            self.issued_s, self._issued_last_s = self._issued_last_s, self._issuing_s - self._issuing_before_s
            self._issuing_before_s = self._issuing_s
            self._before, self._spans = [*self._spans, *((None, *one) for one in exchanges)], []

    def paused(self, time_s: float) -> None:
        """Counts the time between the last step and the next as a pause."""
        if self._num_steps:
            self._whole_s += time_s
            self._sums["pauses_s"] += time_s

    def _settle(self) -> None:
        for step, start, end in self._before:
            self._add(step, seconds(start, end))
        self._before = []

    def settle(self) -> None:
        """Adds the last step, for which the device is waited for."""
        if self.gpu is not None:
            moment(self.gpu).synchronize()
        self._settle()

    def times(self, peak_bytes: float | None = None) -> RankTimes | None:
        """The mean of the steps, once they are settled; None where there were none."""
        if not self._num_steps:
            return None
        sums = dict(self._sums)
        if self.gpu is None:
            sums["host_s"] = max(0.0, self._whole_s - sum(sums.values()))
        else:
            idle_s = self._whole_s - sum(time_s for part, time_s in sums.items() if part not in ("loading_s", "transfers_s"))
            for part, time_s in (("loading_s", sums["loading_s"]), ("host_s", self._issuing_s - sums["forward_s"] - sums["backward_s"])):
                sums[part] = max(0.0, min(time_s, idle_s))
                idle_s -= sums[part]
            sums["transfers_s"] = max(0.0, idle_s)
        mean = StepParts(**{part: time_s / self._num_steps for part, time_s in sums.items()})
        return RankTimes(mean, None if self.gpu is None else self._issuing_s / self._num_steps, peak_bytes)


Gather = Callable[["torch.Tensor"], "torch.Tensor"]
"""Stacks the tensors of all ranks of a plan, or of all processes of a job, in their order."""


def slowest_stages(num_stages: int, times: StageSpans, gather: Gather) -> dict[int, StageTime]:
    """Each stage on the rank that took longest for it, the same on every rank."""
    import torch

    own = torch.zeros(num_stages, 4, dtype=torch.float64)
    for stage, one in times.stages.items():
        own[stage] = torch.tensor([one.forward_s, one.backward_s, one.wait_s, one.num_passes])
    ranks = gather(own)
    slowest = ranks[:, :, :2].sum(2).argmax(0)
    found = [ranks[rank, stage].tolist() for stage, rank in enumerate(slowest.tolist())]
    return {stage: StageTime(forward, backward, wait, int(passes)) for stage, (forward, backward, wait, passes) in enumerate(found)}


def times_of_ranks(ranks: Sequence[int], own: RankTimes | None, gather: Gather) -> dict[int, RankTimes]:
    """Measured times of each of these ranks, the same on every rank; nothing of one that had nothing to measure."""
    import torch

    values = [math.nan] * (len(fields(StepParts)) + 2)
    if own is not None:
        values = [*astuple(own.parts), *(math.nan if one is None else one for one in (own.issuing_s, own.peak_bytes))]
    found = {}
    for rank, row in zip(ranks, gather(torch.tensor(values, dtype=torch.float64)).tolist(), strict=True):
        *parts, issuing_s, peak_bytes = (None if math.isnan(value) else value for value in row)
        if parts[0] is not None:
            found[rank] = RankTimes(StepParts(*parts), issuing_s, peak_bytes)
    return found
