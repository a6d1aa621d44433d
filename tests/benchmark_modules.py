"""Benchmarks as modules: tests run short forms of them."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["load_benchmark"]


@cache
def load_benchmark(name: str) -> Any:
    """The module `benchmarks/NAME.py`, which is no part of a package and may import others beside it."""
    folder = Path(__file__).parents[1] / "benchmarks"
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module
