"""Blocks of a report as SVG without a browser: what `--figures` writes, and what a notebook keeps."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.reports.blocks import Block, Charts, Heat, Scatter, Spans, Stack
from penstock.reports.palette import STAGE_COLOURS
from penstock.reports.shares import shares
from penstock.reports.tables import slug

if TYPE_CHECKING:
    from penstock.reports.report import Report

__all__ = ["picture_of", "pictures_of"]

_SPANS = {
    "forward": "#0072b2", "backward": "#009e73", "input": "#56b4e9", "weight": "#e69f00", "update": "#cc79a7", "wait": "#c9c9c9",
    "transfer": "#d55e00", "other": "#8c8c8c",
}  # fmt: skip
"""As `colours.js` has them."""
_SCALES = {"time": (1.0, "s"), "bytes": (2.0**-30, "GiB"), "share": (100.0, "%"), "usd": (1.0, "USD")}
_COLUMNS, _MOST_ROWS = 1600, 256


def pictures_of(report: Report) -> dict[str, bytes]:
    """SVG files by name."""
    found: dict[str, bytes] = {}
    for subject, view in report.views:
        for block in view.blocks:
            drawn = picture_of(block)
            if drawn is not None:
                name = "-".join(filter(None, (slug(subject), slug(f"{view.name} {block.title}"))))  # type: ignore[union-attr]
                found[f"{name}.svg" if f"{name}.svg" not in found else f"{name}.{len(found)}.svg"] = drawn
    return found


def picture_of(block: Block) -> bytes | None:
    """The block as SVG, the same bytes each time; None where there is nothing to draw."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    draw = _DRAWN.get(type(block))
    if draw is None:
        return None
    with rc_context({"svg.hashsalt": "penstock", "text.parse_math": False, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure = Figure(figsize=(10, 4), layout="constrained")
        draw(figure, block)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _unit(unit: str) -> tuple[float, str]:
    return _SCALES.get(unit, (1.0, ""))


def _stack(figure: Any, block: Stack) -> None:
    figure.set_figheight(1.2 + 0.28 * len(block.rows))
    axes, (scale, name) = figure.add_subplot(), _unit(block.unit)
    values = np.nan_to_num(np.array(block.values, dtype=np.float64).reshape(len(block.rows), len(block.parts)), posinf=0.0) * scale
    left = np.zeros(len(block.rows))
    for number, part in enumerate(block.parts):
        if values[:, number].any():
            hatch = "///" if part in ("padding", "bubble") else None
            look = {"color": STAGE_COLOURS[number % len(STAGE_COLOURS)], "hatch": hatch, "edgecolor": "white", "linewidth": 0}
            axes.barh(range(len(block.rows)), values[:, number], left=left, label=part, **look)
            left += values[:, number]
    for row, cuts in enumerate(block.cuts):
        axes.vlines(np.array(cuts) * scale, row - 0.4, row + 0.4, color="white", linewidth=0.6)
    for row, limit in enumerate(block.limits):
        if limit * scale <= 2 * left.max(initial=0.0):
            axes.plot([limit * scale] * 2, [row - 0.45, row + 0.45], color="black", linestyle=":")
    axes.set_yticks(range(len(block.rows)), block.rows)
    axes.invert_yaxis()
    axes.set_xlabel(name)
    axes.set_title(block.title, loc="left")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _charts(figure: Any, block: Charts) -> None:
    figure.set_figheight(0.6 + 1.6 * len(block.charts))
    for axes, chart in zip(figure.subplots(len(block.charts), 1, sharex=True, squeeze=False)[:, 0], block.charts, strict=True):
        scale, name = _unit(chart[0].unit)
        for number, line in enumerate(chart):
            style = {"drawstyle": "steps-post"} if block.steps else {}
            axes.plot(block.x, line.values * scale, color=STAGE_COLOURS[number], label=line.name, rasterized=len(block.x) > 2000, **style)
        axes.set_ylabel(name)
        axes.legend(loc="upper right", fontsize=8)
    figure.axes[0].set_title(block.title, loc="left")
    figure.axes[-1].set_xlabel(block.x_name)


def _scatter(figure: Any, block: Scatter) -> None:
    axes = figure.add_subplot()
    points = np.array([[np.nan if value is None else value for value in row[:2]] for row in block.rows], dtype=np.float64).reshape(-1, 2)
    order = [at for at in np.lexsort((points[:, 1], points[:, 0])) if np.isfinite(points[at]).all()]
    least = np.minimum.accumulate(points[order, 1]) if order else np.zeros(0)
    best = [at for number, at in enumerate(order) if number == 0 or points[at, 1] < least[number - 1]]
    axes.scatter(points[:, 0], points[:, 1], color="lightgrey", label="beaten by another")
    axes.plot(points[best, 0], points[best, 1], "o-", color=STAGE_COLOURS[0], label="not beaten")
    for at in best[:40]:
        axes.annotate(block.names[at][:60], points[at], fontsize=7, xytext=(4, 4), textcoords="offset points", parse_math=False)
    axes.set(xlabel=block.columns[0], ylabel=block.columns[1])
    axes.set_title(block.title, loc="left")
    axes.legend()


def _heat(figure: Any, block: Heat) -> None:
    axes = figure.add_subplot()
    strength = np.log2(np.clip(block.values, 0.25, 4.0))
    image = axes.imshow(strength, aspect="auto", cmap="PuOr_r", vmin=-1, vmax=1, interpolation="none")
    axes.set_yticks(range(0, len(block.rows), -(-len(block.rows) // 24)), block.rows[:: -(-len(block.rows) // 24)])
    axes.set_xlabel(block.x_name)
    axes.set_title(block.title, loc="left")
    figure.colorbar(image, label="doublings of the usual time")


def _spans(figure: Any, block: Spans) -> None:
    """Every row as shares of time."""
    from matplotlib.colors import to_rgb

    rows: dict[str, list[Any]] = {}
    for lane in block.lanes:
        rows.setdefault(f"{lane.name}{'' if lane.role != 'sends' else f' {len(rows)}'}", []).append(lane)
    shown = list(rows.items())[:_MOST_ROWS]
    spans = [[_times(block, lane) for lane in lanes] for _, lanes in shown]
    end = max((float(ends[-1]) for own in spans for _, ends, _ in own if len(ends)), default=1.0)
    edges, image = np.linspace(0.0, end, _COLUMNS + 1), np.ones((len(shown), _COLUMNS, 3))
    for row, own in enumerate(spans):
        for starts, ends, kinds in own:
            for kind in np.unique(kinds):
                mine = kinds == kind
                colour = 1.0 - np.array(to_rgb(_SPANS[block.kinds[kind].colour]))
                image[row] -= shares(starts[mine], ends[mine], edges)[:, None] * colour
    figure.set_figheight(1.0 + min(10.0, 0.25 * len(shown)))
    axes = figure.add_subplot()
    axes.imshow(image.clip(0.0, 1.0), aspect="auto", interpolation="none", extent=(0.0, end * 1e-9, len(shown) - 0.5, -0.5))
    each = -(-len(shown) // 40) or 1
    axes.set_yticks(range(0, len(shown), each), [name[:30] for name, _ in shown[::each]])
    axes.set_xlabel("s")
    axes.set_title(block.title, loc="left")


def _times(block: Spans, lane: Any) -> tuple[Any, Any, Any]:
    own = slice(lane.first, lane.first + lane.count)
    ends = lane.begin_ns + np.cumsum((block.gap_ns[own] + block.length_ns[own]) * block.tick_ns)
    return ends - block.length_ns[own] * block.tick_ns, ends, block.kind[own]


_DRAWN: dict[type, Callable[[Any, Any], None]] = {Stack: _stack, Charts: _charts, Scatter: _scatter, Heat: _heat, Spans: _spans}
