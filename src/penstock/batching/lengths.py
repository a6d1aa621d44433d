"""Lengths of one global batch from a CSV file: `sample_id,enc_len,dec_len`, or a column `length` alone."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from penstock.batching.plan import SampleLengths
from penstock.errors import InputError
from penstock.files import read_text, short_repr

__all__ = ["read_lengths"]

MAX_LENGTH = 10**8
"""Tokens of a sample: beyond any model."""
_ID, _LENGTH, _DEC_LENGTH = ("sample_id", "id"), ("enc_len", "length"), ("dec_len", "dec_length")


def read_lengths(path: str | Path) -> list[SampleLengths]:
    """The samples of a file; without ids they are numbered from 0."""
    rows = csv.reader(io.StringIO(read_text(path, "lengths")))
    samples, number = [], 0
    try:
        names = [name.strip() for name in next(rows, [])]
        columns = _columns(names, path)
        for number, row in enumerate(filter(None, rows)):
            usual = (str(number), "", "0")
            values = [default if column is None else row[column] for column, default in zip(columns, usual, strict=True)]
            samples.append(SampleLengths(*map(int, values)))
            if not (1 <= samples[-1].length <= MAX_LENGTH and 0 <= samples[-1].dec_length <= MAX_LENGTH):
                raise InputError(f"lengths '{path}', sample {number + 1}: {short_repr(row)}; 1 to {MAX_LENGTH:,} tokens were expected.")
    except (ValueError, IndexError):
        raise InputError(f"lengths '{path}', sample {number + 1}: {short_repr(row)} does not hold whole numbers.") from None
    except csv.Error as error:
        raise InputError(f"lengths '{path}' are not valid CSV: line {rows.line_num}: {error}.") from None
    if not samples:
        raise InputError(f"lengths '{path}' hold no samples.")
    return samples


def _columns(names: list[str], path: str | Path) -> list[int | None]:
    """Where id, length and decoder's length stand; None: nowhere."""
    found = [next((names.index(name) for name in known if name in names), None) for known in (_ID, _LENGTH, _DEC_LENGTH)]
    if found[1] is None:
        there = short_repr(names) if names else "(none)"
        raise InputError(f"lengths '{path}' have the columns {there}; one of {' or '.join(_LENGTH)} is needed.")
    return found
