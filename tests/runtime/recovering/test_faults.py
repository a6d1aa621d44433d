"""Faults that are asked for: who meets them, and once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.runtime.recovering import faults
from penstock.runtime.recovering.faults import FIRST_RANK, Fault, FaultAsked, RankFaults, ask_fault, forget_faults


def test_each_is_met_once_by_whom_it_is_meant_for(tmp_path: Path) -> None:
    ask_fault(tmp_path, Fault("fail", FIRST_RANK, "update", 5))
    ask_fault(tmp_path, Fault("oom", 2, "sharing"))
    first, other = RankFaults(tmp_path, 1, is_first=True), RankFaults(tmp_path, 2)
    for own, step in ((first, 4), (other, 9)):
        own.look(step)
        own.meet("update")  # not yet, or not its own
    first.look(5)
    with pytest.raises(FaultAsked):
        first.meet("update")
    with pytest.raises(RuntimeError, match="allocate"):
        other.meet("sharing")
    for own in (first, other):
        own.look(9)
        own.meet("update")
        own.meet("sharing")
    assert not list((tmp_path / "faults").iterdir()), "nothing waits, and the folder is there for whoever is about to ask for the next"
    forget_faults(tmp_path)
    assert not list(tmp_path.iterdir())


def test_connections_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends hear of it; whoever listens, and what is no connection to another machine, is let be."""
    near, far = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one, near, far:
        other, _ = listener.accept()
        own = [str(each.fileno()) for each in (listener, one, near)]
        monkeypatch.setattr(faults.os, "listdir", lambda folder: own)
        with other:
            faults._cut_connections()
            assert other.recv(1) == one.recv(1) == b""
        near.sendall(b"x")
        assert far.recv(1) == b"x"
        with socket.create_connection(listener.getsockname()):
            pass
