"""Shared fixtures: DynaPipe's tables and their independent judge, where the machine has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def tables(published: Path) -> Path:
    """Folder of DynaPipe's tables."""
    return published / "dynapipe"


@pytest.fixture
def dynapipe_judge(judge: Callable[[str], ModuleType]) -> ModuleType:
    """The independent scorer of plans."""
    return judge("dynapipe")
