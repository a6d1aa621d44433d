"""Ctrl-C and SIGTERM: the first asks a run to end after the step that runs, with a checkpoint; a second ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from penstock.errors import PenstockError
from penstock.processes.fork_server import SIGNALS

__all__ = ["Interrupted", "Interrupts"]

_STDERR = 2
_SAME_S = 1.0
"""Signals so close to the first are the same one: torchrun, Slurm and `timeout` may bring it to a process twice."""


class Interrupted(PenstockError):
    """A signal ended the run; the exit status is the one that shells expect for it."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.exit_status = 128 + number


class Interrupts:
    """Hears SIGINT and SIGTERM while it is entered; only a process' main thread can, elsewhere it hears nothing.

    `asked(number)` is called at the first, in the midst of whatever runs, and says what will come of it where that is not the end of the
    run; `quiet` says nothing on stderr.
    """

    def __init__(self, asked: Callable[[int], str | None] = lambda number: None, *, quiet: bool = False) -> None:
        self.number = 0
        """The first signal; 0: none came."""
        self._asked, self._quiet = asked, quiet
        self._before: dict[signal.Signals, Any] = {}
        self._first_s = 0.0

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self.number:
            self.number, self._first_s = number, time.monotonic()
            what = self._asked(number) or "the run ends after this step, with a checkpoint"
            self._tell(f"{name}: {what}; a second one ends it at once.")
        elif time.monotonic() - self._first_s > _SAME_S:
            self._tell(f"{name}: the run ends at once; checkpoints that were whole before stay.")
            raise SystemExit(128 + number)  # no `Exception`, which an executor would take for an instruction's failure

    def _tell(self, note: str) -> None:
        if not self._quiet:
            # Not `print`: a signal may come while stderr's buffer is written to, which cannot be entered twice.
            os.write(_STDERR, f"\n{note}\n".encode())
