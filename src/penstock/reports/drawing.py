"""A timeline as text, the way pipelines are usually drawn: a row for each device, time to the right.

    0 │F0─F1─F2─            B0════F3─B1════   B2════   B3════
    1 │   F0─F1─      B0════F2─B1════F3─B2════   B3════
    2 │      F0─B0════F1─B1════F2─B2════F3─B3════
    F─ forward, B═ backward; 54 columns = 18 s

This is 1F1B of four micro-batches whose backward pass takes twice as long.
"""

from __future__ import annotations

from penstock.errors import InputError
from penstock.schedules.actions import KINDS, Action
from penstock.timing.simulator import Timeline

__all__ = ["draw_text"]

_FILLS = {False: "─═╌░", True: "-=~."}
_NAMES = ("forward", "backward", "input gradient", "weight gradient")
_BAR = {False: "│", True: "|"}


def draw_text(timeline: Timeline, width: int = 120, *, until_s: float | None = None, ascii_only: bool = False) -> str:
    """The grid in at most `width` columns and a line that explains it; an action too short for its name shows what fits.

    Names carry the stage where a device runs several. `until_s` draws the beginning alone.
    """
    schedule, fills = timeline.schedule, _FILLS[ascii_only]
    margin = len(str(max(0, len(schedule) - 1))) + 2
    columns = width - margin
    if columns < 1:
        raise InputError(f"draw_text: {width} columns are too few for a drawing; {margin + 1} is the least.")
    makespan_s = timeline.makespan_s
    shown_s = makespan_s if until_s is None else min(until_s, makespan_s)
    per_second = columns / shown_s if shown_s > 0 else 0.0
    chunked = any(len({action.stage for action in actions}) > 1 for actions in schedule)
    lines = []
    for device, actions in enumerate(schedule):
        row = [" "] * columns
        for action in actions:
            start_s, end_s = timeline.span_s(action)
            first, last = round(start_s * per_second), round(end_s * per_second)
            row[first:last] = _block(action, last - first, fills[action.kind], chunked)
        lines.append(f"{device:>{margin - 2}} {_BAR[ascii_only]}{''.join(row[:columns])}".rstrip())
    used = sorted({action.kind for actions in schedule for action in actions})
    legend = ", ".join(f"{KINDS[kind]}{fills[kind]} {_NAMES[kind]}" for kind in used)
    scale = f"{shown_s:.4g} s" if shown_s == makespan_s else f"the first {shown_s:.4g} of {makespan_s:.4g} s"
    return "\n".join([*lines, f"{legend}; {columns} columns = {scale}"])


def _block(action: Action, width: int, fill: str, chunked: bool) -> str:
    """The action's name, or its micro-batch alone, or nothing, filled to the width."""
    names = (str(action) if chunked else str(action)[len(str(action.stage)) :], str(action.micro_batch), "")
    return next(name for name in names if len(name) <= width).ljust(width, fill)
