"""Signals: the first is noted, its echo is not a second one, a second one ends, and handlers are as before afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from penstock.processes.fork_server import unheard
from penstock.runtime import interrupts
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.telemetry.status import Status, StatusBoard


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_is_noted_and_a_second_ends(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    asked: list[int] = []
    with Interrupts(asked.append) as heard:
        assert heard.number == 0
        os.kill(os.getpid(), number)
        assert heard.number == number and asked == [number]
        os.kill(os.getpid(), number)  # as torchrun or `timeout` bring it a second time
        assert asked == [number]
        monkeypatch.setattr(interrupts, "_SAME_S", 0.0)
        with pytest.raises(SystemExit) as ending:
            os.kill(os.getpid(), signal.SIGTERM)
    assert ending.value.code == 143
    assert signal.getsignal(number) is before
    told = capfd.readouterr().err
    assert (
        told.count(f"{number.name}: the run ends after this step, with a checkpoint") == 1
        and told.count("SIGTERM: the run ends at once") == 1
    )


def test_another_thread_hears_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    kept: list[object] = []

    def enter() -> None:
        with Interrupts():
            kept.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert kept == [before]


def test_processes_started_unheard_live_on() -> None:
    code = "import os, signal\nfor n in (2, 15): os.kill(os.getpid(), n)\nprint('alive')"
    with unheard():
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.communicate(timeout=250) == ("alive\n", "") and child.returncode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_all_ranks_see_on_the_board_that_they_are_to_end() -> None:
    board = StatusBoard(3)
    ranks = [Status(board.memory, rank) for rank in range(3)]
    assert [rank.asked_to_end() for rank in ranks] == [0, 0, 0]
    board.ask_to_end(signal.SIGTERM)
    assert [rank.asked_to_end() for rank in ranks] == [15, 15, 15]
    assert [board.where(rank) for rank in range(3)] == ["before its first program"] * 3
    board.clear()  # for ranks that take the place of others, who are to end just as well
    assert ranks[0].asked_to_end() == 15
