"""Steps as TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.runtime.telemetry.steps import StepRecord

__all__ = ["tensorboard_sink"]

_FIRST = "brain.Event:2"
"""The version of such files, which their first event names."""


def tensorboard_sink(folder: str | Path) -> Callable[[Any], None] | None:
    """A function that writes each step's numbers for TensorBoard; None where it is not installed (`penstock[tensorboard]`).

    It is imported with the first step, which takes a while, and keeps no first step waiting. Its own `SummaryWriter` is not used: that
    writes from a thread, which tells of a full disk with a traceback on stderr.
    """
    if find_spec("tensorboard") is None:
        return None
    opened: list[Callable[[StepRecord], None] | None] = []

    def write(record: StepRecord) -> None:
        if not opened:
            opened.append(_writer(Path(folder)))
        if opened[0] is not None:
            opened[0](record)

    return write


def _writer(folder: Path) -> Callable[[StepRecord], None] | None:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except ImportError:  # it is there, but something that it needs is not
        return None
    folder.mkdir(parents=True, exist_ok=True)
    # The name tells files of one second apart, and those of whoever goes on come after those of the run before.
    path = folder / f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}.0"
    records = RecordWriter(open(path, "ab", buffering=0))  # noqa: SIM115 — it stays open as long as the run
    records.write(Event(wall_time=time.time(), file_version=_FIRST).SerializeToString())

    def write(record: StepRecord) -> None:
        numbers = {name: getattr(record, name) for name in record.__struct_fields__ if name != "step"}
        values = [
            Summary.Value(tag=f"train/{name}", simple_value=value)
            for name, value in numbers.items() if isinstance(value, int | float) and math.isfinite(value)
        ]  # fmt: skip
        records.write(Event(wall_time=time.time(), step=record.step, summary=Summary(value=values)).SerializeToString())

    return write
