"""Processes that compete with another one for its processor core, or for a GPU: a foreign load of a size that can be set.

    burner        ████░░████░░        busy for a share of every period, on the core that its victim runs on at the moment
    victim        ░░░░██░░░░██        has half of the core while one burner is busy, a third beside two …

Burners end with whoever started them, however that ends: they read their share from a pipe, and leave when it is closed.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from penstock.processes.states import processor_of

__all__ = ["MAX_FACTOR", "PERIOD_S", "Burners", "Steering", "waited_ns"]

MAX_FACTOR = 16.0
PERIOD_S = 0.02
_LEAST_SHARE = 0.01
_TOLD = 20
"""Of so many of the last looks it is told what was reached."""
_LARGE = 4096
"""Rows and columns of the products with which a GPU is kept busy."""


def waited_ns(pid: int) -> tuple[int, int] | None:
    """Nanoseconds that the main thread of a process has run, and that it was ready to run but had no core; None where nobody says."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return None
    return int(ran), int(waited)


class Steering:
    """Finds the share for which burners have to be busy so that their victim takes `factor` times as long as before.

    Of equal rivals each gets as much of a core: beside `count` busy burners the victim has 1/(count + 1) of it. The share follows what is
    measured of the victim: the time of its passes (`steer`), or what the kernel says that it waited for a core (`update`).
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.count = factor, max(1, math.ceil(factor - 1.0 - 1e-9))
        self.share = min(1.0, (1.0 - 1.0 / factor) * (self.count + 1) / self.count)
        self._usual: float | None = None
        self._before: tuple[int, int] | None = None
        self._seen: deque[float] = deque(maxlen=_TOLD)

    @property
    def reached(self) -> float | None:
        """The victim's slow-down lately, over before; None where nobody has said."""
        return statistics.median(self._seen) if self._seen else None

    def steer(self, slower: float, gain: float = 0.5) -> float:
        """The share from now on; of late the victim took `slower` times as long as before. What it loses grows with the share: a `gain` of
        1 would make up for all that is missing at once, and follow every hiccup."""
        self._seen.append(slower)
        missing = min(4.0, max(0.25, (self.factor - 1.0) / max(slower - 1.0, 1e-9)))
        self.share = min(1.0, max(_LEAST_SHARE, self.share * missing**gain))
        return self.share

    def calm(self, before: tuple[int, int] | None, after: tuple[int, int] | None) -> None:
        """Takes what the victim ran and waited before and after a while without burners."""
        self._usual, self._before = _slower(before, after), after

    def update(self, now: tuple[int, int] | None) -> float:
        """The share from now on; `now` is what the victim has run and waited."""
        slower, self._before = _slower(self._before, now), now
        return self.share if slower is None else self.steer(slower / (self._usual or 1.0))


def _slower(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The slow-down of a thread over its own work; None where it did too little to say."""
    if before is None or after is None or after[0] - before[0] < 5_000_000:
        return None
    return 1.0 + (after[1] - before[1]) / (after[0] - before[0])


class Burners:
    """Some burners, until they are closed: beside a process (`victim`), on any core (0), or on a GPU."""

    def __init__(self, count: int, device: str = "cpu", victim: int = 0, share: float = 1.0) -> None:
        command = [sys.executable, "-m", "penstock.processes.burners", device, str(victim)]
        # Ctrl-C is for who started them.
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) for _ in range(count)
        ]
        self.set(share)

    @property
    def pids(self) -> list[int]:
        """The process ids of all burners."""
        return [process.pid for process in self._processes]

    def set(self, share: float) -> None:
        """Sets the share of the time for which they are busy."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # one that has ended is told of by `failed`
                process.stdin.write(f"{share:.4f}\n".encode())
                process.stdin.flush()

    def await_ready(self) -> None:
        """Returns when all of them are busy, or have ended."""
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    @property
    def failed(self) -> bool:
        """Whether one has ended though nobody asked it to."""
        return any(process.poll() is not None for process in self._processes)

    def __enter__(self) -> Burners:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class _Share:
    """The share of the time that a burner was told last."""

    def __init__(self) -> None:
        self.now = 0.0

    def follow(self) -> None:
        for line in sys.stdin:
            self.now = float(line)
        os._exit(0)


def _spin(end: float) -> None:
    while time.perf_counter() < end:
        pass


def _burn(device: str, victim: int) -> None:
    share = _Share()
    threading.Thread(target=share.follow, daemon=True).start()
    work = _spin if device == "cpu" else _multiplying(device)
    print("ready", flush=True)
    while True:
        start = time.perf_counter()
        if victim and (core := processor_of(victim)) is not None:
            with suppress(OSError):  # the core is none of ours
                os.sched_setaffinity(0, {core})
        work(start + share.now * PERIOD_S)
        time.sleep(max(0.0005, start + PERIOD_S - time.perf_counter()) if share.now < 1.0 else 0.0)


def _multiplying(device: str) -> Callable[[float], None]:
    import torch

    one = torch.randn(_LARGE, _LARGE, device=device)
    found = torch.empty_like(one)

    def work(end: float) -> None:
        while time.perf_counter() < end:
            torch.mm(one, one, out=found)
            torch.cuda.synchronize(device)

    return work


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _burn(sys.argv[1], int(sys.argv[2]))
