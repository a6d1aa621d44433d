"""The loop that runs a program: one registered handler for each kind of instruction, and a clear word when one fails."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns

from penstock.errors import InputError, PenstockError
from penstock.programs.instructions import INSTRUCTIONS, Instruction, Program
from penstock.programs.text import describe
from penstock.runtime.telemetry.observing import Observer

__all__ = ["ExecutionError", "Executor", "Handler"]

Handler = Callable[[Instruction], None]


class ExecutionError(PenstockError):
    """An instruction failed; the message names rank, stage, instruction and micro-batch."""


class Executor:
    """Runs programs with whatever handlers are registered; Penstock's own are those of `runtime.rank.Rank`.

    >>> from penstock.programs.instructions import Free
    >>> Executor().register(Free, lambda step: None).missing()[0].__name__
    'Load'
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.handlers: dict[type[Instruction], Handler] = {}
        self.observer = observer
        self.program: Program | None = None
        """The one that runs."""

    def register(self, kind: type[Instruction], handler: Handler) -> Executor:
        """Calls `handler(instruction)` for every instruction of this kind; a second handler for one kind is refused."""
        if kind not in INSTRUCTIONS:
            raise InputError(f"{kind!r} is no kind of instruction. Known: {', '.join(known.__name__ for known in INSTRUCTIONS)}.")
        if kind in self.handlers:
            raise InputError(f"{kind.__name__} has a handler already. Register each kind once.")
        self.handlers[kind] = handler
        return self

    def missing(self) -> list[type[Instruction]]:
        """Kinds without a handler."""
        return [kind for kind in INSTRUCTIONS if kind not in self.handlers]

    def run(self, program: Program) -> None:
        """Runs all instructions in order."""
        if missing := self.missing():
            raise InputError(f"no handler for {', '.join(kind.__name__ for kind in missing)}. Register one for each kind.")
        self.program = program
        index = 0
        handlers, observer = self.handlers, self.observer
        try:
            if observer is None:
                for index, step in enumerate(program.instructions):  # noqa: B007  # named in the error
                    handlers[type(step)](step)
                return
            observer.begin(program)
            at, done = observer.at, observer.done
            for index, step in enumerate(program.instructions):
                at(index)
                start = perf_counter_ns()
                handlers[type(step)](step)
                done(index, start, perf_counter_ns())
        except Exception as error:
            step = program.instructions[index]
            raise ExecutionError(
                f"rank {program.rank} failed in iteration {program.iteration} at {describe(step)} (instruction {index} of "
                f"{len(program.instructions)}): {type(error).__name__}: {error}"
            ) from error
        finally:
            self.program = None
