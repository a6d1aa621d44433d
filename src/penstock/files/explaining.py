"""What is wrong with the content of a file, in words: the field, the value given, what was expected."""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.errors import near_misses, plural

__all__ = ["MAX_PROBLEMS", "describe_validation_error", "short_repr"]

MAX_PROBLEMS = 20
"""Problems of one file that are told; nobody reads more, and a wrong file may have a million."""


def short_repr(value: object) -> str:
    """A value as text, however large or nested it is."""
    return textwrap.shorten(reprlib.repr(value), 120, placeholder=" …")


def describe_validation_error(error: Any, what: str, fields: Mapping[str, Iterable[str]] | None = None) -> str:
    """One line per problem that pydantic found: the field, the value given, what was expected.

    `fields` has the known fields of each owner ("" is the top), from which the nearest to an unknown one are named.
    """
    lines, problems = [], error.errors()
    for problem in problems[:MAX_PROBLEMS]:
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        given = "" if problem["type"] == "missing" else f" (got {short_repr(problem.get('input'))})"
        lines.append(f"  {field}: {_explained(problem, fields or {})}{given}")
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  … and {plural(len(problems) - MAX_PROBLEMS, 'more problem')}")
    return f"{what} is not valid:\n" + "\n".join(lines)


def _explained(problem: Any, fields: Mapping[str, Iterable[str]]) -> str:
    """pydantic's own words, or for an unknown field the nearest known ones."""
    *parents, field = problem["loc"] or ("",)
    owner = next((str(part) for part in reversed(parents) if isinstance(part, str)), "")
    if problem["type"] != "extra_forbidden" or owner not in fields:
        return str(problem["msg"])
    return f"this field does not exist. {near_misses(str(field), fields[owner])}"
