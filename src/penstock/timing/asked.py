"""Disturbances that are asked for while a run goes on: lines that `penstock disturb` appends to a file in the run's folder.

    penstock disturb ── one line ──► disturbance.jsonl ◄── one `stat` before each step ── every rank

Ranks look before each step, and tell each other how many lines they saw with the moment at which they begin: the fewest count, so that all
slow down in the same step.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.timing.disturbance import Disturbance, DisturbanceChange

__all__ = ["ASKED", "AskedDisturbance", "ask"]

ASKED = "disturbance.jsonl"


def ask(folder: str | Path, change: DisturbanceChange) -> None:
    """Adds a line to the file, in one write: several who ask at the same time do not get in each other's way."""
    path = Path(folder) / ASKED
    try:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
    try:
        os.write(handle, msgspec.json.encode(change) + b"\n")
    finally:
        os.close(handle)


class AskedDisturbance:
    """What slows a rank of a run: what was planned from the start, and what was asked for since, as far as all ranks know of it."""

    def __init__(self, planned: Disturbance, folder: str = "") -> None:
        """`folder` is the run's; empty: nobody can ask."""
        self.now = planned
        self._planned, self._path = planned, Path(folder) / ASKED if folder else None
        self._size = self._agreed = 0
        self._asked: list[DisturbanceChange] = []

    def seen(self) -> int:
        """How many changes were asked for, as far as this rank sees."""
        try:
            size = os.stat(self._path).st_size if self._path is not None else 0
        except FileNotFoundError:
            size = 0
        if size != self._size:
            assert self._path is not None
            *lines, _half = self._path.read_bytes().split(b"\n")
            try:
                self._asked, self._size = [msgspec.json.decode(line, type=DisturbanceChange) for line in lines], size
            except msgspec.DecodeError as error:
                raise InputError(f"disturbance '{self._path}': {error}.") from None
        return len(self._asked)

    def agree(self, count: int) -> None:
        """The first `count` changes are in force: those that all ranks saw."""
        if count != self._agreed:
            self._agreed = count
            self.now = Disturbance((*self._planned.changes, *self._asked[:count]))
