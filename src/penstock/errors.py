"""The one family of exceptions a user can meet, each with what, where, the numbers and the next step, and what they are worded with."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence

__all__ = ["InfeasibleError", "InputError", "PenstockError", "ProfileMissingError", "first_of", "near_misses", "plural", "shell_words"]


class PenstockError(Exception):
    """Base of all errors with a message meant for the user; `exit_status` is what the command returns."""

    exit_status = 1


class InputError(PenstockError):
    """Something the user gave is wrong: a file, a field, a name, a size that does not divide."""

    exit_status = 2


class ProfileMissingError(InputError):
    """A cost was asked for that the chosen profile or table does not hold, or the profile is not there at all."""


class InfeasibleError(PenstockError):
    """The request is well formed, but no plan can satisfy it."""

    exit_status = 3


def plural(number: int, noun: str) -> str:
    """A number and what it counts, in the singular or the plural.

    >>> plural(1, "micro-batch"), plural(1_536, "micro-batch"), plural(0, "more entry")
    ('1 micro-batch', '1,536 micro-batches', '0 more entries')
    """
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    return f"{number:,} {noun}"


def first_of(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """The first few of many texts, and how many more there are.

    >>> first_of(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return between.join(texts[:most]) + more


def near_misses(name: str, known: Iterable[str]) -> str:
    """A sentence that lists the known names closest to `name`, or all of them if none is close."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(c) for c in close)}?"
    return f"Known: {', '.join(names)}."


def shell_words(*words: object) -> str:
    """A command that is told, to be copied into a shell: words that a shell would take apart or run are quoted.

    >>> shell_words("penstock", "check", "my plan.json")
    "penstock check 'my plan.json'"
    """
    return shlex.join(map(str, words))
