"""What the tests of verbs share: a console wide enough for every table."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.cli import console


@pytest.fixture(autouse=True)
def wide_console(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pytest-xdist sets COLUMNS to 80, at which tables wrap."""
    monkeypatch.setenv("COLUMNS", "200")
    console.out.cache_clear()
    yield
    console.out.cache_clear()
