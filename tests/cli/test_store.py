"""`penstock store start`: the file of a store that runs is never another's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.cli.store import _check_free, _lock
from penstock.stores.addresses import StoreFile, write_store_file


def test_a_second_store_leaves_the_first_ones_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "store.json"
    write_store_file(str(path), StoreFile("redis://127.0.0.1:1", b"x" * 32))
    before, first = path.read_bytes(), _lock(path)  # as the command holds it
    assert run(["store", "start", "--out", str(path)]) == 2
    assert "is the file of a store that runs" in " ".join(capsys.readouterr().err.split())
    assert path.read_bytes() == before
    os.close(first)
    _check_free(path)  # left over
