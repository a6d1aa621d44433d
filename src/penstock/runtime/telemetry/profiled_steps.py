"""torch.profiler traces of chosen steps, in which each instruction is a labelled range.

Labels tell what an instruction is for: `compute`, `pipeline` (transfers between stages), `data parallel` (gradients summed, shared
weights), `update`. Collectives inside a `compute` range are tensor parallelism's, resharding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.programs import instructions as i
from penstock.programs.text import describe

__all__ = ["ProfiledSteps"]

_PURPOSES = {
    **dict.fromkeys((i.SendStart, i.SendWait, i.ReceiveStart, i.ReceiveWait), "pipeline"),
    **dict.fromkeys((i.ReduceStart, i.ReduceWait, i.SyncTied), "data parallel"),
    **dict.fromkeys((i.Step, i.StepStage), "update"),
}


class ProfiledSteps:
    """Profiles some steps of one rank; an executor's observer that labels instructions while it does."""

    def __init__(self, steps: Collection[int], folder: Path, rank: int) -> None:
        self._steps, self._folder, self._rank = frozenset(steps), folder, rank
        self._instructions: tuple[i.Instruction, ...] = ()
        self._range: Any = None
        self._on = False

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Entered around a step; writes `profile-rank-R-step-S.json` if the step is one of the chosen."""
        if step not in self._steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._on = True
        with profile(activities=kinds) as trace:
            yield
        self._on = False
        trace.export_chrome_trace(str(self._folder / f"profile-rank-{self._rank:05d}-step-{step}.json"))

    def begin(self, program: i.Program) -> None:
        """A program is about to run."""
        self._instructions = program.instructions

    def at(self, index: int) -> None:
        """An instruction is about to run."""
        if self._on:
            step = self._instructions[index]
            self._range = torch.profiler.record_function(f"{_PURPOSES.get(type(step), 'compute')}: {describe(step)}")
            self._range.__enter__()

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """An instruction has run."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
