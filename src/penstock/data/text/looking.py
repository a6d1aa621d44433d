"""The first pass over JSONL: every line is checked and digested, so that duplicates and splits are known before the second."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.text.cleaning import first_of_equals, split_samples
from penstock.data.text.lines import BadLine, LineFields, LineSpan, read_samples
from penstock.data.workers import Pool, Report, in_order
from penstock.errors import InputError

__all__ = ["Codes", "look"]

Codes = list[list[npt.NDArray[np.uint8]]]
"""For each piece of each file the split code of every sample."""


@dataclass(frozen=True)
class _Seen:
    """The findings of one pass in a piece."""

    digests: npt.NDArray[np.uint64]
    empty: npt.NDArray[np.bool_]
    num_lines: int
    bad: tuple[int, str] | None = None


def _look_at(argument: tuple[LineSpan, LineFields]) -> _Seen:
    piece, fields = argument
    digests, empty, lines = bytearray(), bytearray(), 0
    try:
        for texts in read_samples(piece, fields):
            lines += 1
            if texts is not None:
                digests += hashlib.blake2b("\0".join(texts).encode("utf-8", "surrogatepass"), digest_size=16).digest()
                empty.append(not all(text.strip() for text in texts))
    except BadLine as bad:
        return _Seen(np.zeros((0, 2), np.uint64), np.zeros(0, bool), 0, (bad.number, bad.problem))
    return _Seen(np.frombuffer(bytes(digests), "<u8").reshape(-1, 2), np.frombuffer(bytes(empty), bool), lines)


def look(
    pool: Pool, pieces: list[list[LineSpan]], fields: LineFields, parts: Sequence[float], keep_duplicates: bool,
    counts: Counter[str], report: Report,
) -> Codes:  # fmt: skip
    """Which split each sample goes to, with what was dropped counted."""
    everything = [piece for file in pieces for piece in file]
    done, total, before = 0, sum(piece.stop - piece.start for piece in everything), 0
    seen: list[_Seen] = []
    for piece, found in zip(everything, in_order(pool, _look_at, ((piece, fields) for piece in everything)), strict=True):
        before = 0 if piece.start == 0 else before
        if found.bad:
            raise InputError(f"{piece.path}, line {before + found.bad[0]}: {found.bad[1]}.")
        before += found.num_lines
        seen.append(found)
        done += piece.stop - piece.start
        report("looking", done, total)
    digests = np.concatenate([np.zeros((0, 2), np.uint64), *(found.digests for found in seen)])
    kept = ~np.concatenate([np.zeros(0, bool), *(found.empty for found in seen)])
    counts["read"], counts["empty"], counts["duplicate"] = len(kept), int((~kept).sum()), 0
    if not keep_duplicates:
        fresh = first_of_equals(digests)
        counts["duplicate"] = int((kept & ~fresh).sum())
        kept &= fresh
    if not kept.any():
        raise InputError(f"no sample is left of {counts['read']}: {counts['empty']} are empty, {counts['duplicate']} duplicates.")
    sizes, at = iter([len(found.empty) for found in seen]), 0
    codes = []
    for file in pieces:  # each task is split by itself, so that every split has its share of each
        lengths = [next(sizes) for _ in file]
        own = split_samples(digests[at : at + sum(lengths)], kept[at : at + sum(lengths)], parts)
        codes.append(np.split(own, np.cumsum(lengths)[:-1]) if lengths else [])
        at += sum(lengths)
    return codes
