"""Whether all ranks reach their end, under both ways in which a send may behave.

eager        A send is done when it is begun; a receive when its send was begun.
rendezvous   The transfers of a pair of ranks take place one after the other, in the order in which each end has begun them (both
             directions together, as on one communicator); each needs both ends. If the ends disagree on the order, both are stuck.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.programs import instructions as i
from penstock.programs.problems import Problem
from penstock.programs.text import format_instruction

__all__ = ["deadlock_problems"]

_Event = tuple[Any, ...]
"""Something a rank may wait for."""


def deadlock_problems(programs: Sequence[i.Program]) -> list[Problem]:
    """The ranks that never end, and where they stand; those that are stuck under both behaviours are told once."""
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for mode in ("eager", "rendezvous"):
        run = _Run(programs, mode == "rendezvous")
        for rank, at in run.stuck().items():
            found[rank, at].append(mode)
    steps = {program.rank: program.instructions for program in programs}
    return [
        Problem(rank, at, f"deadlock with {' and with '.join(modes)} sends: waits for ever at '{format_instruction(steps[rank][at])}'")
        for (rank, at), modes in sorted(found.items())
    ]


class _Run:
    """All ranks, each as far as it gets."""

    def __init__(self, programs: Sequence[i.Program], rendezvous: bool) -> None:
        self.programs = {program.rank: program.instructions for program in programs}
        self.rendezvous = rendezvous
        self.at = dict.fromkeys(self.programs, 0)
        self.happened: set[_Event] = set()
        self.waiting: dict[_Event, list[int]] = defaultdict(list)
        self.queues: dict[tuple[int, int], deque[_Event]] = defaultdict(deque)
        """For each (rank, peer): transfers that the rank has begun and that have not taken place."""
        self.ready = deque(self.programs)

    def stuck(self) -> dict[int, int]:
        """The ranks that do not end, and the instruction each waits at."""
        while self.ready:
            self._advance(self.ready.popleft())
        return {rank: at for rank, at in self.at.items() if at < len(self.programs[rank])}

    def _advance(self, rank: int) -> None:
        steps = self.programs[rank]
        while self.at[rank] < len(steps):
            step = steps[self.at[rank]]
            missing = self._begin(rank, step)
            if missing is not None:
                self.waiting[missing].append(rank)
                return
            self.at[rank] += 1

    def _begin(self, rank: int, step: i.Instruction) -> _Event | None:
        """Does what can be done of an instruction; what it waits for, if anything."""
        if isinstance(step, i.SendStart | i.ReceiveStart):
            self._post(rank, step)
        elif isinstance(step, i.SendWait | i.ReceiveWait):
            sends = isinstance(step, i.SendWait)
            event = (*((rank, step.peer) if sends else (step.peer, rank)), step.what, step.cut, step.micro_batch)
            return None if event in self.happened or (sends and not self.rendezvous) else event
        elif isinstance(step, i.ReduceStart):
            self._tell(("reduce", rank, step.stage))
        elif isinstance(step, i.ReduceWait):
            return self._missing_reduction(rank, step.stage)
        elif isinstance(step, i.StepStage):
            self._tell(("update", rank, step.stage, step.micro_batch))
            return self._missing(("update", other, step.stage, step.micro_batch) for group in step.groups for other in group.ranks)
        elif isinstance(step, i.SyncTied):
            self._tell(("tied", rank, step.op))
            return self._missing(("tied", end.peer, step.op) for end in (*step.receives, *(step.sends if self.rendezvous else ())))
        return None

    def _post(self, rank: int, step: i.SendStart | i.ReceiveStart) -> None:
        sends = isinstance(step, i.SendStart)
        event = (*((rank, step.peer) if sends else (step.peer, rank)), step.what, step.cut, step.micro_batch)
        if not self.rendezvous:
            if sends:
                self._tell(event)
            return
        own, its = self.queues[rank, step.peer], self.queues[step.peer, rank]
        own.append(event)
        while own is not its and own and its and own[0] == its[0]:
            done = own.popleft()
            its.popleft()
            self._tell(done)

    def _missing_reduction(self, rank: int, stage: int) -> _Event | None:
        for step in self.programs[rank][: self.at[rank]]:
            if isinstance(step, i.ReduceStart) and step.stage == stage:
                return self._missing(("reduce", other, stage) for group in step.groups for other in group.ranks)
        return None

    def _missing(self, events: Iterable[_Event]) -> _Event | None:
        """The first that has not happened."""
        return next((event for event in events if event not in self.happened), None)

    def _tell(self, event: _Event) -> None:
        self.happened.add(event)
        self.ready.extend(self.waiting.pop(event, ()))
