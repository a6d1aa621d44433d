"""Shared fixtures: the published tables and the independent judges of plans over them, where the machine has them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(os.environ.get("PENSTOCK_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


@pytest.fixture
def published() -> Path:
    """Folder with `aceso/`, `fasop/` and `dynapipe/`."""
    if not (DATA / "aceso").is_dir():
        pytest.skip("figures of published tables need them: name a folder with aceso/, fasop/ and dynapipe/ in PENSTOCK_DATA")
    return DATA


@pytest.fixture
def judge(published: Path) -> Callable[[str], ModuleType]:
    """Loads an independent scorer by name."""

    def load(name: str) -> ModuleType:
        path = DATA.parent / "judges" / f"{name}_judge.py"
        if not path.is_file():
            pytest.skip("the judges of plans are not beside the folder that PENSTOCK_DATA names")
        spec = importlib.util.spec_from_file_location(f"{name}_judge", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    return load
