"""A team shares work as one process would do it, whatever becomes of its members, and leaves none of them behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.processes.team import Team


def worked(item: str) -> tuple[str, bool]:
    """What becomes of an item, and whether in a process of its own."""
    alone = multiprocessing.parent_process() is None
    if item == "dies" and not alone:
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "fails":
        raise InputError("this item is wrong.")
    if item == "signalled" and not alone:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    if item == "takes long":
        time.sleep(600)
    return item.upper(), alone


def test_members_answer_in_the_order_of_the_items_and_deaths_are_made_up_for() -> None:
    begun: list[str] = []
    with Team(worked, 2, least=3) as team:
        assert team.each(["a", "b"]) == [("A", True), ("B", True)], "too few to be shared"
        assert team.each(["a", "signalled", "c"], begun.append) == [("A", False), ("SIGNALLED", False), ("C", False)]
        assert begun == ["c", "signalled", "a"]
        found = team.each(["a", "dies", "b", "c"])
    assert [text for text, _ in found] == ["A", "DIES", "B", "C"] and found[1][1], "what a member died of was done here"
    assert multiprocessing.active_children() == []


def test_an_error_is_told_as_by_one_process() -> None:
    with Team(worked, 2, least=2) as team, pytest.raises(InputError, match=r"^this item is wrong\.$"):
        team.each(["a", "fails"])


def test_an_interrupt_ends_members_in_the_middle_of_their_work() -> None:
    begun: list[str] = []

    def interrupted(item: str) -> None:
        begun.append(item)
        if len(begun) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Team(worked, 2, least=2) as team:
        team.each(["takes long", "takes long"], interrupted)
    left = multiprocessing.active_children()
    for process in left:  # they hear nothing else
        process.kill()
    assert left == []


_KILLED = """
import os, signal
from multiprocessing import active_children
from test_team import worked
from penstock.processes.team import Team

def told(item):
    begun.append(item)
    if len(begun) == 3:  # the first two are under way, the third waits for a member
        print(*(process.pid for process in active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

begun = []
if __name__ == "__main__":
    with Team(worked, 2, least=2) as team:
        team.each(["takes long", "b", "takes long"], told)
"""


def test_members_end_by_themselves_when_whoever_started_them_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(_KILLED)
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ended = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, check=False)
    assert ended.returncode == -signal.SIGKILL
    members = [int(pid) for pid in ended.stdout.split()]
    end = time.monotonic() + 250  # in vain; they would sleep for longer
    while (left := [pid for pid in members if _lives(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert len(members) == 2 and not left


def _lives(pid: int) -> bool:
    """Whether a process runs, or would if nobody had stopped it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
