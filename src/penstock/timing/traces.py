"""A timeline as a trace that ui.perfetto.dev and chrome://tracing open: a process for each device, a track for each resource."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.files import write_bytes
from penstock.schedules.actions import KINDS
from penstock.timing.execution import Execution
from penstock.timing.simulator import Timeline

__all__ = ["trace_of", "write_trace"]

_COMPUTE, _AFTER, _SENDS = 0, 1, 2


def _ns(time_s: float) -> int:
    """Whole nanoseconds: what ends where the next begins still does so in the file, which viewers would otherwise nest or drop."""
    return round(time_s * 1e9)


def write_trace(path: str | Path, timeline: Timeline, device_names: Sequence[str] = ()) -> None:
    """Writes the trace as JSON, compressed if the name ends in .gz."""
    data = json.dumps(trace_of(timeline, device_names), allow_nan=False, separators=(",", ":")).encode()
    write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def trace_of(timeline: Timeline, device_names: Sequence[str] = ()) -> dict[str, Any]:
    """The trace as plain data; devices are called by their number unless named."""
    names = [device_names[d] if d < len(device_names) else f"device {d}" for d in range(len(timeline.schedule))]
    events = [_named("process_name", device, 0, name) for device, name in enumerate(names)]
    events += [_named("thread_name", device, _COMPUTE, "compute") for device in range(len(names))]
    for device, actions in enumerate(timeline.schedule):
        for action in actions:
            arguments = {"stage": action.stage, "micro_batch": action.micro_batch}
            events.append(_slice(str(action), KINDS[action.kind], device, _COMPUTE, timeline.span_s(action), arguments))
    if isinstance(timeline, Execution):
        events += _transfers(timeline)
        events += _after(timeline)
        rows = zip(timeline.memory_device, timeline.memory_time_s, timeline.memory_bytes, strict=True)
        events += [
            {"name": "memory", "ph": "C", "pid": int(d), "ts": _ns(float(t)) / 1e3, "args": {"bytes": float(b)}} for d, t, b in rows
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, device: int, track: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": device, "tid": track, "args": {"name": name}}


def _slice(name: str, category: str, device: int, track: int, span_s: tuple[float, float], arguments: dict[str, Any]) -> dict[str, Any]:
    start_ns, end_ns = map(_ns, span_s)
    return {
        "name": name, "cat": category, "ph": "X", "pid": device, "tid": track, "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3,
        "args": arguments,
    }  # fmt: skip


def _transfers(execution: Execution) -> list[dict[str, Any]]:
    """On the sender, on as many tracks as transfers of a device overlap: slices of one track must not."""
    devices, letters = execution.workload.devices, ("activation", "gradient")
    spans = []
    for where in zip(*np.nonzero(np.isfinite(execution.transfer_end_s)), strict=True):
        direction, cut, m = map(int, where)
        sender, receiver = devices[cut + direction], devices[cut + 1 - direction]
        if sender != receiver:
            span_s = float(execution.transfer_start_s[where]), float(execution.transfer_end_s[where])
            spans.append((span_s, sender, receiver, direction, cut, m))
    tracks: list[list[float]] = [[] for _ in range(execution.workload.num_devices)]
    events = []
    for span_s, sender, receiver, direction, cut, m in sorted(spans):
        own = tracks[sender]
        track = next((index for index, end in enumerate(own) if end <= span_s[0]), len(own))
        own[track : track + 1] = [span_s[1]]
        name = f"{letters[direction]} {cut}→{cut + 1} {m}" if direction == 0 else f"{letters[direction]} {cut + 1}→{cut} {m}"
        events.append(_slice(name, "send", sender, _SENDS + track, span_s, {"to": receiver, "micro_batch": m}))
    names = [_named("thread_name", device, _SENDS + track, "sends") for device, own in enumerate(tracks) for track in range(len(own))]
    return names + events


def _after(execution: Execution) -> list[dict[str, Any]]:
    ran = [s for s in range(execution.workload.num_stages) if execution.after_end_s[s] > execution.after_start_s[s]]
    devices = execution.workload.devices
    names = [_named("thread_name", device, _AFTER, "after the last backward pass") for device in sorted({devices[s] for s in ran})]
    return names + [
        _slice(
            f"stage {s}", "after", devices[s], _AFTER, (float(execution.after_start_s[s]), float(execution.after_end_s[s])), {"stage": s}
        )
        for s in ran
    ]
