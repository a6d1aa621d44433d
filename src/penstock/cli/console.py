"""What verbs say things with: consoles, progress bars, tables, JSON and numbers with their units."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

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


def say(*lines: str) -> None:
    """Prints sentences on stdout: wrapped between words on a terminal, and each in one line for other programs, which search in them.

    A word that is longer than the terminal, such as a path, stays whole, so that it can be copied.
    """
    for line in lines:
        shown = visible(line)
        if out().is_terminal:
            shown = fill(shown, out().width, break_long_words=False, break_on_hyphens=False)
        out().print(shown, markup=False, soft_wrap=True)


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


def format_time(time_s: float) -> str:
    """A duration with the unit that suits it: `850 ns`, `12.3 ms`, `1.50 s`, `2 min 05 s`, `3 h 20 min`, `2 d 04 h`."""
    if not math.isfinite(time_s) or time_s == 0:
        return f"{time_s:g} s"
    if time_s < 0:
        return "-" + format_time(-time_s)
    for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if float(f"{time_s / scale:.3g}") < (120 if unit == "s" else 1000):
            return f"{_three_digits(time_s / scale)} {unit}"
    if (seconds := round(time_s)) < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if (minutes := round(time_s / 60)) < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(time_s / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units: `512 B`, `1.5 KiB`, `4.2 GiB`."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size_bytes /= 1024
        if abs(size_bytes) < 1023.95 or unit == "PiB":
            break
    return f"{size_bytes:.1f} {unit}"


def format_count(number: float) -> str:
    """A count: in full below ten thousand, then `12.3 k`, `1.40 M`, `7.00 B`, `1.20 T`."""
    if abs(number) < 10_000 or not math.isfinite(number):
        return f"{number:,.0f}"
    for unit, scale in (("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        if float(f"{abs(number) / scale:.3g}") < 1000 or unit == "T":
            break
    return f"{_three_digits(number / scale)} {unit}"


def format_part(part_bytes: float, whole_bytes: float) -> str:
    """A size of a larger one, with the unit once if both have the same: `63.0 of 79.6 GiB`."""
    part, whole = format_bytes(part_bytes), format_bytes(whole_bytes)
    number, _, unit = part.partition(" ")
    return f"{number if whole.endswith(f' {unit}') else part} of {whole}"


def format_share(share: float) -> str:
    """A share in per cent, as sentences have it: `0.4 %`, `2.1 %`, `47 %`."""
    return f"{share * 100:.{1 if abs(share) < 0.0995 else 0}f} %"


def format_usd(amount_usd: float) -> str:
    """Money: `$0.00123`, `$12.34`, `$1,234`."""
    if amount_usd < 0:
        return "-" + format_usd(-amount_usd)
    if 0 < amount_usd < 0.1:
        return f"${_three_digits(amount_usd)}"
    return f"${amount_usd:,.2f}" if amount_usd < 999.995 else f"${amount_usd:,.0f}"


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent: `1.23`, `12.3`, `123`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
