"""Processes forked from the warm server: nothing to import, the launcher's environment, a name, and no signal but the launcher's."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from penstock.processes.fork_server import FORKED, start_process, warm_up


def tell(pipe: Any) -> None:
    """What a rank or a planner finds when it begins, and that it outlives both signals."""
    loaded = [name for name in ("torch", "penstock.runtime.run", "penstock.data.planners") if name in sys.modules]
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(os.getpid(), number)
    name = Path("/proc/self/comm")
    called = name.read_text().strip() if name.exists() else "rank 7"
    pipe.send((loaded, sys.modules["torch"].cuda.is_initialized(), os.environ.get("OF_THE_MOMENT"), os.getppid(), called))


def told() -> Any:
    """The word of such a process."""
    mine, its = FORKED.Pipe(duplex=False)
    process = start_process("rank 7", tell, its)
    word = mine.recv()
    process.join()
    return word


def test_a_process_begins_warm_with_the_environment_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for moment in ("first", "second"):
        monkeypatch.setenv("OF_THE_MOMENT", moment)
        assert told() == (["torch", "penstock.runtime.run", "penstock.data.planners"], False, moment, server, "rank 7")
    monkeypatch.delenv("OF_THE_MOMENT")
    assert told()[2] is None
