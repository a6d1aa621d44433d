"""The views of a search and of a choice of nodes: candidates and why each lost, the bound over time, time against money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.errors import InputError, plural
from penstock.reports.blocks import Block, ChartLine, Charts, Scatter, Table, Text, View, as_array
from penstock.reports.units import format_time

__all__ = ["pareto_views", "search_views"]

_CHOICE = (
    ("schedule", "text"), ("pp", "number"), ("tp", "text"), ("dp", "text"), ("replicas", "number"), ("micro_batch", "number"),
    ("recompute", "text"), ("zero", "number"), ("time_s", "time"), ("tokens_per_s", "count"), ("mfu", "share"), ("peak_bytes", "bytes"),
    ("price_usd", "usd"),
)  # fmt: skip
"""Fields of a choice that are shown, with their units."""
_MOST = 1e30
"""Seconds, bytes and money: beyond it sums are no longer finite."""
_AXES = (("hours", "number"), ("usd", "usd"), ("devices", "number"), ("peak_bytes", "bytes"), ("time_s", "time"))


def _columns(names: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    words = {"time_s": "iteration", "tokens_per_s": "tokens/s", "mfu": "MFU", "peak_bytes": "peak memory", "price_usd": "USD", "usd": "USD"}
    return tuple(words.get(name, name.replace("_", "-")) for name, _ in names)


def search_views(record: Mapping[str, Any], where: str, opens: Mapping[str, int]) -> list[View]:
    """Candidates and Bound; `opens` has the number of the subject that each plan file is."""
    try:
        candidates, baselines, best_s = record["candidates"], record["baselines"], record["candidates"][0]["time_s"]
        shown = [column for column in _CHOICE if any(one.get(column[0]) is not None for one in candidates)]
        rows = [
            (one["file"], *(_value(one.get(name)) for name, _ in shown), one["slower"], _because(one["slower"], one["because"]))
            for one in candidates
        ]  # fmt: skip
        rows += [
            (one["name"], *(_value((one["plan"] or {}).get(name)) for name, _ in shown),
             None if one["plan"] is None else one["plan"]["time_s"] / best_s - 1,
             "does not fit" if one["plan"] is None else f"only {one['space']}")
            for one in baselines
        ]  # fmt: skip
        table = Table(
            "plans that were found, against the first, and what simpler searches find", ("plan", *_columns(shown), "loses by", "because"),
            ("text", *(unit for _, unit in shown), "share", "text"), tuple(rows),
            (*(opens.get(one["file"]) for one in candidates), *(None for _ in baselines)),
        )  # fmt: skip
        return [View("candidates", "Candidates", [table]), View("bound", "Bound", _bound(record))]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise InputError(f"search record '{where}' lacks or mistakes {error}. Write it again with `penstock search --out`.") from None


def _value(value: Any) -> Any:
    return value if isinstance(value, str | int | float) or value is None else str(value)


def _because(slower: float, parts: Sequence[Mapping[str, Any]]) -> str:
    """The largest losses in words; a faster plan stands behind the first only where that is simpler, and costs cannot tell them apart."""
    if slower < 0:
        return "faster by less than the costs' error, and less simple"
    worse = [f"{part['part']} takes {format_time(part['longer_s'])} more" for part in parts if part["longer_s"] > 0]
    return ", ".join(worse[:2]) or "-"


def _bound(record: Mapping[str, Any]) -> list[Block]:
    points = record["progress"]
    bound_s, formula_s, gap = (_given(record, name) for name in ("bound_s", "formula_s", "gap"))
    blocks: list[Block] = [Text(
        f"By formula no such plan takes less than {format_time(bound_s)}; the best found takes {format_time(formula_s)}, at most "
        f"{gap:.1%} more than the best possible."
        + (f" The search was stopped: {record['stopped']}." if record["stopped"] else "")
    )]  # fmt: skip
    if points:
        curves = (
            ChartLine("best plan so far", "time", as_array(_number(one["best_s"]) for one in points)),
            ChartLine("bound so far", "time", as_array(_number(one["bound_s"]) for one in points)),
        )
        x = np.array([round(1e6 * _given(one, "after_s")) for one in points], np.int64)
        blocks.append(Charts("best and bound over the time of the search", "µs", x, (curves,), steps=True))
    rows = tuple(
        (one["replicas"], one["micro_batch"], one["max_stages"], ", ".join(map(str, one["devices_of_a_stage"])), one["by_ops_s"],
         one["by_stages_s"], one["bound_s"])
        for one in record["families"]
    )  # fmt: skip
    columns = ("replicas", "micro-batch", "stages up to", "devices of a stage", "by ops", "by whole stages", "bound")
    units = ("number", "number", "number", "text", "time", "time", "time")
    return [*blocks, Table("parts of the space, the weakest bound first", columns, units, rows)]


def pareto_views(record: Mapping[str, Any], where: str, opens: Mapping[str, int]) -> list[View]:
    """Time against money, or any two of what choices of nodes differ in."""
    try:
        choices, left = record["choices"], record["left_out"]
        scatter = Scatter(
            f"choices of nodes from {record['cluster']}, for {plural(record['steps'], 'iteration')}", _columns(_AXES),
            tuple(unit for _, unit in _AXES), tuple(str(one["cluster"]) for one in choices),
            tuple(tuple(_number(one.get(name)) for name, _ in _AXES) for one in choices),
            tuple(opens.get(str(one.get("file"))) for one in choices),
        )  # fmt: skip
        rows = tuple(
            (one["cluster"], *(_value(one.get(name)) for name, _ in (*_AXES[:3], *_CHOICE)), one["dominated_by"] or "-") for one in choices
        )
        shown = Table("choices", ("nodes", *_columns((*_AXES[:3], *_CHOICE)), "beaten by"),
                      ("text", *(unit for _, unit in (*_AXES[:3], *_CHOICE)), "text"), rows, scatter.opens)  # fmt: skip
        missing = Table("left out", ("nodes", "because"), ("text", "text"), tuple((one["cluster"], one["reason"]) for one in left))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"'{where}' lacks or mistakes {error}. Write it again with `penstock pareto --out`.") from None
    return [View("pareto", "Pareto", [scatter, shown, *([missing] if left else [])])]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) <= _MOST else None


def _given(record: Mapping[str, Any], name: str) -> float:
    """A number that the record has to hold."""
    number = _number(record[name])
    if number is None:
        raise TypeError(f"'{name}'")
    return number
