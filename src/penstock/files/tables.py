"""Tables as CSV: any text in a cell when read, nothing that a spreadsheet takes for a formula when written."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files.reading import MAX_TEXT_BYTES, decoded_exactly, readable_bytes

__all__ = ["csv_rows", "csv_text"]


def csv_rows(path: str | Path, what: str, delimiter: str = ",") -> Iterator[list[str]]:
    """The rows of a CSV file, blank lines as empty ones; a cell may hold any text, line ends too, of any length."""
    csv.field_size_limit(MAX_TEXT_BYTES)  # 128 KiB otherwise
    text = decoded_exactly(readable_bytes(path, what, MAX_TEXT_BYTES), path, what)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{what} '{path}', line {reader.line_num}: not valid CSV: {error}.") from None


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV, in which no text begins what a spreadsheet would take for a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(_no_formula, columns))
    writer.writerows([_no_formula(value) for value in row] for row in rows)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    """An apostrophe before what begins a formula; numbers stay numbers, the negative ones too."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@") else value
