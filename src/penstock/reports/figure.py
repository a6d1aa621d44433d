"""A timeline as a figure: a bar for each action, and below it the memory of each device where it is known."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InputError
from penstock.files import write_bytes
from penstock.schedules.actions import KINDS
from penstock.timing.execution import Execution
from penstock.timing.simulator import Timeline

__all__ = ["FIGURE_SUFFIXES", "check_figure_path", "write_figure"]

FIGURE_SUFFIXES = (".svg", ".png", ".pdf")
_COLOURS = ("#4c78a8", "#54a24b", "#72b7b2", "#e4a94f")
_NAMES = ("forward", "backward", "input gradient", "weight gradient")
_MOST_LABELS = 400


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
    rows = max(1, len(timeline.schedule))
    kind = Path(path).suffix.lower()[1:]
    with rc_context({"svg.hashsalt": "penstock", "text.parse_math": False}):
        figure = Figure(figsize=(12, 1.2 + 0.45 * rows * (2 if has_memory else 1)), layout="constrained")
        axes = figure.subplots(2 if has_memory else 1, 1, sharex=True, squeeze=False)[:, 0]
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
    """A row for each device from top to bottom, a colour for each kind, micro-batches by number while there are few."""
    schedule = timeline.schedule
    labelled = sum(map(len, schedule)) <= _MOST_LABELS
    for kind in sorted({action.kind for actions in schedule for action in actions}):
        for device, actions in enumerate(schedule):
            spans = [timeline.span_s(action) for action in actions if action.kind == kind]
            bars = [(start, end - start) for start, end in spans]
            label = f"{KINDS[kind]} {_NAMES[kind]}" if device == 0 else None
            axes.broken_barh(bars, (device - 0.4, 0.8), facecolors=_COLOURS[kind], edgecolors="white", linewidth=0.5, label=label)
    if labelled:
        for device, actions in enumerate(schedule):
            for action in actions:
                start, end = timeline.span_s(action)
                axes.text((start + end) / 2, device, str(action.micro_batch), ha="center", va="center", fontsize=7, clip_on=True)
    axes.set_ylim(len(schedule) - 0.5, -0.5)
    axes.set_yticks(range(len(schedule)), [f"device {device}" for device in range(len(schedule))])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)


def _draw_memory(axes: Any, execution: Execution) -> None:
    for device in range(execution.workload.num_devices):
        own = execution.memory_device == device
        times, held = execution.memory_time_s[own], execution.memory_bytes[own] / 2**30
        axes.step([*times, execution.makespan_s], [*held, held[-1]], where="post", label=f"device {device}")
    limits = execution.workload.limit_bytes[np.isfinite(execution.workload.limit_bytes)]
    for limit in np.unique(limits):
        axes.axhline(limit / 2**30, color="black", linestyle=":", linewidth=1)
    axes.set_ylabel("memory (GiB)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
