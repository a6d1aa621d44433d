"""What each step achieved, one JSON line per step, written by a thread so that a slow disk never holds training up."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.files import readable_bytes
from penstock.models.micro_batch import MicroBatch

__all__ = ["LineLog", "StepRecord", "open_lines", "padding_share", "read_lines", "read_steps", "write_line"]


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training step of the whole run; what is not known, or not a number, is left out."""

    step: int
    loss: float | None = None
    time_s: float | None = None
    tokens: int | None = None
    """Useful ones: no padding."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Model flops, without padding and recomputation, over what the devices could do at their peak."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    skipped: bool = False
    """The update was dropped: fp16's gradients overflowed, or what is not finite is skipped."""
    allocated_bytes: int | None = None
    """Most memory in use on this rank's device during the step."""
    reserved_bytes: int | None = None
    bubble_share: float | None = None
    """Share of the step in which this rank's device did not compute."""
    planning_wait_s: float | None = None
    """How long the step waited for its program."""
    padding_share: float | None = None
    """Share of the positions computed that were no tokens, in the replica of this rank."""
    gpu_utilisation: float | None = None
    """Of this rank's device, as NVML last had it; so are clock and power."""
    gpu_sm_clock_hz: float | None = None
    gpu_power_w: float | None = None
    samples: str | None = None
    """Digest of the samples: the same under every plan that trains each of them once."""
    plan: int | None = None
    """Which of the run's plans was in force: 0, and one more after each move."""
    held_out_loss: float | None = None
    """Of the evaluation after this step, if there was one; so is the share of labels that the most likely outputs hit."""
    held_out_accuracy: float | None = None


def padding_share(micro_batches: Iterable[MicroBatch]) -> float | None:
    """The share of positions that are padding; None where there are no positions, as of images."""
    own = [one for one in micro_batches if one.lengths]
    positions = sum(one.num_positions for one in own)
    return 1.0 - sum(one.num_tokens for one in own) / positions if positions else None


_FLUSH_S = 5.0
_TAIL_BYTES = 16384
"""How much of the end of a file is read at a time."""
_WRITING_S = 0.05
"""Longer than one line is being written."""


def open_lines(path: str | Path) -> FileIO:
    """Opens a file of JSON lines, at whose end others may append too. Half a line that a kill or a full disk has left there becomes blanks,
    which mean nothing before the next record. It is not cut off: what another process appends meanwhile would go with it."""
    with suppress(FileNotFoundError), FileIO(path, "r+") as file:
        begin, end = half = _half_line(file)
        if begin < end:
            time.sleep(_WRITING_S)  # it may be a line that another process is writing
            if _half_line(file) == half:
                file.seek(begin)
                file.write(b" " * (end - begin))
    return FileIO(path, "a")  # nothing is buffered: what a full disk refuses would come up again when the file is closed


def write_line(file: FileIO, record: msgspec.Struct) -> None:
    """Appends one record, all of it unless that fails."""
    line = msgspec.json.encode(record) + b"\n"
    while line:
        line = line[file.write(line) :]


def _half_line(file: FileIO) -> tuple[int, int]:
    """The offsets at which a last line without an end begins, and the file ends."""
    start = end = file.seek(0, os.SEEK_END)
    while start:
        stop, start = start, max(0, start - _TAIL_BYTES)
        file.seek(start)
        if (found := file.read(stop - start).rfind(b"\n")) >= 0:
            return start + found + 1, end
    return 0, end


class LineLog:
    """Appends records to a file as JSON lines. `write` only queues: it never waits, and never fails."""

    def __init__(self, path: str | Path, *more: Callable[[msgspec.Struct], None], anew: bool = False) -> None:
        """`more` are told of every record as well, in the writer's thread: a TensorBoard writer, a display. `anew` empties the file."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if anew:
                open(path, "wb").close()
            self._file = open_lines(path)
        except OSError as error:
            raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
        self._more = more
        self._queue: queue.SimpleQueue[msgspec.Struct | threading.Event | None] = queue.SimpleQueue()
        self.error: Exception | None = None
        """Why records are no longer written, if so."""
        self._thread = threading.Thread(target=self._run, daemon=True, name="log")
        self._thread.start()

    def write(self, record: msgspec.Struct) -> None:
        """Has a record written by the log's own thread."""
        self._queue.put(record)

    def flush(self) -> None:
        """Returns when all records so far are in the file, or a disk takes too long for it."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(_FLUSH_S)

    def close(self) -> None:
        """Writes what is left."""
        self._queue.put(None)
        self._thread.join()
        self._file.close()

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            if isinstance(record, threading.Event):
                record.set()
            elif self.error is None:
                try:
                    write_line(self._file, _finite(record))
                    for tell in self._more:
                        tell(record)
                except Exception as error:
                    self.error = error


def _finite(record: msgspec.Struct) -> msgspec.Struct:
    """JSON has no NaN: what is not a number is left out."""
    wrong = {name: None for name in record.__struct_fields__ if isinstance(v := getattr(record, name), float) and not math.isfinite(v)}
    return msgspec.structs.replace(record, **wrong) if wrong else record


def read_lines(path: str | Path, kind: type[msgspec.Struct], damaged: list[str] | None = None) -> Iterator[msgspec.Struct]:
    """The records of a file; a half line that a killed run may leave at the end is ignored, as are fields of later versions.

    A damaged line is refused, or with `damaged` left out and told there.
    """
    *lines, _half = readable_bytes(path, "log").split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            yield msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            if damaged is None:
                raise InputError(f"log '{path}', line {number}: {error}.") from None
            damaged.append(f"{Path(path).name}, line {number}: {error}")


def read_steps(path: str | Path, damaged: list[str] | None = None) -> list[StepRecord]:
    """The steps of a run; of one that was done again after a restart the last counts."""
    found = {record.step: record for record in read_lines(path, StepRecord, damaged) if isinstance(record, StepRecord)}
    return [found[step] for step in sorted(found)]
