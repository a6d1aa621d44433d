"""Shared fixtures: random pipelines, the published tables and their independent judge where the machine has them."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


@pytest.fixture(scope="session")
def tables() -> Path:
    """Folder of DynaPipe's tables."""
    if not (DATA / "dynapipe").is_dir():
        pytest.skip("the published tables are not on this machine")
    return DATA / "dynapipe"


@pytest.fixture(scope="session")
def judge(tables: Path) -> ModuleType:
    """The independent scorer of plans."""
    path = DATA.parent / "judges" / "dynapipe_judge.py"
    if not path.is_file():
        pytest.skip("the judges are not on this machine")
    spec = importlib.util.spec_from_file_location("dynapipe_judge", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
