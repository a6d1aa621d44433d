"""What a device does in a pipeline, written `2F0`, `1B3`: stage, kind, micro-batch.

F   forward pass
B   whole backward pass, or in its place
I   its first half, the gradient of the input, which the stage before waits for, and
W   its second half, the gradient of the weights, which nobody waits for
"""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.errors import InputError

__all__ = ["BACKWARD", "FORWARD", "INPUT_GRAD", "KINDS", "WEIGHT_GRAD", "Action", "Schedule", "format_schedule", "parse_schedule"]

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD = 0, 1, 2, 3
KINDS = "FBIW"
"""The letter of each kind."""
_TEXT = re.compile(rf"(\d{{1,9}})([{KINDS}])(\d{{1,9}})", re.ASCII)  # numbers that an array of 32-bit integers holds


class Action(NamedTuple):
    """One step of a device; several stages (chunks of the model) may share a device."""

    stage: int
    kind: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{KINDS[self.kind]}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that a text such as `2F0` names."""
        found = _TEXT.fullmatch(text)
        if not found:
            raise InputError(f"'{text}' is not an action; expected stage, one of F, B, I and W, micro-batch, such as 2F0.")
        return cls(int(found[1]), KINDS.index(found[2]), int(found[3]))


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of each device, in order."""


def format_schedule(schedule: Schedule) -> str:
    """One line per device, `-` for one without actions."""
    return "\n".join(" ".join(map(str, actions)) or "-" for actions in schedule)


def parse_schedule(text: str) -> Schedule:
    """The schedule written by `format_schedule`; blank lines and further spaces do not matter."""
    lines = [line.split() for line in text.splitlines()]
    return tuple(tuple(Action.parse(word) for word in words if word != "-") for words in lines if words)
