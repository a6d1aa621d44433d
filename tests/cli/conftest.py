"""What the tests of verbs share: a console wide enough for every table, and the published tables where the machine has them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import console

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


@pytest.fixture
def published() -> Path:
    """Folder with `aceso/` and `fasop/`."""
    if not (DATA / "aceso").is_dir():
        pytest.skip("the published tables are not on this machine")
    return DATA


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest-xdist sets COLUMNS to 80, at which tables wrap."""
    monkeypatch.setenv("COLUMNS", "200")
    console.out.cache_clear()
    yield
    console.out.cache_clear()
