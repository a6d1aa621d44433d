"""What a device does in a pipeline: forward (F) or backward (B) of one stage on one micro-batch, written `2F0`, `1B3`."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.errors import InputError

__all__ = ["BACKWARD", "FORWARD", "Action", "Schedule", "format_schedule", "parse_schedule"]

FORWARD, BACKWARD = 0, 1
_LETTERS = "FB"
_TEXT = re.compile(r"(\d+)([FB])(\d+)")


class Action(NamedTuple):
    """One step of a device."""

    stage: int
    kind: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{_LETTERS[self.kind]}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a text such as `2F0` names."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise InputError(f"'{text}' is not an action; expected stage, F or B, micro-batch, such as 2F0.")
        return cls(int(found[1]), _LETTERS.index(found[2]), int(found[3]))


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each device, in order."""


def format_schedule(schedule: Schedule) -> str:
    """One line per device."""
    return "\n".join(" ".join(map(str, actions)) for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """The schedule written by `format_schedule`."""
    return tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().split("\n"))
