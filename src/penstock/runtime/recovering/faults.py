"""Faults that somebody asks of a rank, to see how its run goes on: it is killed, frozen or fails, in a phase of a step.

    penstock disturb RUN --kill 1@backward ──► faults/ in the run's folder ◄── rank 1 looks before each step, and dies in its backward pass

A fault happens once: whoever meets it removes its file first.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import parent_process
from pathlib import Path
from typing import Literal, TypeVar, get_args

import msgspec

from penstock.files import write_bytes
from penstock.programs import instructions as i
from penstock.programs.instructions import Program
from penstock.runtime.telemetry.observing import Observer, Observers
from penstock.runtime.telemetry.phases import COMMITTING, COPYING, GATHERED, MOVING, RECOVERING, SAVING, SHARING

__all__ = ["FIRST_RANK", "KINDS", "PHASES", "Fault", "FaultAsked", "FaultKind", "RankFaults", "ask_fault", "forget_faults"]

FaultKind = Literal["kill", "fail", "oom", "freeze", "cut"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""SIGKILL, an exception, more memory than there is, SIGSTOP, and connections to all others that are cut."""
_INSTRUCTIONS: dict[str, tuple[type[i.Instruction], ...]] = {
    "forward": (i.Forward,),
    "backward": (i.Backward, i.BackwardInput, i.BackwardWeight),
    "reduction": (i.ReduceStart, i.ReduceWait),
    "update": (i.Step, i.StepStage),
}
PHASES = (*_INSTRUCTIONS, GATHERED, SHARING, SAVING, COPYING, MOVING, COMMITTING, RECOVERING)
"""Parts of a program, and what is around them."""
FIRST_RANK = -1
"""In place of a rank: the first of the job, which is on the node that leads."""
_FOLDER = "faults"
_TOO_MANY_BYTES = 1 << 60
_Item = TypeVar("_Item")


class FaultAsked(Exception):
    """A failure that somebody asked for."""


class Fault(msgspec.Struct, frozen=True):
    """A fault that somebody asked for: its kind, the rank, and when."""

    kind: FaultKind
    rank: int
    """Who meets it."""
    phase: str
    """One of `PHASES`."""
    step: int = 0
    """At the first chance from this step on."""
    of_node: bool = False
    """Whether its launcher is struck in its place: the supervisor of its node."""

    def happen(self) -> None:
        """To this process, or its launcher, now."""
        match self.kind:
            case "fail":
                raise FaultAsked(f"as was asked of rank {self.rank}")
            case "oom":
                import torch

                torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8)
            case "cut":
                _cut_connections()
            case _:
                launcher = parent_process() if self.of_node else None
                struck = os.getpid() if launcher is None else launcher.pid
                assert struck is not None
                os.kill(struck, signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def _cut_connections() -> None:
    """Shuts all connections of this process to others, as a cable that is pulled does; whoever waits at either end is told."""
    for name in os.listdir("/proc/self/fd"):
        # No socket, or one without anybody at its other end, is let be.
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                one.shutdown(socket.SHUT_RDWR)


def ask_fault(folder: str | Path, fault: Fault) -> None:
    """Leaves a fault in a run's folder."""
    (Path(folder) / _FOLDER).mkdir(exist_ok=True)
    write_bytes(Path(folder) / _FOLDER / f"{fault.rank}-{secrets.token_hex(4)}.json", msgspec.json.encode(fault))


def forget_faults(folder: str | Path) -> None:
    """Removes what nobody has met, once no run is there to ask."""
    for path in (Path(folder) / _FOLDER).glob("*.json"):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # there is none
        (Path(folder) / _FOLDER).rmdir()


class RankFaults:
    """The faults that are asked of one rank."""

    def __init__(self, folder: str | Path, rank: int, *, is_first: bool = False) -> None:
        self._folder, self._names = Path(folder) / _FOLDER, [f"{who}-*.json" for who in (rank, *([FIRST_RANK] if is_first else []))]
        self._due: dict[Path, Fault] = {}

    def look(self, step: int) -> None:
        """Looks for what is to happen in a step; one call of the system where nothing ever is."""
        self._due = {}
        if self._folder.is_dir():
            for path in (path for name in self._names for path in self._folder.glob(name)):
                fault = msgspec.json.decode(path.read_bytes(), type=Fault)
                if fault.step <= step:
                    self._due[path] = fault

    def observer(self, before: Observer | None) -> Observer | None:
        """The observer of the next program, which carries out a fault if there is to be one."""
        return Observers(*([] if before is None else [before]), _FaultyProgram(self)) if self._due else before

    def meet(self, phase: str) -> None:
        """Carries out a fault that was asked for in this phase."""
        for path, fault in self._due.items():
            if fault.phase == phase:
                path.unlink(missing_ok=True)  # the folder stays: the next one may be on its way into it
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
