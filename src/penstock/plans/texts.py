"""Short texts for ranks ('0-3,8', ends included), ops ('0:49', the end not included, as in a Python slice) and repeated counts."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.errors import InputError, plural

if TYPE_CHECKING:
    from penstock.models.ops import Model, PlacedOp

__all__ = [
    "OPS_PATTERN", "OP_RANGE_PATTERN", "RANKS_PATTERN", "described_ops", "format_counts", "format_ops", "format_ranks", "parse_op_range",
    "parse_ops", "parse_ranks",
]  # fmt: skip

_NUMBER = "[0-9]{1,7}"
_SLICE = f"{_NUMBER}:{_NUMBER}"
RANKS_PATTERN = f"^{_NUMBER}(-{_NUMBER})?(,{_NUMBER}(-{_NUMBER})?)*$"
OP_RANGE_PATTERN = f"^{_SLICE}$"
OPS_PATTERN = f"^({_SLICE}(,{_SLICE})*)?$"

_MAX_RANKS = 1_000_000
_MAX_DESCRIBED = 4
"""Runs of layers that are described one by one."""


def parse_ranks(text: object) -> tuple[int, ...]:
    """The ranks of a text such as '0-3,8', in the order given."""
    parts = _matching(text, RANKS_PATTERN, "ranks such as '0-3,8'").split(",")
    ranks: list[int] = []
    for part in parts:
        first, _, last = part.partition("-")
        start, stop = int(first), int(last or first) + 1
        if stop <= start:
            raise InputError(f"'{part}' runs backwards; write the smaller rank first")
        if len(ranks) + stop - start > _MAX_RANKS:
            raise InputError(f"this is more than {_MAX_RANKS} ranks")
        ranks.extend(range(start, stop))
    return tuple(ranks)


def format_ranks(ranks: Iterable[int]) -> str:
    """The shortest text that `parse_ranks` reads back as these ranks."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def format_counts(counts: Iterable[int]) -> str:
    """How often each number comes in a row: '2 × 12 + 1 × 4' for 12, 12, 4."""
    return " + ".join(f"{len(list(run))} × {count}" for count, run in groupby(counts))


def parse_op_range(text: object) -> tuple[int, int]:
    """The ops of a text such as '0:49': from 0 up to, but without, 49."""
    first, _, last = _matching(text, OP_RANGE_PATTERN, "ops FIRST:END such as '0:49'").partition(":")
    return int(first), int(last)


def parse_ops(text: object) -> tuple[tuple[int, int], ...]:
    """The op ranges of a text such as '1:9,9:17'; none of an empty text."""
    found = _matching(text, OPS_PATTERN, "ops FIRST:END, several joined by commas, such as '1:9,9:17'")
    return tuple(parse_op_range(part) for part in found.split(",")) if found else ()


def format_ops(*ranges: tuple[int, int]) -> str:
    """The text of op ranges."""
    return ",".join(f"{first}:{last}" for first, last in ranges)


def described_ops(model: Model, indices: Iterable[int]) -> str:
    """Ops in the words of their model: 'layers 3–19: attention', 'layers 0–23', 'layers 2–4: all but down; head: norm'."""
    wanted = sorted(indices)
    sizes = {block.name: len(block.ops) for block, _ in model.runs}
    copies = [(key, [placed.op.name for placed in run]) for key, run in groupby((model.ops[index] for index in wanted), key=_copy_of)]
    parts: list[str] = []
    described = 0
    # Copies of a block in a row, of which the same ops are meant, are one part.
    for (block, _, names), same in groupby(enumerate(copies), key=lambda one: (one[1][0][0], one[1][0][1] - one[0], tuple(one[1][1]))):
        numbers = [copy for _, ((_, copy), _) in same]
        if len(parts) == _MAX_DESCRIBED:
            return f"{'; '.join(parts)}; {plural(len(wanted) - described, 'more op')}"
        described += len(numbers) * len(names)
        parts.append(_described(model, block, sizes[block], numbers, names))
    return "; ".join(parts)


def _copy_of(placed: PlacedOp) -> tuple[str, int]:
    return placed.block, placed.copy


def _described(model: Model, block: str, size: int, copies: list[int], names: tuple[str, ...]) -> str:
    """Some ops of some copies of a block."""
    place = block
    if sum(count for one, count in model.runs if one.name == block) > 1:
        place += f" {copies[0]}" if len(copies) == 1 else f" {copies[0]}–{copies[-1]}"
    if len(names) == size:
        return place
    own = next(one for one, _ in model.runs if one.name == block and len(one.ops) == size)
    others = [op.name for op in own.ops if op.name not in names]
    return f"{place}: {', '.join(names)}" if len(names) <= len(others) else f"{place}: all but {', '.join(others)}"


def _matching(text: object, pattern: str, expected: str) -> str:
    if not isinstance(text, str) or not re.fullmatch(pattern, text):
        raise InputError(f"{reprlib.repr(text)} was given, {expected} was expected")
    return text
