"""What verbs say things with: consoles, progress bars, tables, JSON and numbers with their units."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.reports.units import format_bytes, format_count, format_part, format_share, format_time, format_usd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.text import Text

    from penstock.cli.fitted import FittedTable

__all__ = [
    "JsonFlag",
    "Ticker",
    "VerboseFlag",
    "err",
    "format_bytes",
    "format_count",
    "format_part",
    "format_share",
    "format_time",
    "format_usd",
    "out",
    "print_error",
    "print_json",
    "print_json_line",
    "progress",
    "say",
    "table",
    "visible",
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one machine-readable object on stdout.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", help="Show every column of every table, below each other where there is no room.")]

_PIPED_WIDTH = 160  # rich assumes 80 columns when there is no terminal, too narrow for a table of plans
_BAR_WIDTH = 16


@cache
def out() -> Console:
    """The console of results: stdout."""
    return _console(stderr=False)


@cache
def err() -> Console:
    """The console of errors, logs and progress: stderr."""
    return _console(stderr=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    class Visible(Console):
        """Shows control characters in what it prints instead of obeying them."""

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(visible(found) if isinstance(found, str) else found for found in objects), **options)

    stream = sys.stderr if stderr else sys.stdout
    piped = not stream.isatty() and "COLUMNS" not in os.environ
    return Visible(stderr=stderr, highlight=False, width=_PIPED_WIDTH if piped else None)


_HIDDEN = [
    *range(0x20), *range(0x7F, 0xA0), *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # bytes of a name that are no text; no stream takes them
]  # fmt: skip
_SHOWN = {code: repr(chr(code))[1:-1] for code in _HIDDEN if chr(code) not in "\n\t"}


def visible(text: str) -> str:
    """Text from files, names and other programs, with what would steer a terminal written out: a colour, a title, text from right to left.

    >>> visible("plan\\x1b[2J")
    'plan\\\\x1b[2J'
    """
    return text.translate(_SHOWN)


_QUOTED, _NO_BREAK = re.compile(r"""(?<![^\s`])'(?:[^']|'"'"')*'"""), "\0"
"""A word in quotes as `shell_words` writes it, and what stands for its blanks while lines are broken: visible text has none of these."""


def say(*lines: str, to: Console | None = None) -> None:
    """Prints sentences on stdout, or `to` another console: wrapped between words on a terminal, and each in one line for other programs,
    which search in them.

    A word that is longer than the terminal, such as a path, stays whole, so that it can be copied, and so does one that a shell takes for
    one because it is in quotes.
    """
    console = to or out()
    for line in map(visible, lines):
        if console.is_terminal:
            indent = " " * (len(line) - len(line.lstrip()))
            line = _QUOTED.sub(lambda found: found[0].replace(" ", _NO_BREAK), line)
            line = fill(line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
            line = line.replace(_NO_BREAK, " ")
        console.print(line, markup=False, soft_wrap=True)


def print_error(message: str) -> None:
    """Says `message` on stderr, unwrapped, so that it can be searched for."""
    from rich.text import Text

    err().print(Text.assemble(("error: ", "bold red"), visible(message)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints `value` as the one JSON object of a `--json` command."""
    print(json.dumps(value, indent=2, allow_nan=False, default=_plain))


def print_json_line(value: Any) -> None:
    """Prints `value` as one of many JSON objects, each in a line of its own, at once: others read while they come."""
    print(json.dumps(value, allow_nan=False, default=_plain), flush=True)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


class Ticker:
    """Moves one progress bar forward."""

    def __init__(self, bar: Progress, description: str, total: float | None) -> None:
        self._bar = bar
        self._task = bar.add_task(visible(description), total=total)

    def advance(self, amount: float = 1) -> None:
        """Counts `amount` more as done."""
        self._bar.advance(self._task, amount)

    def describe(self, description: str) -> None:
        """Changes the text beside the bar."""
        self._bar.update(self._task, description=visible(description))


@contextmanager
def progress(description: str, total: float | None = None, *, quiet: bool = False) -> Iterator[Ticker]:
    """A progress bar on stderr with the time left; with `total` None nobody knows how much there is, and it shows the time so far.

    Without a terminal only the finished bar is printed, and nothing at all if `quiet` (what `--json` commands pass).

    >>> with progress("searching", total=8) as ticker:
    ...     ticker.advance()
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    # Rich would cut a long text; it may take a second line instead.
    text = TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold"))
    columns = [text, BarColumn(bar_width=_BAR_WIDTH), TimeElapsedColumn()]
    if total is not None:
        columns[2:] = [MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")]
    with Progress(*columns, console=err(), disable=quiet and not err().is_terminal) as bar:
        yield Ticker(bar, description, total)


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], *, more: Collection[str] = (), verbose: bool = False
) -> FittedTable:
    """A table to print with `out()`, which never cuts anything: columns named in `more` are left out where a terminal has no room for
    them, unless `verbose`, and others continue below; a column with nothing but `-` is left out. Cells are taken literally, columns of
    numbers are aligned to the right."""
    from penstock.cli.fitted import Column, FittedTable

    cells = [[_cell(value) for value in row] for row in rows]
    found = []
    for index, name in enumerate(columns):
        own = tuple(row[index] for row in cells)
        if not own or any(cell.plain != "-" for cell in own):
            found.append(Column(visible(name), own, is_number=bool(own) and all(map(_is_number, own)), spare=name in more and not verbose))
    return FittedTable(visible(title), tuple(found))


def _cell(value: Any) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text("" if value is None else visible(str(value)))


def _is_number(cell: Text) -> bool:
    return cell.plain.lstrip("-+~$")[:1].isdigit() or cell.plain in ("", "-", "inf")
