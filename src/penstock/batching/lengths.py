"""Lengths of one global batch from a CSV file: `sample_id,enc_len,dec_len`, or a column `length` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.batching.plan import SampleLengths
from penstock.errors import InputError
from penstock.files import csv_rows, short_repr

__all__ = ["read_lengths"]

MAX_LENGTH = 10**8
"""Tokens of a sample: beyond any model."""
_ID, _LENGTH, _DEC_LENGTH = ("sample_id", "id"), ("enc_len", "length"), ("dec_len", "dec_length")


def read_lengths(path: str | Path) -> list[SampleLengths]:
    """The samples of a file; without ids they are numbered from 0."""
    rows = csv_rows(path, "lengths")
    columns = _columns([name.strip() for name in next(rows, [])], path)
    lines = [row for row in rows if row]
    if not lines:
        raise InputError(f"lengths '{path}' hold no samples.")
    try:  # column by column: there may be a million
        ids, own, decoder = ([int(row[at]) for row in lines] if at is not None else default(len(lines)) for at, default in columns)
    except (ValueError, IndexError):
        bad = next(number for number, row in enumerate(lines) if not all(_is_whole(row, at) for at, _ in columns))
        raise InputError(f"lengths '{path}', sample {bad + 1}: {short_repr(lines[bad])} does not hold whole numbers.") from None
    if not (min(own) >= 1 and max(own) <= MAX_LENGTH and min(decoder) >= 0 and max(decoder) <= MAX_LENGTH):
        bad = next(number for number, pair in enumerate(zip(own, decoder, strict=True))
                   if not (1 <= pair[0] <= MAX_LENGTH and 0 <= pair[1] <= MAX_LENGTH))  # fmt: skip
        raise InputError(f"lengths '{path}', sample {bad + 1}: {short_repr(lines[bad])}; 1 to {MAX_LENGTH:,} tokens were expected.")
    return list(map(SampleLengths, ids, own, decoder))


def _is_whole(row: list[str], column: int | None) -> bool:
    try:
        return column is None or int(row[column]) is not None
    except (ValueError, IndexError):
        return False


def _columns(names: list[str], path: str | Path) -> list[tuple[int | None, Callable[[int], Sequence[int]]]]:
    """Where id, length and decoder's length stand (None: nowhere), and what a number of samples has without."""
    found = [next((names.index(name) for name in known if name in names), None) for known in (_ID, _LENGTH, _DEC_LENGTH)]
    if found[1] is None:
        there = short_repr(names) if names else "(none)"
        raise InputError(f"lengths '{path}' have the columns {there}; one of {' or '.join(_LENGTH)} is needed.")
    return list(zip(found, (range, range, lambda count: [0] * count), strict=True))
