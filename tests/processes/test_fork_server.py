"""Processes forked from the warm server: nothing to import, the launcher's environment, a name, and no signal but the launcher's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
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
    moment, spins = os.environ.get("OF_THE_MOMENT"), os.environ.get("GOMP_SPINCOUNT")
    pipe.send((loaded, sys.modules["torch"].cuda.is_initialized(), moment, os.getppid(), called, spins))


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
        assert told()[:-1] == (["torch", "penstock.runtime.run", "penstock.data.planners"], False, moment, server, "rank 7")
    monkeypatch.delenv("OF_THE_MOMENT")
    assert told()[2] is None


@pytest.mark.parametrize(("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)])
def test_waiting_threads_leave_their_core_soon_unless_somebody_says_how(
    given: dict[str, str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has it before it imports torch, and so has what it forks."""
    found: list[str | None] = []
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # which has what comes of it undone
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as patch:
        patch.setattr(forkserver, "ensure_running", lambda: found.append(os.environ.get("GOMP_SPINCOUNT")))
        warm_up()
    assert [*found, told()[-1]] == [spins, spins]


_ORPHANED = """
import os, signal, time
from multiprocessing import forkserver, util
from penstock.processes import fork_server

def begin():
    return fork_server.start_process("rank 0", time.sleep, 1000)

if __name__ == "__main__":
    fork_server.PRELOADED.clear()
    process = begin()
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    while process.is_alive():  # as far as anybody tells, until it has closed what it has of the server's
        time.sleep(0.01)
    pid, handle = process.pid, os.pidfd_open(process.pid)
    fork_server.end_processes(process)
    assert fork_server.wait([handle], 0), "it lives on"
    del process
    again = begin()
    assert again.is_alive() and os.path.isdir(util.get_temp_dir())
    fork_server.end_processes(again)
    print("well")
"""


def test_processes_end_though_their_server_was_killed(tmp_path: Path) -> None:
    """As by the system, for want of memory. Others can then be started, by another server."""
    (tmp_path / "launcher.py").write_text(_ORPHANED)
    found = subprocess.run([sys.executable, str(tmp_path / "launcher.py")], capture_output=True, text=True, check=False, timeout=120)
    assert found.stdout == "well\n", found.stderr


_KILLED_EARLY = """
import os, signal
from penstock.processes import fork_server

fork_server.PRELOADED.clear()
fork_server.warm_up()
print(fork_server.forkserver._forkserver._forkserver_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_is_killed_before_it_starts_anybody_leaves_no_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not a test's own: names of sockets are short
        launcher, environment = [sys.executable, "-c", _KILLED_EARLY], {**os.environ, "TMPDIR": folder}
        said = subprocess.run(launcher, env=environment, stdout=subprocess.PIPE, text=True, timeout=250)
        while Path(f"/proc/{int(said.stdout)}").exists():  # the server; the time-out ends a wait in vain
            time.sleep(0.01)
        assert said.returncode == -signal.SIGKILL and not os.listdir(folder)


KILLED_LAUNCHER = """
import os, signal, sys, time
from penstock.processes import fork_server

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def wait():
    fork_server.await_parent()

if __name__ == "__main__":
    fork_server.PRELOADED.clear()
    processes = [fork_server.start_process("stopped", stop), fork_server.start_process("waits", wait)]
    while not fork_server.stopped_children(fork_server.forkserver._forkserver._forkserver_pid):
        time.sleep(0.01)
    print(*(process.pid for process in processes), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_stopped_does_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(KILLED_LAUNCHER)
    said = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, timeout=250)
    for pid in map(int, said.stdout.split()):
        while Path(f"/proc/{pid}").exists():  # the time-out ends a wait in vain
            time.sleep(0.01)
    assert said.returncode == -signal.SIGKILL
