"""Aceso's measurements of collectives and of messages between two GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, plural
from penstock.files import read_text
from penstock.systems.tables import read_rows

__all__ = ["MB", "SENTINELS", "CollectiveTables", "MessageTable", "collective_files", "read_messages"]

MB = 2**20
SENTINELS = (1e6, 1e7, 1e9)
"""Written where Aceso could not measure; compared exactly, since a real backward pass can take more than 1e6 microseconds."""

_NAME = re.compile(r"prim_(?P<table>.+)_(?P<kind>all_gather|all_reduce|reduce_scatter|all_to_all)_(?P<gpus>\d+)gpus\.csv")
@dataclass(frozen=True)
class MessageTable:
    """Bandwidth between two GPUs by message size."""

    size_mb: Floats
    gb_per_s: Floats
    """As in the file; 1 GB is 1024 MB there."""

    def exact_us(self, megabytes: float) -> float:
        """Time as Aceso's own model has it: one power of two below the message, and 1 GB/s taken as 0.001 MB/us."""
        if megabytes <= 0:
            return 0.0
        index = int(math.log(megabytes, 2))
        index = min(index - 1 if index >= 1 else index, len(self.gb_per_s) - 1)
        return megabytes / (float(self.gb_per_s[index]) * 1e-3)

    def each_us(self, megabytes: Floats) -> Floats:
        """Microseconds of many messages, few of which differ in size."""
        sizes, which = np.unique(megabytes, return_inverse=True)
        return np.array([self.exact_us(size) for size in sizes.tolist()])[which].reshape(megabytes.shape)


def read_messages(path: Path) -> MessageTable:
    """Row 1 holds sizes in MB, row 2 bandwidths in GB/s."""
    lines = [line for line in read_text(path, "table").splitlines() if line.strip()]
    if len(lines) != 2:
        raise InputError(f"table '{path}' has {plural(len(lines), 'row')}, expected two: message sizes in MB, then GB/s.")
    size_mb, gb_per_s = (_numbers(path, number, line) for number, line in enumerate(lines, 1))
    if len(size_mb) != len(gb_per_s):
        raise InputError(f"table '{path}': {len(size_mb)} sizes in row 1 but {len(gb_per_s)} bandwidths in row 2.")
    if np.any(np.diff(size_mb) <= 0):
        raise InputError(f"table '{path}', row 1: sizes must rise, got '{lines[0]}'.")
    return MessageTable(size_mb, gb_per_s)


def _numbers(path: Path, row: int, line: str) -> Floats:
    values = []
    for column, cell in enumerate(line.split(","), 1):
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"table '{path}', row {row}, column {column}: expected a number above 0, got {cell.strip()!r}.")
        values.append(value)
    return np.array(values)


def collective_files(folder: Path) -> dict[tuple[str, str, int], Path]:
    """The collective tables of a folder by (op table, kind, number of GPUs)."""
    found = ((_NAME.fullmatch(path.name), path) for path in sorted(folder.glob("prim_*.csv")))
    return {(match["table"], match["kind"], int(match["gpus"])): path for match, path in found if match}


class CollectiveTables:
    """The collective tables of a folder, read when first asked for."""

    def __init__(self, files: Mapping[tuple[str, str, int], Path]) -> None:
        self._files = files
        self._raw: dict[tuple[str, str, int], dict[int, float]] = {}
        self._curves: dict[tuple[str, int], tuple[Floats, Floats] | None] = {}

    def raw(self, table: str, kind: str, num_gpus: int) -> dict[int, float]:
        """Milliseconds by integer MB, sentinels included; empty where there is no such file."""
        key = (table, kind, num_gpus)
        if key not in self._raw:
            rows = read_rows(self._files[key], ("data_size(MB)", "time(ms)")) if key in self._files else []
            self._raw[key] = {row.count("data_size(MB)"): row.number("time(ms)") for row in rows}
        return self._raw[key]

    def exact_ms(self, table: str, kind: str, num_gpus: int, megabytes: float) -> float | None:
        """The lookup as Aceso does it: the size without decimals, then one less, else nothing."""
        known = self.raw(table, kind, num_gpus)
        for size in (megabytes, megabytes - 1):
            if (key := int(f"{size:.0f}")) in known:
                return known[key]
        return None
