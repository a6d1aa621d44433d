"""A timeline as a figure: a bar for each action, and below it the memory of each device where it is known.

Bars that are too many to be told apart become shares of time: each pixel is as dark as its device is busy.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InputError
from penstock.files import write_bytes
from penstock.reports.palette import KIND_COLOURS, KIND_NAMES
from penstock.reports.shares import shares
from penstock.schedules.actions import KINDS
from penstock.timing.execution import Execution
from penstock.timing.simulator import Timeline

__all__ = ["FIGURE_SUFFIXES", "check_figure_path", "write_figure"]

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")
_MOST_BARS = 2000
"""Beyond it bars are narrower than a pixel, and a file of them takes megabytes."""
_COLUMNS = 1600
"""Of the picture that is drawn instead."""
_DIGIT = 1 / 140
"""Width of a digit, as a share of the time axis."""
_MOST_NAMED = 12
"""Devices that a legend or an axis names each."""
_TALLEST_IN = 12.0
_FAR_LIMIT = 2.0
"""A memory limit beyond so many times the peak is told instead of drawn: it would squash what there is to see."""


def check_figure_path(path: str | Path) -> None:
    """Refuses a file whose name does not say which kind of picture it is."""
    if Path(path).suffix.lower() not in FIGURE_SUFFIXES:
        raise InputError(f"figure '{path}': the name must end in one of {', '.join(FIGURE_SUFFIXES)}.")


def write_figure(path: str | Path, timeline: Timeline, title: str = "") -> None:
    """Draws the timeline into an SVG, PNG or PDF file, as its name says; the same timeline gives the same SVG."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    check_figure_path(path)
    has_memory = isinstance(timeline, Execution) and bool(np.any(timeline.memory_bytes > 0))
    rows_in = min(0.45 * max(1, len(timeline.schedule)), _TALLEST_IN)
    memory_in = max(2.0, min(rows_in, 4.0)) if has_memory else 0.0
    kind = Path(path).suffix.lower()[1:]
    with rc_context({"svg.hashsalt": "penstock", "text.parse_math": False}):
        figure = Figure(figsize=(12, 1.2 + rows_in + memory_in), layout="constrained")
        heights = [rows_in, memory_in] if has_memory else [rows_in]
        axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        _draw_actions(axes[0], timeline)
        if isinstance(timeline, Execution) and has_memory:
            _draw_memory(axes[1], timeline)
        axes[-1].set_xlabel("time (s)")
        if title:
            axes[0].set_title(title, loc="left")
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    write_bytes(path, buffer.getvalue())


def _draw_actions(axes: Any, timeline: Timeline) -> None:
    """A row for each device from top to bottom, a colour for each kind."""
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    if sum(map(len, schedule)) <= _MOST_BARS:
        _draw_bars(axes, timeline)
    else:
        _draw_shares(axes, timeline)
    axes.set_xlim(0, timeline.makespan_s or 1.0)
    axes.set_ylim(len(schedule) - 0.5, -0.5)
    named = range(0, len(schedule), -(-len(schedule) // (2 * _MOST_NAMED)) or 1)
    axes.set_yticks(named, [f"device {device}" for device in named])
    used = sorted({action.kind for actions in schedule for action in actions})
    patches = [Patch(color=KIND_COLOURS[kind], label=f"{KINDS[kind]} {KIND_NAMES[kind]}") for kind in used]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_bars(axes: Any, timeline: Timeline) -> None:
    """Bars in two shades, by which neighbours are told apart without an edge that would hide short ones; numbers where there is room."""
    digit_s = timeline.makespan_s * _DIGIT
    for device, actions in enumerate(timeline.schedule):
        spans = [timeline.span_s(action) for action in actions]
        colours = [(KIND_COLOURS[action.kind], 1.0 if action.micro_batch % 2 else 0.75) for action in actions]
        axes.broken_barh([(start, end - start) for start, end in spans], (device - 0.4, 0.8), facecolors=colours, linewidth=0)
        for action, (start, end) in zip(actions, spans, strict=True):
            text = str(action.micro_batch)
            if end - start > (len(text) + 0.5) * digit_s:
                axes.text((start + end) / 2, device, text, ha="center", va="center", fontsize=7, clip_on=True)


def _draw_shares(axes: Any, timeline: Timeline) -> None:
    """One picture of all devices, in which a pixel mixes the colours of its kinds by their shares of its time; the rest is white."""
    from matplotlib.colors import to_rgb

    edges = np.linspace(0.0, timeline.makespan_s, _COLUMNS + 1)
    image = np.ones((len(timeline.schedule), _COLUMNS, 3))
    for device, actions in enumerate(timeline.schedule):
        for kind in {action.kind for action in actions}:
            spans = np.array([timeline.span_s(action) for action in actions if action.kind == kind])
            share = shares(spans[:, 0], spans[:, 1], edges)
            image[device] -= share[:, None] * (1.0 - np.array(to_rgb(KIND_COLOURS[kind])))
    # Each row is drawn four times and then a gap, so that devices are told apart as bars are.
    rows = np.ones((len(image), 5, _COLUMNS, 3))
    rows[:, :4] = image.clip(0.0, 1.0)[:, None]
    extent = (0.0, timeline.makespan_s, len(image) - 0.4, -0.4)
    axes.imshow(rows.reshape(-1, _COLUMNS, 3), extent=extent, aspect="auto", interpolation="none")


def _draw_memory(axes: Any, execution: Execution) -> None:
    devices = range(execution.workload.num_devices)
    many = len(execution.memory_bytes) > _MOST_BARS
    for device in devices:
        own = execution.memory_device == device
        times, held = execution.memory_time_s[own], execution.memory_bytes[own] / 2**30
        axes.step([*times, execution.makespan_s], [*held, held[-1]], where="post", label=f"device {device}", linewidth=1, rasterized=many)
    limits = np.unique(execution.workload.limit_bytes[np.isfinite(execution.workload.limit_bytes)]) / 2**30
    peak = float(np.max(execution.peak_bytes)) / 2**30
    for limit in limits[limits <= _FAR_LIMIT * peak]:
        axes.axhline(limit, color="black", linestyle=":", linewidth=1)
    far = ", ".join(f"{limit:.1f}" for limit in limits[limits > _FAR_LIMIT * peak])
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel(f"memory (GiB), limit {far}" if far else "memory (GiB)")
    if len(devices) <= _MOST_NAMED:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
