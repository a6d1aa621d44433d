"""Draws a figure with matplotlib: bars side by side, lines, or points; published values hatched or dashed."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import Any, Literal

from penstock.reproduce.figures import Drawing, Plotted

__all__ = ["drawn"]

_LINE = 80
"""Letters of usual size below the axes."""
_MOST_TICKS = 12
_FEW_DECADES = 300.0
"""Within this ratio a logarithmic axis has more labels than powers of ten."""


def drawn(title: str, drawing: Drawing, form: Literal["svg", "png"]) -> bytes:
    """The figure as a file; the same drawing gives the same bytes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "penstock", "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        if drawing.kind == "bars":
            _draw_bars(axes, drawing.curves)
        else:
            _draw_lines(axes, drawing.curves, joined=drawing.kind == "lines")
        axes.set(xlabel=drawing.x_title, ylabel=f"{drawing.y_title} (log scale)" if drawing.log_y else drawing.y_title)
        axes.set_title(f"{title}\n{_origin(drawing)}" if _origin(drawing) else title, fontsize=11, wrap=True)
        if drawing.log_x:
            axes.set_xscale("log", base=2)
        if drawing.log_y:
            axes.set_yscale("log")
        _label_ticks(axes, drawing)
        if drawing.diagonal:
            axes.axline((0, 0), slope=1, color="0.6", lw=1, zorder=0, label="equal")
        labels = axes.get_legend_handles_labels()[1]
        figure.legend(loc="outside lower center", ncols=3 if max(map(len, labels)) < 40 else 2, fontsize=8, frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format=form, dpi=110, metadata={"Date": None} if form == "svg" else {"Software": None})
    return file.getvalue()


def _draw_bars(axes: Any, curves: Sequence[Plotted]) -> None:
    places = list(dict.fromkeys(x for curve in curves for x in curve.x))
    width = 0.8 / len(curves)
    for number, curve in enumerate(curves):
        points = [(places.index(x), y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
        at = [place + (number - (len(curves) - 1) / 2) * width for place, _ in points]
        hatch = "//" if curve.published else ""
        axes.bar(at, [y for _, y in points], width, label=_label(curve), hatch=hatch, alpha=0.6 if curve.published else 1.0)
    room = _LINE // len(places)
    labels = ["\n".join(textwrap.fill(line, room, break_long_words=False) for line in str(place).split("\n")) for place in places]
    is_crowded = max(len(line) for label in labels for line in label.split("\n")) > room
    axes.set_xticks(range(len(places)), labels, fontsize=8 if is_crowded else 10)


def _label_ticks(axes: Any, drawing: Drawing) -> None:
    """Numbers as people write them; where few places were computed on a logarithmic axis, these."""
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator, StrMethodFormatter

    plain = StrMethodFormatter("{x:,.10g}")
    axes.yaxis.set_major_formatter(plain)
    if drawing.log_y:
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < _FEW_DECADES * low else (1.0,)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if drawing.kind == "bars":
        return
    axes.xaxis.set_major_formatter(plain)
    places = sorted({float(x) for curve in drawing.curves for x in curve.x})
    if drawing.log_x and len(places) <= _MOST_TICKS:
        axes.set_xticks(places)
        axes.xaxis.set_minor_locator(NullLocator())


def _draw_lines(axes: Any, curves: Sequence[Plotted], *, joined: bool) -> None:
    for curve in curves:
        points = [(x, y) for x, y in zip(curve.x, curve.y, strict=True) if y is not None]
        style = ("--" if curve.published else "-") if joined else "none"
        marker = "o" if len(points) < 100 else ""
        axes.plot([x for x, _ in points], [y for _, y in points], ls=style, marker=marker, ms=4, label=_label(curve))


def _origin(drawing: Drawing) -> str:
    """What of a figure is not of this run, for its title."""
    published = [curve.published for curve in drawing.curves]
    if all(published):
        return "(published values; nothing of this run)"
    how = "hatched" if drawing.kind == "bars" else "dashed"
    return f"({how}: published or of earlier runs, not of this run)" if any(published) else ""


def _label(curve: Plotted) -> str:
    return f"{curve.label} (published)" if curve.published else curve.label
