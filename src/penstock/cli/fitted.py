"""Tables that fit their terminal without cutting: text wraps, what can be spared is left out, and what is left continues below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["Column", "FittedTable"]

_GAP, _MARGIN, _WRAPPED = 2, 2, 16
"""Between columns; free at the right; a column that is wider than this may be made narrower."""


@dataclass(frozen=True)
class Column:
    """A column with its cells."""

    name: str
    cells: tuple[Text, ...]
    is_number: bool
    spare: bool = False
    """Whether it is left out where there is no room for it."""

    @property
    def width(self) -> int:
        """The width of its longest cell, on one line."""
        from rich.cells import cell_len

        return max(cell_len(self.name), *(cell.cell_len for cell in self.cells), 1)

    @property
    def least(self) -> int:
        """The least width in which no word is broken, and that is still readable."""
        from rich.cells import cell_len

        words = [word for cell in self.cells for word in cell.plain.split()]
        return max(min(self.width, _WRAPPED), *(cell_len(word) for word in (*words, *self.name.split())), 1)


@dataclass(frozen=True)
class FittedTable:
    """Something for rich to print; how wide it may be is known only then."""

    title: str
    columns: tuple[Column, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        from rich.text import Text

        room = max(1, options.max_width - _MARGIN)
        if self.title:
            yield Text(self.title, style="italic", overflow="fold")
        for page in _pages(_chosen(self.columns, room), room):
            yield _drawn(page, room)
            yield Text()


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _chosen(columns: Sequence[Column], room: int) -> list[Column]:
    """All but the spare ones, and of those, in order, all that still fit beside the others."""
    chosen = {index: column.width for index, column in enumerate(columns) if not column.spare}
    for index, column in enumerate(columns):
        if column.spare and _taken([*chosen.values(), column.width]) > room:
            break
        chosen[index] = column.width
    return [columns[index] for index in sorted(chosen)]


def _pages(columns: Sequence[Column], room: int) -> Iterator[list[Column]]:
    """The columns in as many tables as they need, each of which begins with the first column."""
    if not columns:
        return
    key, *others = columns
    page = [key]
    for column in others:
        if len(page) > 1 and _taken([*(other.least for other in page), column.least]) > room:
            yield page
            page = [key]
        page.append(column)
    yield page


def _drawn(columns: Sequence[Column], room: int) -> Table:
    """The table, with the room that is left given to columns whose text would have to wrap."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    widths = [column.least for column in columns]
    for index, column in enumerate(columns):
        widths[index] += max(0, min(column.width - column.least, room - _taken(widths)))
    for column, width in zip(columns, widths, strict=True):
        result.add_column(column.name, justify="right" if column.is_number else "left", width=width, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        result.add_row(*cells)
    return result
