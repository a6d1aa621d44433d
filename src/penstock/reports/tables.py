"""Every block of a report as a CSV file with the numbers that the page shows."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import count as counted
from typing import TYPE_CHECKING, Any

from penstock.files import csv_text
from penstock.reports.blocks import Block, Charts, Facts, Heat, Scatter, Spans, Stack, Table

if TYPE_CHECKING:
    from penstock.reports.report import Report

__all__ = ["slug", "table_of", "tables_of"]

_LETTERS = 60
Rows = tuple[Sequence[str], Sequence[Sequence[Any]]]


def tables_of(report: Report) -> dict[str, str]:
    """CSV texts by the name of their file."""
    found: dict[str, str] = {}
    for subject, view in report.views:
        for block in view.blocks:
            if (table := table_of(block)) is not None:
                title = getattr(block, "title", view.title)
                found[_free(f"{slug(subject)}-{slug(f'{view.name} {title}')}.csv".lstrip("-"), found)] = csv_text(*table)
    return found


def slug(text: str) -> str:
    """A name that is a file inside its folder on any system."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:_LETTERS].strip("-")


def _free(name: str, taken: dict[str, str]) -> str:
    stem = name.removesuffix(".csv")
    return next(one for one in (f"{stem}.csv", *(f"{stem}.{n}.csv" for n in counted(2))) if one not in taken) if name in taken else name


def table_of(block: Block) -> Rows | None:
    """Columns and rows of a block; None where it has no numbers."""
    match block:
        case Facts(facts):
            return ("what", "value", "note"), [(fact.label, _plain(fact.value), fact.note) for fact in facts]
        case Table():
            return block.columns, [[_plain(value) for value in row] for row in block.rows]
        case Stack():
            limits = [[limit] for limit in block.limits] or [list[float]() for _ in block.rows]
            bars = [[name, *map(_plain, own), *limit] for name, own, limit in zip(block.rows, block.values, limits, strict=True)]
            return ("row", *block.parts, *(("limit",) if block.limits else ())), bars
        case Charts():
            curves = [curve for chart in block.charts for curve in chart]
            points = zip(block.x.tolist(), *(curve.values.tolist() for curve in curves), strict=True)
            return (block.x_name, *(curve.name for curve in curves)), [[_plain(value) for value in point] for point in points]
        case Scatter():
            return ("name", *block.columns), [(name, *row) for name, row in zip(block.names, block.rows, strict=True)]
        case Heat():
            heads = ("row", *(f"{block.x_name} {x}" for x in block.x.tolist()))
            return heads, [(name, *map(_plain, own)) for name, own in zip(block.rows, block.values.tolist(), strict=True)]
        case Spans():
            return ("row", "role", "kind", "stage", "micro-batch", "start_ns", "length_ns"), list(_spans(block))
        case _:
            return None


def _spans(block: Spans) -> Iterator[tuple[Any, ...]]:
    times = block.gap_ns * block.tick_ns, block.length_ns * block.tick_ns
    columns = [one.tolist() for one in (*times, block.kind, block.stage, block.micro_batch)]
    for lane in block.lanes:
        time = lane.begin_ns
        for gap, length, kind, stage, micro_batch in zip(*(one[lane.first : lane.first + lane.count] for one in columns), strict=True):
            time += gap
            yield lane.name, lane.role, block.kinds[kind].name, stage, micro_batch, time, length
            time += length


def _plain(value: Any) -> Any:
    """The value; None in place of a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
