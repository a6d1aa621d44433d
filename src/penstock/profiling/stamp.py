"""Which kernels a profile was measured with: a hash of the modules that models are made of."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path
from typing import Any

import penstock.models.modules

__all__ = ["stamp", "stamp_of"]

_UNTIMED = ("build.py", "hf_weights.py", "parallel.py", "trace.py", "trace_fit.py", "traced_pass.py", "unit.py")
"""Modules that say nothing of an op's time: the list of ops, reading foreign weights, collectives (measured by themselves), describing and
running foreign models."""


@functools.cache
def stamp() -> str:
    """The stamp of the installed modules."""
    return stamp_of(Path(penstock.models.modules.__file__).parent)


def stamp_of(folder: Path) -> str:
    """A hash of what the Python files of a folder do: comments, docstrings and layout have no part in it."""
    text = [(path.name, _plain(ast.parse(path.read_text("utf-8")))) for path in sorted(folder.glob("*.py")) if path.name not in _UNTIMED]
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def _plain(node: Any) -> Any:
    """A syntax tree as tuples, the same under every version of Python; fields that say nothing are left out, since versions add some."""
    if isinstance(node, list):
        return [_plain(one) for one in node if not _is_text(one)]
    if not isinstance(node, ast.AST):
        return repr(node)
    named = ((name, value) for name, value in ast.iter_fields(node) if name not in ("kind", "type_comment") and value not in (None, []))
    return type(node).__name__, [(name, _plain(value)) for name, value in named]


def _is_text(node: Any) -> bool:
    """A docstring, of whatever it may be."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
