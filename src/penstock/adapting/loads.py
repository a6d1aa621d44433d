"""Real loads that slow one rank of a run down: processes beside it on its core, or threads inside it on its GPU."""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from penstock.errors import InputError
from penstock.files import write_bytes
from penstock.processes.burners import Burners, Steering, waited_ns
from penstock.processes.states import started_ticks
from penstock.runtime.devices.loads import LoadReport, LoadRequest, load_path, report_path
from penstock.runtime.telemetry.process_files import RankProcess

__all__ = ["LOOK_S", "LoadBeside", "LoadWithin"]

LOOK_S = 0.25
"""Between two looks at a run, and two corrections of burners."""
_FAILED = "what was to keep the device busy has ended. Is there memory left for it?"


class LoadBeside:
    """Burners on the core of a rank, which follow what the kernel says that it waits."""

    def __init__(self, process: RankProcess, factor: float) -> None:
        self._victim, self._steering = process.pid, Steering(factor)

    @property
    def reached(self) -> float | None:
        """The rank's slow-down lately, over before."""
        return self._steering.reached

    def __enter__(self) -> LoadBeside:
        before = waited_ns(self._victim)
        time.sleep(LOOK_S)
        self._steering.calm(before, waited_ns(self._victim))
        self._burners = Burners(self._steering.count, "cpu", self._victim, self._steering.share)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._burners.__exit__(kind, error, trace)

    def look(self) -> None:
        """Corrects it."""
        if self._burners.failed:
            raise InputError(_FAILED)
        self._burners.set(self._steering.update(waited_ns(self._victim)))


class LoadWithin:
    """Asks a rank to keep its own GPU busy; it steers by its passes."""

    def __init__(self, folder: str | Path, rank: int, factor: float, first: int, last: int, share: float = 0.0) -> None:
        """`share` of the time instead of a factor."""
        own = RankProcess(os.getpid(), started_ticks(os.getpid()) or 0, socket.gethostname(), "")
        self._path, self._asked = load_path(folder, rank, secrets.token_hex(4)), LoadRequest(factor, first, last, own, share)
        self.told: LoadReport | None = None
        """What the rank has said of it."""

    @property
    def reached(self) -> float | None:
        """The slow-down of the rank's passes lately, under the plan that it began with."""
        return None if self.told is None else self.told.factor

    def __enter__(self) -> LoadWithin:
        self._path.parent.mkdir(exist_ok=True)
        write_bytes(self._path, msgspec.json.encode(self._asked))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hear()
        for path in (self._path, report_path(self._path)):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there are others
            self._path.parent.rmdir()

    def look(self) -> None:
        """Hears how it goes."""
        self._hear()
        if self.told is not None and self.told.failed:
            raise InputError(_FAILED)

    def _hear(self) -> None:
        with suppress(OSError):  # the rank has not begun
            self.told = msgspec.json.decode(report_path(self._path).read_bytes(), type=LoadReport)
