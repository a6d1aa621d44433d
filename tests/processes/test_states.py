"""States of processes, of one of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from penstock.processes.states import is_stopped


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
