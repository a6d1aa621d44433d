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
    """The module `benchmarks/NAME.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", Path(__file__).parents[1] / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
