"""Writing files: whole or not at all, links kept, devices never replaced; and what is refused."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.files import read_text, write_text


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "real"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(10)
    assert got == ["text"] and pipe.is_fifo()


def test_a_full_device_is_told() -> None:
    with pytest.raises(InputError, match="No space left"):
        write_text("/dev/full", "text")
    assert Path("/dev/full").is_char_device()


def test_targets_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="is a directory"):
        write_text(tmp_path, "text")
    with pytest.raises(InputError, match="file' is not a directory"):
        write_text(tmp_path / "file" / "deeper" / "plan.json", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_device_is_not_read() -> None:
    with pytest.raises(InputError, match="plan '/dev/zero' is a device"):
        read_text("/dev/zero", "plan")
