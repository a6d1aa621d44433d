"""States of processes, of one of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from penstock.processes.states import family_cpu_s, is_stopped


def test_a_process_that_a_signal_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(50)"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        while not is_stopped(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        while is_stopped(process.pid):
            time.sleep(0.01)
        process.kill()
    assert not is_stopped(process.pid) and not is_stopped(os.getpid())


def test_processor_time_of_a_server_and_of_the_workers_that_it_saw_end() -> None:
    """The server lives on, as the one that forks ranks does, so that nobody has waited for it."""
    burn = "import time\nwhile time.process_time() < 0.6: pass"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}]); print('ended', flush=True); sys.stdin.read()"
    before = family_cpu_s()
    with subprocess.Popen([sys.executable, "-c", server], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ended\n"
        seen = family_cpu_s()
    assert seen - before >= 0.4  # the system counts in hundredths, of each process that lives
    assert family_cpu_s() >= seen  # the same, now that the server has ended
