"""Who leads when the leader is lost: the first to get the run's lock, and nobody while it is held."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cli.join import _others
from penstock.cli.main import run as main
from penstock.plans.build import uniform_plan
from penstock.runtime.nodes import succession
from penstock.runtime.nodes.succession import LeaderLostError, LedBy, beating, read_led, succeed, write_led
from penstock.runtime.run_folder import put_in_force
from penstock.runtime.run_lock import is_held, run_lock, take_away


def test_one_leads_and_the_others_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "_SUCCESSION_S", 0.3)
    monkeypatch.setattr(succession, "_TURN_S", 0.01)
    with pytest.raises(LeaderLostError, match="The run has ended"):
        succeed(tmp_path, 1, 0, "gone.")
    write_led(tmp_path, LedBy(0, "10.0.0.1", 29500, 0, (0, 2)))
    with pytest.raises(LeaderLostError, match="The run has gone on without this node"):
        succeed(tmp_path, 1, 0, "gone.")  # and is not begun once more by a node that was cut off
    write_led(tmp_path, LedBy(0, "10.0.0.1", 29500, 0, (0, 1, 2)))
    with run_lock(tmp_path), pytest.raises(LeaderLostError, match=r"gone\. It still holds"):
        succeed(tmp_path, 1, 0, "gone.")
    lead = succeed(tmp_path, 1, 0, "gone.")
    assert isinstance(lead, tuple)
    with lead[0]:
        write_led(tmp_path, LedBy(1, "10.0.0.2", 29501, 1))
        assert succeed(tmp_path, 2, 0, "gone.") == read_led(tmp_path)
        with pytest.raises(LeaderLostError):
            succeed(tmp_path, 2, 1, "gone.")


def test_a_leader_that_stands_still_loses_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And knows it when it goes on. One that beats keeps it."""
    for name, value in (("_SUCCESSION_S", 1.0), ("_TURN_S", 0.0), ("_LOOK_S", 0.01), ("_STILL_S", 0.3), ("_BEAT_S", 0.02)):
        monkeypatch.setattr(succession, name, value)
    synchronised: list[int] = []
    monkeypatch.setattr("penstock.runtime.run_lock.os.fdatasync", synchronised.append)  # a busy disk may take longer than is waited here
    write_led(tmp_path, LedBy(0, "10.0.0.1", 29500, 0, (0, 1)))
    with run_lock(tmp_path) as lock:
        with beating(lock), pytest.raises(LeaderLostError, match="still holds"):
            succeed(tmp_path, 1, 0, "silent.")
        assert lock.is_held and synchronised  # for others on a network's file system to see
        monkeypatch.setattr(succession, "_SUCCESSION_S", 1000.0)  # on a busy machine a look takes longer than the pause before it
        found = succeed(tmp_path, 1, 0, "silent.")
        assert isinstance(found, tuple) and found[1].is_held and not lock.is_held
        with found[0]:
            lock.beat()  # to nobody
            take_away(tmp_path, b"what the old one said")  # another node that was as late
            assert found[1].is_held and is_held(tmp_path)


def test_nobody_leads_a_run_whose_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether others ask who leads, or the one that has led until then looks."""
    for name, value in (("_TURN_S", 0.0), ("_LOOK_S", 0.01), ("_STILL_S", 0.05)):
        monkeypatch.setattr(succession, name, value)
    folder = tmp_path / "run"
    folder.mkdir()
    with run_lock(folder) as lock:
        assert lock.is_held and not lock.is_gone
        os.rename(folder, tmp_path / "elsewhere")
        assert not lock.is_held and lock.is_gone
        with pytest.raises(LeaderLostError, match=r"^gone\. The folder of the run, '.*run', is gone"):
            succeed(folder, 1, 0, "gone.")
        folder.write_text("another's")
        assert not lock.is_held and lock.is_gone


def test_joining_is_the_same_command_as_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "p.json", "--node-rank", "0", "--master=a:1", "--out", "run", "--node-rank=3", "--master", "b:2", "--json"]
    assert list(_others(words)) == ["train", "p.json", "--out", "run", "--json"]
    for resumed in (["--resume", "run/checkpoints/gone"], ["--resume=run/checkpoints/gone"]):
        assert list(_others([*words, *resumed], Path("new"))) == ["train", "p.json", "--out", "run", "--json", "--resume", "new"]
        assert list(_others([*words, *resumed]))[-2:] == ["--resume", "run/checkpoints/gone"]  # all that there is yet
    put_in_force(tmp_path, 0, uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2))
    for led, told in ((None, "is not led by a node"), (LedBy(0, "a", 1, 0, (0, 1), 2), "was not started from a command line"),
                      (LedBy(0, "a", 1, 0, (0, 1), 2, ("train",), "."), "has all of its 2 nodes"),
                      (LedBy(0, "a", 1, 0, (0,), 2, ("train",), "/proc/none"), "was started in '/proc/none', which this")):  # fmt: skip
        if led is not None:
            write_led(tmp_path, led)
            assert (tmp_path / "leader.json").stat().st_mode & 0o777 == 0o600  # a command may hold a password
        assert main(["join", str(tmp_path)]) == 2 and told in capsys.readouterr().err.replace("\n", " ")
