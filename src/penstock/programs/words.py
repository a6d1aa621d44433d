"""Reading a line word by word, with refusals that say what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["Unreadable", "Words", "to_numbers", "to_range"]


class Words:
    """The words of a line, taken one after the other; each refusal says what was expected."""

    def __init__(self, line: str) -> None:
        self.words = line.split()
        self.at = 0

    def peek(self) -> str:
        """The next word, empty at the end."""
        return self.words[self.at] if self.at < len(self.words) else ""

    def word(self) -> str:
        """Takes the next word."""
        self.at += 1
        return self.words[self.at - 1] if self.at <= len(self.words) else ""

    def rest(self) -> Iterator[str]:
        """Takes all that are left."""
        while self.at < len(self.words):
            yield self.word()

    def number(self, prefix: str = "") -> int:
        """Takes a number with its prefix, such as `s3`."""
        word = self.word()
        if not (word.startswith(prefix) and word[len(prefix) :].isascii() and word[len(prefix) :].isdigit()):
            raise Unreadable(f"expected {prefix or 'a '}NUMBER, got '{word}'")
        return int(word[len(prefix) :])

    def keyword(self, word: str) -> None:
        """Takes a word that must be there."""
        if self.word() != word:
            raise Unreadable(f"expected '{word}', got '{self.words[self.at - 1] if self.at <= len(self.words) else ''}'")

    def named(self, word: str, prefix: str = "") -> int:
        """The number after a keyword."""
        self.keyword(word)
        return self.number(prefix)

    def optional(self, word: str, prefix: str) -> int | None:
        """The number after a keyword, if the keyword comes next."""
        return self.named(word, prefix) if self.peek() == word else None

    def numbers_after(self, word: str) -> tuple[int, ...]:
        """The list after a keyword, none if another word comes next."""
        if self.peek() != word:
            return ()
        self.word()
        return to_numbers(self.word())

    def end(self) -> None:
        """Refuses what is left."""
        if self.at < len(self.words):
            raise Unreadable(f"'{self.peek()}' was not expected")


class Unreadable(Exception):
    """A line that cannot be read; `parse_program` adds where it stands."""


def to_numbers(text: str) -> tuple[int, ...]:
    """`1,2,3` as numbers."""
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise Unreadable(f"expected numbers with commas between, got '{text}'")
    return tuple(map(int, text.split(",")))


def to_range(text: str) -> tuple[int, int]:
    """`FIRST:END` as a range."""
    found = re.fullmatch(r"([0-9]+):([0-9]+)", text)
    if not found:
        raise Unreadable(f"expected FIRST:END, got '{text}'")
    return int(found[1]), int(found[2])
