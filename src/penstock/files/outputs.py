"""The names that one command writes to, so that no output overwrites another, or a file that the command reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from penstock.errors import InputError

__all__ = ["is_output", "is_special", "outputs_apart", "reserve_output"]


def reserve_output(path: str | Path) -> None:
    """Takes a name for one output: inside `outputs_apart`, another that has it is refused, and nobody reads the file."""
    outputs, place = _OUTPUTS.get(), os.path.realpath(path)
    if outputs is None or is_special(Path(path)):  # of a terminal or a pipe nothing is lost
        return
    if place in outputs:
        raise InputError(f"'{path}' is where this command writes something else. Choose another name.")
    outputs.add(place)


@contextmanager
def outputs_apart() -> Iterator[None]:
    """While entered, a file that `reserve_output` has named is neither read as an input nor written as another output."""
    token = _OUTPUTS.set(set())
    try:
        yield
    finally:
        _OUTPUTS.reset(token)


_OUTPUTS: ContextVar[set[str] | None] = ContextVar("files that a command is to write", default=None)


def is_output(path: Path) -> bool:
    """Whether the command that runs has reserved this file to write to."""
    outputs = _OUTPUTS.get()
    return outputs is not None and os.path.realpath(path) in outputs


def is_special(path: Path) -> bool:
    """Whether the path is a device, a pipe or a socket: written through, not replaced."""
    return os.path.exists(path) and not os.path.isfile(path)
