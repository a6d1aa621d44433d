"""One warm server for all processes that run tests side by side: each of its own would spend five seconds on the same imports."""

from __future__ import annotations

import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

from penstock.processes.fork_server import warm_up

__all__ = ["offer_server", "take_server"]

_VARIABLE = "PENSTOCK_TESTS_SERVER"
_SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


def offer_server() -> None:
    """Starts the server, and tells it to the processes that are started from here."""
    warm_up()
    os.environ[_VARIABLE] = f"{_SERVER._forkserver_pid} {_SERVER._forkserver_address}"


def take_server() -> None:
    """Ranks and planners of this process are forked by the server that it was told; without one, by its own."""
    process, _, address = os.environ.pop(_VARIABLE, "").partition(" ")
    if process:
        _SERVER._forkserver_pid, _SERVER._forkserver_address, _SERVER._forkserver_alive_fd = int(process), address, os.pipe()[1]
        forkserver.ensure_running = _SERVER.ensure_running = resource_tracker.ensure_running
