"""A simulated iteration as a trace, event by event, of two stages written down by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from penstock.schedules.orders import gpipe
from penstock.timing.execution import execute
from penstock.timing.traces import trace_of, write_trace
from penstock.timing.workload import workload_of

RUN = execute(
    gpipe(2, 2),
    workload_of(np.ones((2, 2, 2)), np.array([[[0.5, 4.0]], [[0.25, 0.25]]]), after_s=[2.0, 0.0], stored_bytes=8.0, base_bytes=[1.0, 2.0]),
)
"""0: F0 F1 B0 B1, 1: F0 F1 B0 B1; the second activation takes four seconds, gradients a quarter, and stage 0 works on for two."""


def _slices(category: str) -> list[tuple[Any, ...]]:
    """(name, device, track, microseconds of its start and of its length, what it says)."""
    events = [event for event in trace_of(RUN)["traceEvents"] if event.get("cat") == category]
    return [(event["name"], event["pid"], event["tid"], event["ts"], event["dur"], event["args"]) for event in events]


def test_passes_are_where_and_when_they_run() -> None:
    forward = {name: (device, start / 1e6, length / 1e6, args["micro_batch"]) for name, device, _, start, length, args in _slices("F")}
    assert forward == {"0F0": (0, 0, 1, 0), "0F1": (0, 1, 1, 1), "1F0": (1, 1.5, 1, 0), "1F1": (1, 6, 1, 1)}
    assert {name: start / 1e6 for name, _, _, start, _, _ in _slices("B")} == {"1B0": 7, "1B1": 8, "0B0": 8.25, "0B1": 9.25}


def test_messages_are_on_their_sender_and_name_their_receiver() -> None:
    sends = [(name, device, start / 1e6, length / 1e6, args["to"]) for name, device, _, start, length, args in _slices("send")]
    assert sorted(sends) == [
        ("activation 0→1 0", 0, 1, 0.5, 1), ("activation 0→1 1", 0, 2, 4, 1),
        ("gradient 1→0 0", 1, 8, 0.25, 0), ("gradient 1→0 1", 1, 9, 0.25, 0),
    ]  # fmt: skip


def test_work_after_the_passes_and_memory_are_in_it() -> None:
    ((name, device, _, start, length, _),) = _slices("after")
    assert (name, device, start / 1e6, length / 1e6) == ("stage 0", 0, 10.25, 2)
    held = [(event["pid"], event["ts"] / 1e6, event["args"]["bytes"]) for event in trace_of(RUN)["traceEvents"] if event["ph"] == "C"]
    assert held[:3] == [(0, 0, 1.0), (1, 0, 2.0), (0, 0, 9.0)] and (0, 1, 17.0) in held and held[-1] == (0, 10.25, 1.0)


def test_devices_are_called_by_name_and_files_compressed_by_theirs(tmp_path: Path) -> None:
    names = [event["args"]["name"] for event in trace_of(RUN, ["left"])["traceEvents"] if event["name"] == "process_name"]
    assert names == ["left", "device 1"]
    for name in ("t.json", "t.json.gz"):
        write_trace(tmp_path / name, RUN)
    plain, packed = ((tmp_path / name).read_bytes() for name in ("t.json", "t.json.gz"))
    assert gzip.decompress(packed) == plain and json.loads(plain) == trace_of(RUN)
