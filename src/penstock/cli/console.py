"""What verbs say things with: consoles, progress bars, tables, JSON and numbers with their units."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.reports.units import format_bytes, format_count, format_time, format_usd

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "JsonFlag",
    "Ticker",
    "err",
    "format_bytes",
    "format_count",
    "format_time",
    "format_usd",
    "out",
    "print_error",
    "print_json",
    "progress",
    "table",
    "visible",
]

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one machine-readable object on stdout.")]

_PIPED_WIDTH = 160  # rich assumes 80 columns when there is no terminal, too narrow for a table of plans


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


def print_error(message: str) -> None:
    """Says `message` on stderr, unwrapped, so that it can be searched for."""
    from rich.text import Text

    err().print(Text.assemble(("error: ", "bold red"), visible(message)), soft_wrap=True)


def print_json(value: Any) -> None:
    """Prints `value` as the one JSON object of a `--json` command."""
    print(json.dumps(value, indent=2, allow_nan=False, default=_plain))


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

    columns = [TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()]
    if total is not None:
        columns[2:] = [MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("so far,"), TimeRemainingColumn(), TextColumn("left")]
    with Progress(*columns, console=err(), disable=quiet and not err().is_terminal) as bar:
        yield Ticker(bar, description, total)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """A table to print with `out()`; cells are taken literally, columns of numbers are aligned to the right."""
    from rich import box
    from rich.table import Table

    cells = [[_cell(value) for value in row] for row in rows]
    result = Table(title=visible(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
        result.add_column(name, justify="right" if numeric else "left")
    for row in cells:
        result.add_row(*row)
    return result


def _cell(value: Any) -> Text:
    from rich.text import Text

    return value if isinstance(value, Text) else Text("" if value is None else visible(str(value)))


def _is_number(cell: Text) -> bool:
    return cell.plain.lstrip("-+~$")[:1].isdigit() or cell.plain in ("", "-", "inf")
