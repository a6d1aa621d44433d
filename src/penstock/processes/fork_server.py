"""Processes that one warm server forks: it has imported torch once, which takes seconds, and a fork takes milliseconds.

    launcher ── starts ──► fork server   torch and the runtime imported; no device, no process group, no work of its own
        │                   ├── fork ──► rank 0
        └──── asks for ───► ├── fork ──► rank 1
                            └── fork ──► planner 0

What is forked is as if it were spawned by the launcher: it has the launcher's environment of that moment, and can end with it.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context, parent_process, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from penstock.processes.states import stopped_children

__all__ = ["FORKED", "PRELOADED", "SIGNALS", "await_parent", "end_processes", "start_process", "unheard", "warm_up"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORKED: ForkServerContext = get_context("forkserver")
"""Makes pipes and shared memory for such processes."""

PRELOADED = [
    "penstock.cli.train",
    "penstock.runtime.run",
    "penstock.runtime.devices.rehearsing",
    "penstock.timing.event_clock",
    "torch.fx.experimental.symbolic_shapes",  # torch imports it in the first backward pass
]
"""What the server imports, with all that these take. What only some ranks need (torch's compiler where they recompute) is not here, since
everybody would wait for it; who starts many such processes adds it."""
_SPINS = "GOMP_SPINCOUNT"
_FEW_SPINS = "1000"
"""How often a thread of torch on processors looks whether there is work before it sleeps: what libgomp itself takes where it knows that
there are more threads than cores. Its usual 300,000 keep a core busy for milliseconds that another process could use."""
_NAME = Path("/proc/self/comm")
_HANDLES = weakref.WeakKeyDictionary[ForkServerProcess, int]()
"""A descriptor for each process that was started, which is that process for good, as its number is not."""
_LEFT: list[str] = []
"""The folder with the fork server's socket, which the process that started this one removes at its end unless it is killed."""
_OWNER = "PENSTOCK_OWNER_OF_FORK_SERVER"
"""In a server's environment: the process that has started it, and that folder."""


@contextmanager
def unheard() -> Iterator[None]:
    """Processes started within hear neither signal, from their first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warm_up() -> None:
    """Starts the server if there is none, and does not wait for it: called early, its imports cost no time."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault(_SPINS, _FEW_SPINS)  # now, since libgomp reads it when it is loaded
    FORKED.set_forkserver_preload([__name__, *PRELOADED])
    resource_tracker.ensure_running()  # here, because it lets the signals through again
    with unheard(), _owned():  # Ctrl-C is the launcher's to hear; the server, and all that it forks, would die of it
        forkserver.ensure_running()


@contextmanager
def _owned() -> Iterator[None]:
    """A server that is started within knows whose it is."""
    if parent_process() is None:  # what that has started has no folder of its own
        os.environ[_OWNER] = f"{os.getpid()} {util.get_temp_dir()}"
    try:
        yield
    finally:
        os.environ.pop(_OWNER, None)


def _clear_away(owner: int, folder: str, server: int) -> None:
    """The end of a server: what its owner has left behind, if that was killed, perhaps before it had started anybody else. Processes that
    it has forked may come here at their end too."""
    if os.getpid() == server and os.getppid() != owner:
        shutil.rmtree(folder, ignore_errors=True)


if _OWNER in os.environ:  # this is the server, which imports this module first of all
    _pid, _, _folder = os.environ.pop(_OWNER).partition(" ")
    atexit.register(_clear_away, int(_pid), _folder, os.getpid())


def start_process(name: str, target: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """Forks a process that calls `target(*arguments)`. It hears neither Ctrl-C nor SIGTERM: whoever started it does, and ends it."""
    warm_up()
    # A process that another has started has the folder of that one, who goes on with it.
    folder = util.get_temp_dir() if parent_process() is None else None
    process = FORKED.Process(target=_begin, args=(name, dict(os.environ), folder, target, arguments), name=name, daemon=True)
    process.start()
    assert process.pid is not None
    with suppress(OSError):  # it has ended already, or this is an old system
        _HANDLES[process] = handle = os.pidfd_open(process.pid)
        weakref.finalize(process, os.close, handle)
    return process


def end_processes(*processes: ForkServerProcess) -> None:
    """Ends processes at once, and returns when they have ended: also where the server that forked them is gone, from which alone this one
    would hear of it. One that lived on would take this one's end to have come as soon as nobody here holds it any more."""
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended already
            if process in _HANDLES:
                signal.pidfd_send_signal(_HANDLES[process], signal.SIGKILL)
            else:
                process.kill()
    for process in processes:
        if process in _HANDLES:
            wait([_HANDLES[process]])
        process.join()


def _begin(name: str, environment: Mapping[str, str], folder: str | None, target: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    _LEFT.extend([] if folder is None else [folder])
    os.environ.clear()  # the server's is that of the moment at which it was started
    os.environ.update(environment)
    with suppress(OSError):  # a system without such names does without
        _NAME.write_text(name)  # as `ps` and `top` show it
    gc.freeze()  # what was imported stays for good: no collection looks through it, nor copies the pages that it shares
    target(*arguments)


def await_parent(timeout_s: float | None = None) -> bool:
    """Whether the process that started this one has ended, however it did; waits for that so long, or as long as it takes. What it has
    left behind is then removed, with others that it started and that a signal has stopped: these cannot see its end."""
    parent = parent_process()
    assert parent is not None, "the first process of all has no parent to wait for"
    parent.join(timeout_s)
    if parent.is_alive():
        return False
    for folder in _LEFT:
        shutil.rmtree(folder, ignore_errors=True)  # others that it started may do the same
    for stopped in stopped_children(os.getppid()) if _LEFT else []:  # the server's, which serves nobody else
        with suppress(ProcessLookupError):
            os.kill(stopped, signal.SIGKILL)
    return True
