"""What the readers share: tables whose errors name the cell, and cost arrays that start out infinite."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from penstock.costs.table import CostTable, Floats
from penstock.errors import InputError, near_misses
from penstock.files import describe_validation_error, read_json, read_text
from penstock.models.ops import Model, Op, Split, TensorSpec
from penstock.models.shapes import Form, Quantity, Shape

if TYPE_CHECKING:
    from penstock.clusters import Cluster

__all__ = [
    "Costs",
    "Row",
    "device_names",
    "distinct_chain",
    "existing_folder",
    "imported_op",
    "read_checked",
    "read_rows",
    "ring_time_s",
    "same_node",
    "split_quantity",
]

Record = TypeVar("Record")
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
    lines = list(csv.reader(io.StringIO(read_text(path, "table"))))
    expected = ",".join(columns)
    if not lines:
        raise InputError(f"table '{path}' is empty; expected the header '{expected}' and rows below it.")
    header = [cell.strip() for cell in lines[0]]
    missing = [column for column in columns if column not in header]
    if missing:
        raise InputError(f"table '{path}', row 1: no column '{missing[0]}'. The header is '{','.join(header)}', expected '{expected}'.")
    rows = []
    for number, cells in enumerate(lines[1:], 2):
        if not cells:
            continue
        if len(cells) != len(header):
            raise InputError(f"table '{path}', row {number}: {len(cells)} cells, the header has {len(header)} columns.")
        rows.append(Row(path, number, dict(zip(header, cells, strict=True))))
    if not rows:
        raise InputError(f"table '{path}' has a header but no rows.")
    return rows


def read_checked(path: Path, what: str, kind: type[Record], key: str = "") -> Record:
    """The JSON value in `path`, or its entry `key`, as a value of one kind, checked field by field."""
    from pydantic import TypeAdapter, ValidationError

    value = read_json(path, what)
    if key:
        if not isinstance(value, dict) or key not in value:
            raise InputError(f"{what} '{path}': the entry '{key}' is missing.")
        value = value[key]
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(describe_validation_error(error, f"{what} '{path}'")) from None


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
    name: str, table: str, row: str, carry: Iterable[TensorSpec], *, parameters: Quantity, kept: Quantity = _NONE,
    workspace: Quantity = _NONE, backward_workspace: Quantity = _NONE, num_algos: int = 1, tp_limit: int = 0, tied_to: str = "",
) -> Op:  # fmt: skip
    """An op that only a table describes: it can be planned with, not trained."""
    return Op(
        name, "imported", {"table": table, "op": row}, tuple(carry), parameters=parameters, workspace=workspace,
        backward_workspace=backward_workspace, splits=(Split(kept=kept),) * num_algos, tp_limit=tp_limit, tied_to=tied_to,
    )  # fmt: skip


def distinct_chain(model: Model) -> tuple[tuple[str, ...], np.ndarray[Any, np.dtype[np.int32]]]:
    """The rows of a model's distinct ops, and for each position of the chain which of them it is."""
    index = {op.signature: number for number, op in enumerate(model.distinct_ops)}
    return tuple(str(op.config["op"]) for op in model.distinct_ops), np.array([index[p.op.signature] for p in model.ops], dtype=np.int32)


class Costs:
    """The arrays of a cost table while it is filled: times infinite until given, everything else zero."""

    def __init__(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], algos: Sequence[int], devices: Sequence[str]) -> None:
        self.op_names, self.chain = distinct_chain(model)
        self.shapes, self.tps, self.algos, self.devices = tuple(shapes), tuple(tps), tuple(algos), tuple(devices)
        size = (len(self.op_names), len(self.shapes), len(self.tps), len(self.algos))
        self.forward_s: Floats = np.full((*size, len(self.devices)), np.inf)
        self.backward_s: Floats = np.full_like(self.forward_s, np.inf)
        self.parameters: Floats = np.zeros((size[0], *size[2:]))
        self.kept_bytes: Floats = np.zeros(size)
        self.workspace_bytes: Floats = np.zeros(size)
        self.backward_workspace_bytes: Floats = np.zeros(size)
        self.input_bytes: Floats = np.zeros(size)
        self.output_bytes: Floats = np.zeros(size)

    def table(self) -> CostTable:
        """The filled table; imported tables hold tensor-parallel collectives in the ops' own times."""
        comm = np.zeros_like(self.forward_s)
        return CostTable(forward_comm_s=comm, backward_comm_s=comm, **vars(self))


def device_names(cluster: Cluster | None, usual: Sequence[str]) -> tuple[str, ...]:
    """Names of the cluster's device kinds, or the `usual` ones without a cluster."""
    return tuple(device.name for device, _ in cluster.kinds) if cluster is not None else tuple(usual)


def same_node(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether all ranks sit in one machine."""
    return len({cluster.node_index(rank) for rank in ranks}) <= 1


def ring_time_s(kind: str, size_bytes: float, num_ranks: int, bandwidth_bytes_per_s: float) -> float:
    """A collective as a ring would run it, without latency: what planners assume where nothing was measured."""
    if num_ranks <= 1:
        return 0.0
    rounds = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0 / num_ranks}
    if kind == "broadcast":
        return size_bytes / bandwidth_bytes_per_s
    if kind not in rounds:
        raise InputError(f"collective '{kind}' is not known. {near_misses(kind, [*rounds, 'broadcast'])}")
    return rounds[kind] * (num_ranks - 1) / num_ranks * size_bytes / bandwidth_bytes_per_s
