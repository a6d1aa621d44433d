"""Measured spans as a trace for Perfetto or chrome://tracing, the predicted ones of each rank right below its measured ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.errors import plural
from penstock.files import write_bytes
from penstock.runtime.telemetry.spans import NO_STAGE
from penstock.runtime.telemetry.spans_reader import RankSpans
from penstock.schedules.actions import KINDS
from penstock.timing.execution import Execution
from penstock.timing.simulator import Timeline

__all__ = ["PredictedSpan", "Predictions", "predicted_spans", "trace_events", "write_trace"]

_TRACKS = ("compute", "wait", "transfer")
_SHORT = {"Forward": "F", "Backward": "B", "BackwardInput": "I", "BackwardWeight": "W"}


@dataclass(frozen=True, slots=True)
class PredictedSpan:
    """A predicted span of a rank, in seconds since the iteration began."""

    name: str
    start_s: float
    end_s: float
    track: Literal["compute", "wait", "transfer"] = "compute"
    stage: int | None = None


Predictions = Mapping[int, Mapping[int, Sequence[PredictedSpan]]]
"""What was expected of each rank in each iteration: iteration, then rank."""


def predicted_spans(timeline: Timeline, device: int) -> list[PredictedSpan]:
    """The spans of a device's ranks by a simulated schedule: its actions, of a whole execution also what it sends and does after."""
    stages = {action.stage for action in timeline.schedule[device]}
    found = [
        PredictedSpan(f"{KINDS[action.kind]}{action.micro_batch}", *timeline.span_s(action), "compute", action.stage)
        for action in timeline.schedule[device]
    ]
    if isinstance(timeline, Execution):
        starts, ends = timeline.transfer_start_s, timeline.transfer_end_s
        for direction, cut, micro_batch in np.argwhere(np.isfinite(ends)).tolist():
            if cut + direction in stages and starts[direction, cut, micro_batch] < ends[direction, cut, micro_batch]:
                what = "gradient" if direction else "activation"
                span = float(starts[direction, cut, micro_batch]), float(ends[direction, cut, micro_batch])
                found.append(PredictedSpan(f"{what} {micro_batch}", *span, "transfer", cut))
        for stage in sorted(stages):
            if timeline.after_start_s[stage] < timeline.after_end_s[stage] < np.inf:
                found.append(
                    PredictedSpan("reduce", float(timeline.after_start_s[stage]), float(timeline.after_end_s[stage]), "transfer", stage)
                )
    return found


def trace_events(
    ranks: Iterable[RankSpans], predicted: Predictions | None = None, plans: Mapping[int, int] | None = None
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Trace events: a process for each rank, with a track for each category, and one for what was expected of it. `plans` has the number
    of the plan that was in force in each iteration, where there were several.

    Times are microseconds since the first iteration, or span, of any rank. A prediction begins when the first rank begins its iteration.
    """
    ranks = list(ranks)
    begins = _begins(ranks)
    origin = min([*begins.values(), *(int(one.spans["start_ns"].min()) for one in ranks if len(one.spans))], default=0)
    for one in ranks:
        measured, expected = 2 * one.rank, 2 * one.rank + 1
        lost = f" ({plural(one.num_lost, 'span')} lost)" if one.num_lost else ""
        yield from _process(measured, f"rank {one.rank}{lost}", dict(enumerate(_TRACKS)))
        for span in one.spans:
            yield _measured(one, span, measured, origin)
        for iteration, begin in one.iterations.items():
            under = f", plan {plans[iteration]}" if plans and iteration in plans else ""
            yield {"ph": "i", "name": f"iteration {iteration}{under}", "pid": measured, "tid": 0, "ts": (begin - origin) / 1e3, "s": "p"}
        guesses = [
            (begin - origin, guess)
            for iteration, begin in begins.items()
            for guess in (predicted or {}).get(iteration, {}).get(one.rank, ())
        ]
        if guesses:
            yield from _expected(guesses, expected, f"rank {one.rank} predicted")


def _begins(ranks: Sequence[RankSpans]) -> dict[int, int]:
    """When the first rank began each iteration."""
    found: dict[int, int] = {}
    for one in ranks:
        for iteration, begin in one.iterations.items():
            found[iteration] = min(begin, found.get(iteration, begin))
    return found


def _expected(guesses: list[tuple[int, PredictedSpan]], pid: int, name: str) -> Iterator[dict[str, Any]]:
    """The events of predicted spans, given with the nanosecond at which their iteration begins.

    A track has as many lanes as spans of it overlap, which slices of one lane must not: transfers do, and iterations that took less
    than was expected. Times are whole nanoseconds, so that what ends where the next begins does so in the file as well.
    """
    ends: dict[str, list[int]] = {track: [] for track in _TRACKS}
    rows = []
    for start_ns, end_ns, guess in sorted(
        ((b + round(g.start_s * 1e9), b + round(g.end_s * 1e9), g) for b, g in guesses), key=lambda row: row[:2]
    ):
        lanes = ends[guess.track]
        lane = next((number for number, end in enumerate(lanes) if end <= start_ns), len(lanes))
        lanes[lane : lane + 1] = [end_ns]
        rows.append((start_ns, end_ns, guess, lane))
    first = dict(zip(_TRACKS, accumulate((len(ends[track]) for track in _TRACKS), initial=0), strict=False))
    yield from _process(pid, name, {first[track] + lane: track for track in _TRACKS for lane in range(len(ends[track]))})
    for start_ns, end_ns, guess, lane in rows:
        yield {
            "ph": "X", "name": guess.name, "cat": f"predicted {guess.track}", "pid": pid, "tid": first[guess.track] + lane,
            "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3, "args": {} if guess.stage is None else {"stage": guess.stage},
        }  # fmt: skip


def _process(pid: int, name: str, tracks: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for tid, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}


def _measured(one: RankSpans, span: Any, pid: int, origin: int) -> dict[str, Any]:
    kind = one.kinds.get(int(span["kind"]), f"kind {span['kind']}")
    stage, micro_batch = int(span["stage"]), int(span["micro_batch"])
    args = {
        name: value for name, value, there in (("stage", stage, stage != NO_STAGE), ("micro_batch", micro_batch, micro_batch >= 0)) if there
    }
    return {
        "ph": "X", "name": f"{_SHORT.get(kind, kind)}{micro_batch if micro_batch >= 0 else ''}", "cat": _TRACKS[int(span["category"]) % 3],
        "pid": pid, "tid": int(span["category"]) % 3, "ts": (int(span["start_ns"]) - origin) / 1e3,
        "dur": int(span["end_ns"] - span["start_ns"]) / 1e3, "args": {"kind": kind, **args},
    }  # fmt: skip


def write_trace(
    path: str | Path, ranks: Iterable[RankSpans], predicted: Predictions | None = None, plans: Mapping[int, int] | None = None
) -> None:  # fmt: skip
    """Writes a trace file; compressed if its name ends in .gz, which Perfetto opens as well."""
    body = ",\n".join(json.dumps(event, separators=(",", ":")) for event in trace_events(ranks, predicted, plans))
    data = f'{{"displayTimeUnit":"ms","traceEvents":[\n{body}\n]}}\n'.encode()
    write_bytes(path, gzip.compress(data, 6, mtime=0) if str(path).endswith(".gz") else data)
