"""Faults that somebody asks of a rank, to see how its run goes on: it is killed, frozen or fails, in a phase of a step.

    penstock disturb RUN --kill 1@backward ──► faults/ in the run's folder ◄── rank 1 looks before each step, and dies in its backward pass

A fault happens once: whoever meets it removes its file first.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from penstock.files import write_bytes
from penstock.programs import instructions as i
from penstock.programs.instructions import Program
from penstock.runtime.telemetry.observing import Observer, Observers

__all__ = ["COPYING", "MOVING", "PHASES", "SAVING", "Fault", "FaultAsked", "RankFaults", "ask_fault", "forget_faults"]

SAVING, COPYING, MOVING = "saving", "copying", "moving"
_INSTRUCTIONS: dict[str, tuple[type[i.Instruction], ...]] = {
    "forward": (i.Forward,),
    "backward": (i.Backward, i.BackwardInput, i.BackwardWeight),
    "reduction": (i.ReduceStart, i.ReduceWait),
    "update": (i.Step, i.StepStage),
}
PHASES = (*_INSTRUCTIONS, SAVING, COPYING, MOVING)
"""A checkpoint that is begun, copies that are half made, and a move that is prepared, besides parts of a program."""
_FOLDER = "faults"
_Item = TypeVar("_Item")


class FaultAsked(Exception):
    """A failure that somebody asked for."""


class Fault(msgspec.Struct, frozen=True):
    """What happens to a rank, and when."""

    kind: Literal["kill", "freeze", "fail"]
    rank: int
    phase: str
    """One of `PHASES`."""
    step: int = 0
    """At the first chance from this step on."""

    def happen(self) -> None:
        """To this process, now."""
        if self.kind == "fail":
            raise FaultAsked(f"as was asked of rank {self.rank}")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def ask_fault(folder: str | Path, fault: Fault) -> None:
    """Leaves a fault in a run's folder."""
    (Path(folder) / _FOLDER).mkdir(exist_ok=True)
    write_bytes(Path(folder) / _FOLDER / f"{fault.rank}-{secrets.token_hex(4)}.json", msgspec.json.encode(fault))


def forget_faults(folder: str | Path) -> None:
    """Removes what nobody has met."""
    for path in (Path(folder) / _FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # there is none
        (Path(folder) / _FOLDER).rmdir()


class RankFaults:
    """One rank's view of them."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._folder, self._rank = Path(folder) / _FOLDER, rank
        self._due: dict[Path, Fault] = {}

    def look(self, step: int) -> None:
        """Looks for what is to happen in a step; one call of the system where nothing ever is."""
        self._due = {}
        if self._folder.is_dir():
            for path in self._folder.glob(f"{self._rank}-*.json"):
                fault = msgspec.json.decode(path.read_bytes(), type=Fault)
                if fault.step <= step:
                    self._due[path] = fault

    def observer(self, before: Observer | None) -> Observer | None:
        """Who observes the next program: as before, and with a fault in it if there is to be one."""
        return Observers(*([] if before is None else [before]), _FaultyProgram(self)) if self._due else before

    def meet(self, phase: str) -> None:
        """Where a phase is that a fault may be in."""
        for path, fault in self._due.items():
            if fault.phase == phase:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # there are others
                    self._folder.rmdir()
                self._due = {}
                fault.happen()
                return

    def within(self, phase: str, items: Iterator[_Item]) -> Iterator[_Item]:
        """The items; a fault of the phase comes after the first of them."""
        for number, item in enumerate(items):
            if number == 1:
                self.meet(phase)
            yield item


class _FaultyProgram:
    """Observes a program in which a fault is to happen."""

    def __init__(self, faults: RankFaults) -> None:
        self._faults = faults

    def begin(self, program: Program) -> None:
        self._instructions = program.instructions

    def at(self, index: int) -> None:
        for phase, kinds in _INSTRUCTIONS.items():
            if isinstance(self._instructions[index], kinds):
                self._faults.meet(phase)

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        pass
