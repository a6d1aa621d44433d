"""What is wrong with the content of a file, in words: the field, the value given, what was expected."""

from __future__ import annotations

import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from penstock.errors import near_misses

Problem = TypeVar("Problem")

__all__ = ["describe_validation_error", "problem_lines", "short_repr"]

_MAX_PROBLEMS = 20
"""Problems of one file that are told; nobody reads more, and a wrong file may have a million."""


def short_repr(value: object) -> str:
    """A value as text, however large or nested it is."""
    return textwrap.shorten(reprlib.repr(value), 120, placeholder=" …")


def problem_lines(problems: Sequence[Problem], told: Callable[[Problem], str] = str) -> str:
    """The first problems, one in each line, and how many more there are."""
    more = [f"  … and {len(problems) - _MAX_PROBLEMS:,} more"] if len(problems) > _MAX_PROBLEMS else []
    return "\n".join([*(f"  {told(problem)}" for problem in problems[:_MAX_PROBLEMS]), *more])


def describe_validation_error(error: Any, what: str, fields: Mapping[str, Iterable[str]] | None = None) -> str:
    """One line per problem that pydantic found: the field, the value given, what was expected.

    `fields` has the known fields of each owner ("" is the top), from which the nearest to an unknown one are named.
    """

    def told(problem: Any) -> str:
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        given = "" if problem["type"] == "missing" else f" (got {short_repr(problem.get('input'))})"
        return f"{field}: {_explained(problem, fields or {})}{given}"

    return f"{what} is not valid:\n{problem_lines(error.errors(), told)}"


def _explained(problem: Any, fields: Mapping[str, Iterable[str]]) -> str:
    """pydantic's own words, or for an unknown field the nearest known ones."""
    *parents, field = problem["loc"] or ("",)
    owner = next((str(part) for part in reversed(parents) if isinstance(part, str)), "")
    if problem["type"] != "extra_forbidden" or owner not in fields:
        return str(problem["msg"])
    return f"this field does not exist. {near_misses(str(field), fields[owner])}"
