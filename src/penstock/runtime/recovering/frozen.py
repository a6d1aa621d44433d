"""Which ranks of a machine have stopped without ending: stopped by a signal, or at one instruction for far longer than ever.

A rank that waits for another is no such one, nor is one that a debugger holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.processes.states import is_stopped

if TYPE_CHECKING:
    from penstock.runtime.telemetry.status import StatusBoard

__all__ = ["FrozenRanks"]

LOOK_S = 0.25
STOPPED_S = 1.0
"""A rank that is stopped for so long does not come back by itself."""
MANY_TIMES, LEAST_S = 10.0, 10.0
"""A pass that takes so many times as long as the longest whole step so far hangs; one of less than some seconds never does."""


class FrozenRanks:
    """Looked at again and again, since it counts how long something has been so: only while whoever looks runs too."""

    look_s = LOOK_S

    def __init__(self, clock: Callable[[], float] = time.monotonic, stopped: Callable[[int], bool] = is_stopped) -> None:
        self._clock, self._is_stopped = clock, stopped
        self._last_s: float | None = None
        self._stopped_s: dict[int, float] = {}
        self._at: dict[int, tuple[tuple[int, int], float]] = {}
        """Where each rank is, and for how long."""
        self._step_s: dict[int, float] = {}
        """Of each rank: time since its present step began."""
        self._longest_s = 0.0

    def look(self, processes: Mapping[int, int], board: StatusBoard) -> dict[int, str]:
        """Looks for ranks that have stopped making progress, and says why; `processes` are the ids of those that may run."""
        now = self._clock()
        # Not more than one look's time: a launcher that was stopped itself has seen nothing meanwhile.
        passed_s = 0.0 if self._last_s is None else min(now - self._last_s, 2 * LOOK_S)
        self._last_s = now
        found = {}
        for rank, pid in processes.items():
            self._stopped_s[rank] = self._stopped_s.get(rank, 0.0) + passed_s if self._is_stopped(pid) else 0.0
            if self._stopped_s[rank] >= STOPPED_S:
                found[rank] = "was stopped by a signal"
        return found or self._hanging(passed_s, processes, board)

    def _hanging(self, passed_s: float, processes: Mapping[int, int], board: StatusBoard) -> dict[int, str]:
        """The one that has been at a pass for too long, before all others."""
        late = {}
        for rank in processes:
            place, computes = board.position(rank)
            before, so_long_s = self._at.get(rank, (place, 0.0))
            self._at[rank] = place, so_long_s + passed_s if place == before else 0.0
            if place[0] == before[0]:
                self._step_s[rank] = self._step_s.get(rank, 0.0) + passed_s
            else:
                self._longest_s = max(self._longest_s, self._step_s.get(rank, 0.0), LOOK_S)
                self._step_s[rank] = 0.0
            if computes and self._longest_s and self._at[rank][1] > max(LEAST_S, MANY_TIMES * self._longest_s):
                late[rank] = self._at[rank][1]
        if not late:
            return {}
        rank = max(late, key=lambda one: late[one])
        return {rank: f"has hung for {late[rank]:.0f} s, {MANY_TIMES:g} times as long as any step took,"}

