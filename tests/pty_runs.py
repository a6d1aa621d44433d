"""Commands on a real terminal of a given width, and what a person would see there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from rich.cells import cell_len

from penstock.cli import console
from penstock.cli.main import run

__all__ = ["cut_lines", "on_terminal", "screen_lines"]

_SETTING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours, and what a progress bar moves the cursor by."""


def on_terminal(arguments: Sequence[str], columns: int) -> tuple[int, str]:
    """The status of `penstock ARGUMENTS` with a terminal of so many columns for its three streams, and everything that it wrote there.

    It runs in this process, which has the compiled loops already.
    """
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    said, ended = bytearray(), threading.Event()
    reader = threading.Thread(target=_read_all, args=(outer, said, ended))
    reader.start()
    with _streams_on(inner):
        os.close(inner)
        status = run(arguments)
    ended.set()
    reader.join()
    os.close(outer)
    return status, said.decode("utf-8")


def _read_all(terminal: int, said: bytearray, ended: threading.Event) -> None:
    """Until the command has ended and nothing is left; processes that it started may keep the terminal open."""
    while True:
        last = ended.is_set()
        if select.select([terminal], [], [], 0 if last else 0.05)[0]:
            try:
                said += os.read(terminal, 65536)
            except OSError:  # what a terminal that nobody has open answers
                return
        elif last:
            return


@contextmanager
def _streams_on(terminal: int) -> Iterator[None]:
    """Puts a terminal in the place of stdin, stdout and stderr."""
    kept = [os.dup(number) for number in range(3)]
    streams = [open(os.dup(terminal), "w", encoding="utf-8") for _ in range(2)]  # noqa: SIM115
    for number in range(3):
        os.dup2(terminal, number)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")} | {"TERM": "xterm"}
    try:
        with mock.patch.object(sys, "stdout", streams[0]), mock.patch.object(sys, "stderr", streams[1]), \
             mock.patch.dict(os.environ, environment, clear=True):  # fmt: skip
            _forget_consoles()
            yield
    finally:
        for stream in streams:
            stream.close()
        for number, own in enumerate(kept):
            os.dup2(own, number)
            os.close(own)
        _forget_consoles()


def _forget_consoles() -> None:
    console.out.cache_clear()
    console.err.cache_clear()


def screen_lines(said: str) -> list[str]:
    """The lines of what was written to a terminal, without colours; a line written over another is a line of its own."""
    return [line.rstrip() for line in re.split(r"[\r\n]+", _SETTING.sub("", said))]


def cut_lines(said: str, columns: int) -> list[str]:
    """Lines in which something was cut, or that are wider than the terminal, though no single word of them is."""
    lines = screen_lines(said)
    return [line for line in lines if "…" in line or (cell_len(line) > columns and all(cell_len(word) < columns for word in line.split()))]
