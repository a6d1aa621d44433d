"""What each rank did and when: one span per instruction, packed into a ring and written to a file by a thread.

    training thread   record() ─ 24 bytes into the ring ─► head         never waits: a full ring drops the span and counts it
    writer thread                              tail ─► file             every quarter of a second; the file only grows

A file is a header line of JSON and then records. Besides spans there are *marks*: where an iteration or an evaluation begins, where
a barrier let go (by which the clocks of several machines are compared), and how many spans were lost.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.programs.instructions import (
    INSTRUCTIONS,
    Instruction,
    Program,
    ReceiveStart,
    ReceiveWait,
    ReduceStart,
    ReduceWait,
    SendStart,
    SendWait,
    SyncTied,
)

__all__ = [
    "COMPUTE", "EVALUATION", "FIRST_MARK", "FORMAT", "ITERATION", "KINDS", "LOST", "NO_STAGE", "NUM_CATEGORIES", "RECORD", "SYNC",
    "TRANSFER", "VERSION", "WAIT", "SpanRecorder",
]  # fmt: skip

COMPUTE, WAIT, TRANSFER = range(3)
"""Categories: the device works; the rank waits for another; bytes are on their way (may lie beside compute)."""
NUM_CATEGORIES = 3
KINDS: dict[str, int] = {kind.__name__: kind.__struct_config__.tag for kind in INSTRUCTIONS}
"""Number of each kind of instruction, as in its binary form."""
EVALUATION, ITERATION, SYNC, LOST = range(252, 256)
"""Kinds of marks; their number (which iteration, which barrier, how many) is in `micro_batch`."""
FIRST_MARK = EVALUATION

FORMAT, VERSION = "penstock spans", 1
RECORD = np.dtype([("kind", "u1"), ("category", "u1"), ("stage", "<u2"), ("micro_batch", "<i4"), ("start_ns", "<i8"), ("end_ns", "<i8")])
_PACK = struct.Struct("<BBHiqq")
_SIZE = _PACK.size
_PAUSE_S = 0.25
NO_STAGE = 0xFFFF
"""Stage of what belongs to none."""


_CATEGORIES: dict[type[Instruction], int] = {
    SendStart: TRANSFER, ReceiveStart: TRANSFER, ReduceStart: TRANSFER, SyncTied: TRANSFER,
    SendWait: WAIT, ReceiveWait: WAIT, ReduceWait: WAIT,
}  # fmt: skip
"""Of the kinds that do not compute."""


def _place(kind: type[Instruction]) -> Callable[[Any], tuple[int, int | None]]:
    """Returns a getter of an instruction's stage (of a transfer: its cut) and micro-batch."""
    where = next((name for name in ("stage", "cut") if name in kind.__struct_fields__), None)
    if where and "micro_batch" in kind.__struct_fields__:
        return attrgetter(where, "micro_batch")
    return lambda step: (NO_STAGE if where is None else getattr(step, where), None)


_HEADS = {kind: (kind.__struct_config__.tag, _CATEGORIES.get(kind, COMPUTE), _place(kind)) for kind in INSTRUCTIONS}


def _clock() -> str:
    """Which clock `time.perf_counter_ns` reads: processes of one machine since its last start share one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


class SpanRecorder:
    """Records the spans of one rank: an executor's observer. Only one thread may record; times are `time.perf_counter_ns`."""

    def __init__(self, path: str | Path, rank: int = 0, *, capacity: int = 1 << 16) -> None:
        """`capacity` spans fit between two visits of the writer; with the usual 65,536 (1.5 MB) that is one per 4 µs."""
        self.rank, self.capacity = rank, capacity
        self.dropped = 0
        self._ring = bytearray(capacity * _SIZE)
        self._records = np.frombuffer(self._ring, RECORD)
        self._head = self._tail = self._told = 0
        self._instructions: tuple[Instruction, ...] = ()
        self._stop = threading.Event()
        self.error: OSError | None = None
        """Why nothing is written any more (a full disk); recording goes on without it."""
        header = {"format": FORMAT, "version": VERSION, "rank": rank, "pid": os.getpid(), "kinds": KINDS, "clock": _clock()}  # fmt: skip
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 — it stays open as long as the recorder
            self._file.write(json.dumps(header).encode() + b"\n")
        except OSError as error:
            raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
        self._thread = threading.Thread(target=self._write_for_ever, daemon=True, name="spans")
        self._thread.start()

    def record(
        self, kind: int, category: int, stage: int, micro_batch: int, start_ns: int, end_ns: int,
        _pack: object = _PACK.pack_into, _size: int = _SIZE,
    ) -> None:  # fmt: skip
        """Writes a span into the ring, or counts it as lost where there is no room; the number of a kind is in `KINDS`."""
        head = self._head
        if head - self._tail >= self.capacity:
            self.dropped += 1
            return
        _pack(self._ring, head % self.capacity * _size, kind, category, stage, micro_batch, start_ns, end_ns)  # type: ignore[operator]
        self._head = head + 1

    def begin(self, program: Program) -> None:
        """A program is about to run."""
        self._instructions = program.instructions
        self._mark(ITERATION if program.training else EVALUATION, program.iteration)

    def at(self, index: int) -> None:
        """An instruction is about to run."""

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        """An instruction has run."""
        step = self._instructions[index]
        kind, category, place = _HEADS[type(step)]
        stage, micro_batch = place(step)
        self.record(kind, category, stage, -1 if micro_batch is None else micro_batch, start_ns, end_ns)

    def mark_sync(self, number: int) -> None:
        """Stamps a barrier; called right after one of all ranks. Several times with the same number make the comparison finer."""
        self._mark(SYNC, number)

    def _mark(self, kind: int, number: int) -> None:
        now = time.perf_counter_ns()
        self.record(kind, 0, NO_STAGE, number, now, now)

    @property
    def position(self) -> int:
        """The number of records so far, from which `busy_ns` may count later."""
        return self._head

    def busy_ns(self, since: int) -> npt.NDArray[np.int64]:
        """Nanoseconds of each category recorded since a `position`, for the record of a step; what the ring no longer has is left out."""
        first, head = max(since, self._head - self.capacity), self._head
        records = self._records[np.arange(first, head) % self.capacity]
        lengths = (records["end_ns"] - records["start_ns"]).astype(np.float64)  # marks have none
        return np.bincount(records["category"], lengths, NUM_CATEGORIES).astype(np.int64)

    def close(self) -> None:
        """Writes what is left and closes the file."""
        self._stop.set()
        self._thread.join()
        self._file.close()

    def _write_for_ever(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Brings what is between tail and head to the file, in at most two pieces; the lock is free while the disk works."""
        head, tail = self._head, self._tail
        start, stop = tail % self.capacity * _SIZE, head % self.capacity * _SIZE
        view = memoryview(self._ring)
        try:
            if head > tail and self.error is None:
                for part in (view[start:stop],) if start < stop else (view[start:], view[:stop]):
                    while part:
                        part = part[self._file.write(part) :]
            if self.dropped > self._told and self.error is None:
                told, now = self.dropped, time.perf_counter_ns()
                self._file.write(_PACK.pack(LOST, 0, NO_STAGE, min(told - self._told, 2**31 - 1), now, now))
                self._told = told
        except OSError as error:
            self.error = error
        self._tail = head
