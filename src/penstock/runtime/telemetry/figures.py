"""What every rank measures in a step beside what its costs say of the work that it really had: what noticing slow ranks begins with.

Figures of all ranks are gathered with the word on which ranks agree after each step, and handed to whoever watches the run.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.runtime.telemetry.parts import HOST_BOUND
from penstock.runtime.telemetry.predicting import ProgramTimes, passes_s

if TYPE_CHECKING:
    from penstock.data.planning import ProgramPlanner
    from penstock.programs.instructions import Program
    from penstock.runtime.telemetry.observing import StageSpans

__all__ = ["RankFigures", "StepMeter"]


@dataclass(frozen=True)
class RankFigures:
    """One rank's measured times of one step, and those that its costs predicted, in seconds; 0 where nothing is known."""

    compute_s: float = 0.0
    """Its passes, without waiting for other stages."""
    predicted_s: float = 0.0
    """The same, as the costs have it for the micro-batches of this step."""
    data_wait_s: float = 0.0
    """For samples."""
    planning_wait_s: float = 0.0
    """For the program."""
    step_s: float = 0.0
    """The whole step, waits included."""
    host_s: float = 0.0
    """Of the passes, how long the host took to issue them; 0 where it is the host that computes."""

    def shared_out(self, count: int) -> RankFigures:
        """The figures of each of so many steps that were one program."""
        return self if count == 1 else RankFigures(*(value / count for value in astuple(self)))

    @property
    def is_host_bound(self) -> bool:
        """Whether the device has its work no sooner than it is done with what it had."""
        return self.compute_s > 0 and self.host_s >= HOST_BOUND * self.compute_s


class StepMeter:
    """Compares the passes of a rank with what is predicted of them. A GPU's times are read when it has surely the step behind it: there
    figures are those of the step before (`lateness` 1)."""

    def __init__(self, planner: ProgramPlanner, spans: StageSpans) -> None:
        self.lateness = 0 if spans.gpu is None else 1
        self._spans = spans
        # Opening costs takes about as long as a few steps of a small model: it must not hold up the first one.
        opener = ThreadPoolExecutor(1, "costs")
        self._opening: Future[ProgramTimes] = opener.submit(ProgramTimes, planner.plan, planner.model, planner.costs)
        opener.shutdown(wait=False)
        self._predicted_s = 0.0
        self._before = RankFigures()
        """Of the step before, without what the GPU had not told yet."""

    @property
    def refused(self) -> PenstockError | None:
        """Why nothing can be predicted."""
        error = self._opening.exception() if self._opening.done() else None
        if error is not None and not isinstance(error, PenstockError):
            raise error
        return error

    def expect(self, program: Program) -> None:
        """A program was issued; asked while a GPU is busy with it."""
        known = self._opening.done() and self.refused is None
        self._predicted_s = passes_s(program, self._opening.result().workload(program)) if known else 0.0

    def ended(self, step_s: float, data_wait_s: float, planning_wait_s: float) -> RankFigures:
        """The step has ended, and `StageSpans` knows of it."""
        now = RankFigures(0.0, self._predicted_s, data_wait_s, planning_wait_s, step_s)
        told, self._before = (self._before if self.lateness else now), now
        return replace(told, compute_s=self._spans.passes_s, host_s=self._spans.issued_s)
