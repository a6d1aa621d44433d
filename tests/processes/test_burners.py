"""Burners steer towards a factor, follow what they are told, and leave with whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.processes.burners import Burners, Steering, waited_ns

STARTS_BURNERS = """
import sys, time
from penstock.processes.burners import Burners
burners = Burners(2)
print(*burners.pids, flush=True)
time.sleep(600)
"""


def victim_of(steering: Steering, strength: float, usual: float = 1.0) -> float:
    """How many times as long a made-up victim takes in the end, if burners that are busy all the time slow it by `1 + strength`."""
    ran = waited = 0
    steering.calm((0, 0), (10**9, int((usual - 1) * 10**9)))
    ran, waited, slower = 10**9, int((usual - 1) * 10**9), 1.0
    for _ in range(60):
        slower = usual * (1 + strength * steering.share)
        ran, waited = ran + 10**8, waited + int((slower - 1) * 10**8)
        steering.update((ran, waited))
    return slower


@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0, 3.5])
def test_the_share_is_steered_to_the_factor_whatever_burners_are_worth(factor: float) -> None:
    for strength in (1.1, 1.6, 2.5):
        steering = Steering(factor)
        assert steering.count == max(1, -(-round(10 * (factor - 1)) // 10))
        assert victim_of(steering, strength * steering.count) == pytest.approx(factor, rel=0.02)
        assert steering.reached == pytest.approx(factor, rel=0.02)


def test_a_victim_that_had_to_wait_before_takes_so_many_times_as_long_as_it_did() -> None:
    assert victim_of(Steering(1.5), 2.0, usual=1.4) == pytest.approx(1.5 * 1.4, rel=0.02)


def test_where_nobody_says_how_long_a_victim_waits_the_share_is_that_of_equal_rivals() -> None:
    steering = Steering(1.5)
    steering.calm(None, None)
    assert steering.update(None) == pytest.approx(2 / 3) and steering.reached is None
    assert Steering(2.0).share == 1.0


def test_burners_are_busy_while_told_so_and_leave_when_closed() -> None:
    with Burners(1, share=1.0) as burners:
        (pid,) = burners.pids
        ran = await_ran(pid, 50_000_000)
        assert ran is not None and not burners.failed
    assert not Path(f"/proc/{pid}").exists()


def test_a_burner_follows_its_victim_to_its_core() -> None:
    core = max(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nprint(1, flush=True)\nwhile True: pass"
    victim = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    try:
        assert victim.stdout is not None and victim.stdout.readline()
        with Burners(1, victim=victim.pid) as burners:
            while os.sched_getaffinity(burners.pids[0]) != {core}:  # the time-out ends a wait in vain
                time.sleep(0.01)
    finally:
        victim.kill()
        victim.communicate()


def test_burners_leave_when_whoever_started_them_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS_BURNERS], stdout=subprocess.PIPE)
    assert starter.stdout is not None
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    starter.kill()
    starter.communicate()
    while any(is_alive(pid) for pid in pids):  # the time-out ends a wait in vain
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def await_ran(pid: int, least_ns: int) -> int | None:
    """Returns once a process has run for so long."""
    while (found := waited_ns(pid)) is not None and found[0] < least_ns:
        time.sleep(0.01)
    return None if found is None else found[0]
