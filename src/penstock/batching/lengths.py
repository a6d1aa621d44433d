"""Lengths of one global batch from a CSV file: `sample_id,enc_len,dec_len`, or a column `length` alone."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from penstock.batching.plan import SampleLengths
from penstock.errors import InputError
from penstock.files import read_text

__all__ = ["read_lengths"]

_ID, _LENGTH, _DEC_LENGTH = ("sample_id", "id"), ("enc_len", "length"), ("dec_len", "dec_length")


def read_lengths(path: str | Path) -> list[SampleLengths]:
    """The samples of a file; without ids they are numbered from 0."""
    rows = csv.DictReader(io.StringIO(read_text(path, "lengths")))
    names = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = names
    length = next((name for name in _LENGTH if name in names), None)
    if length is None:
        raise InputError(f"lengths '{path}' have the columns {', '.join(names) or '(none)'}; one of {' or '.join(_LENGTH)} is needed.")
    id_name, dec_name = (next((name for name in known if name in names), "") for known in (_ID, _DEC_LENGTH))
    samples = []
    for number, row in enumerate(rows):
        values = [row.get(name) if name else default for name, default in ((id_name, str(number)), (length, ""), (dec_name, "0"))]
        try:
            samples.append(SampleLengths(*(int(value or "") for value in values)))
        except ValueError:
            raise InputError(f"lengths '{path}', line {number + 2}: {dict(row)} does not hold whole numbers.") from None
    if not samples:
        raise InputError(f"lengths '{path}' hold no samples.")
    return samples
