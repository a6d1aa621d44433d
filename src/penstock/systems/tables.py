"""Reading tables of other planners: CSV rows whose errors name the cell, checked JSON, and ops that only a table describes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from penstock.errors import InputError, near_misses, plural
from penstock.files import csv_rows, describe_validation_error, read_json, short_repr
from penstock.models.ops import Op, Split, TensorSpec
from penstock.models.shapes import Form, Quantity

__all__ = [
    "Count",
    "Row",
    "existing_folder",
    "imported_op",
    "read_checked",
    "read_rows",
    "split_quantity",
    "validated",
]

Record = TypeVar("Record")
Count = Annotated[int, Field(strict=True, ge=1, le=10_000_000)]
"""A field of a plan file that counts something: no size of a model or a cluster is larger."""
_NONE = Quantity()


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a CSV file that knows where it stands."""

    path: Path
    line: int
    cells: Mapping[str, str]

    def text(self, column: str) -> str:
        """A cell that must not be empty."""
        cell = self.cells[column].strip()
        if not cell:
            raise self.error(column, "text")
        return cell

    def number(self, column: str) -> float:
        """A cell that must hold a finite number, zero or more."""
        try:
            value = float(self.cells[column])
        except ValueError:
            raise self.error(column, "a number") from None
        if not math.isfinite(value) or value < 0:
            raise self.error(column, "a finite number, 0 or more")
        return value

    def optional_number(self, column: str) -> float:
        """A number, or NaN for an empty cell."""
        return self.number(column) if self.cells[column].strip() else math.nan

    def count(self, column: str) -> int:
        """A cell that must hold a whole number."""
        value = self.number(column)
        if value != int(value):
            raise self.error(column, "a whole number")
        return int(value)

    def choice(self, column: str, known: Sequence[str]) -> str:
        """A cell that must hold one of a few words."""
        cell = self.text(column)
        if cell not in known:
            raise self.error(column, f"one of {', '.join(known)}")
        return cell

    def error(self, column: str, expected: str) -> InputError:
        """What is wrong with a cell of this row."""
        return InputError(f"table '{self.path}', row {self.line}, column '{column}': expected {expected}, got {self.cells[column]!r}.")


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a CSV file whose header holds at least these columns; the header is row 1."""
    lines = list(csv_rows(path, "table"))
    expected = ",".join(columns)
    if not lines:
        raise InputError(f"table '{path}' is empty; expected the header '{expected}' and rows below it.")
    header = [cell.strip() for cell in lines[0]]
    missing = [column for column in columns if column not in header]
    if missing:
        found = short_repr(",".join(header))
        raise InputError(f"table '{path}', row 1: no column '{missing[0]}'. The header is {found}, expected '{expected}'.")
    rows = []
    for number, cells in enumerate(lines[1:], 2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise InputError(f"table '{path}', row {number}: {plural(len(cells), 'cell')}, the header has {plural(len(header), 'column')}.")
        rows.append(Row(path, number, dict(zip(header, cells, strict=True))))
    if not rows:
        raise InputError(f"table '{path}' has a header but no rows.")
    return rows


def read_checked(path: Path, what: str, kind: type[Record], key: str = "") -> Record:
    """The JSON object in `path`, or its entry `key`, as a value of one kind, checked field by field."""
    value = read_json(path, what)
    if key:
        if not isinstance(value, dict) or key not in value:
            raise InputError(f"{what} '{path}': the entry '{key}' is missing.")
        value = value[key]
    return validated(kind, value, f"{what} '{path}'")


def validated(kind: type[Record], data: object, where: str) -> Record:
    """`data` as a value of one kind, or an error that names the fields; `where` names their origin."""
    if not isinstance(data, dict):
        raise InputError(f"{where} holds {reprlib.repr(data)}; an object was expected.")
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, where)) from None


def existing_folder(folder: str | Path, what: str) -> Path:
    """`folder` as a path, refused with its near misses when there is no such directory."""
    path = Path(folder)
    if path.is_dir():
        return path
    if path.exists():
        raise InputError(f"{what} '{path}' is a file, a directory was expected.")
    beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    hint = f" {near_misses(path.name, beside)}" if beside else ""
    raise InputError(f"{what} '{path}' does not exist.{hint}")


def split_quantity(feature: str, at_tp1: float, at_tp2: float | None) -> Quantity:
    """The amount per rank that is `at_tp1` undivided and `at_tp2` on each of two ranks."""
    split = at_tp1 if at_tp2 is None else min(max(2 * (at_tp1 - at_tp2), 0.0), at_tp1)
    return Quantity(whole=Form.of(**{feature: at_tp1 - split}), split=Form.of(**{feature: split}))


def imported_op(
    name: str, table: str, row: str, carry: Iterable[TensorSpec], *, parameters: Quantity, kept: Quantity,
    workspace: Quantity = _NONE, backward_workspace: Quantity = _NONE, num_algos: int = 1, tp_limit: int, tied_to: str,
) -> Op:  # fmt: skip
    """An op that only a table describes: it can be planned with, not trained."""
    return Op(
        name, "imported", {"table": table, "op": row}, tuple(carry), parameters=parameters, workspace=workspace,
        backward_workspace=backward_workspace, splits=(Split(kept=kept),) * num_algos, tp_limit=tp_limit, tied_to=tied_to,
    )  # fmt: skip
