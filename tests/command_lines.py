"""Command lines of tests that change an option of others."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["with_last_values"]


def with_last_values(words: Sequence[str]) -> list[str]:
    """The words with each option once, as it was written last; a command refuses to be given one twice."""
    found = list(words)
    for option in {word for word in words if word.startswith("--") and words.count(word) > 1}:
        while found.count(option) > 1:
            at = found.index(option)
            del found[at : at + 1 + (not found[at + 1].startswith("--"))]
    return found
