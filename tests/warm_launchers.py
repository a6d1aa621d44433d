"""`penstock` commands in processes of their own that have nothing to import: forked from the warm server, as is what they start.

    warm server of the tests ── fork ──► launcher ── fork ──► its own server ── fork ──► ranks, planners
                                         └──────────────────── a session of their own ────────────────┘

Groups, signals and deaths are those of a command that somebody typed; seconds of imports are missing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

from penstock.processes.fork_server import FORKED, SIGNALS, warm_up

__all__ = ["Launched", "launched"]

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Launched:
    """A command that runs, or has run, and the files with what it says."""

    process: Any
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        """Also the number of its session and its group."""
        return int(self.process.pid)

    @property
    def status(self) -> int | None:
        """With which it has ended; None while it runs."""
        found: int | None = self.process.exitcode
        return found

    def session(self) -> set[int]:
        """The living processes of its session."""
        found = set()
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(own) == self.pid and state != "Z":
                found.add(int(path.parent.name))
        return found

    def ended(self) -> tuple[str, str]:
        """What it has said when it has ended."""
        self.process.join()
        return self.out.read_text(), self.err.read_text()


@contextmanager
def launched(
    arguments: Sequence[str], folder: Path, name: str = "launched", network: str = "", **environment: str
) -> Iterator[Launched]:
    """`penstock ARGUMENTS`, with some variables beside those of this process, perhaps in a network namespace that `ip` has named; nothing
    of its session is left behind."""
    warm_up()
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    process = FORKED.Process(target=_launch, args=({**os.environ, **environment}, list(arguments), network, out, err))
    process.start()
    try:
        while not err.exists() and process.exitcode is None:  # until it has a session of its own
            time.sleep(0.01)
        yield Launched(process, out, err)
    finally:
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _launch(environment: Mapping[str, str], arguments: list[str], network: str, out: Path, err: Path) -> None:
    os.setsid()
    if network:
        _enter(network)
    os.environ.clear()
    os.environ.update(environment)
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream.fileno())
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_pid = server._forkserver_address = server._forkserver_alive_fd = None
    util.spawnv_passfds = _forked  # type: ignore[attr-defined]
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the server that forked it hears them not
    status = 1
    try:
        from penstock.cli.main import run

        status = run(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _enter(network: str) -> None:
    """As `ip netns exec` does. (`os.setns` is there only from Python 3.12 on.)"""
    with open(f"/run/netns/{network}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"could not enter {network}")


def _forked(_: bytes, arguments: Sequence[str], handles: Sequence[int]) -> int:
    """In place of a new interpreter that is to run `-c CODE`, and has these open files alone."""
    if pid := os.fork():
        return pid
    try:
        for handle in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *handles}:
            try:
                os.close(handle)
            except OSError:  # that of the listing itself
                continue
        exec(arguments[-1], {"__name__": "__main__"})
    except Exception:  # not `SystemExit`, by which a server ends
        traceback.print_exc()
    finally:
        os._exit(0)
