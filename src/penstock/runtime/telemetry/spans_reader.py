"""Reading span files: the spans of a rank, where its iterations begin, and its clock compared with rank 0's."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.files import readable_file, short_repr
from penstock.runtime.telemetry.spans import EVALUATION, FIRST_MARK, FORMAT, ITERATION, LOST, NUM_CATEGORIES, RECORD, SYNC, VERSION

__all__ = ["RankSpans", "SpanFile", "aligned", "iteration_shares", "read_run", "read_spans"]

_LONGEST_HEADER = 1 << 16


@dataclass(frozen=True, eq=False)
class RankSpans:
    """The recorded spans of one rank; times in nanoseconds of its own clock, or after `aligned` of rank 0's."""

    rank: int
    kinds: dict[int, str]
    """Name of each kind of instruction."""
    spans: npt.NDArray[np.void]
    """Records of dtype `spans.RECORD`, marks left out."""
    iterations: dict[int, int]
    """When each iteration of training began."""
    syncs: dict[int, list[int]]
    """When each numbered barrier let go."""
    num_lost: int = 0
    """Spans that did not fit into the ring."""
    evaluations: tuple[int, ...] = ()
    """When passes over held-out samples began, which belong to no iteration."""
    clock: str = ""
    """Ranks with the same name here read the same clock; empty: nobody knows."""

    def of_iteration(self, iteration: int) -> npt.NDArray[np.void]:
        """The spans that began in an iteration."""
        begin = self.iterations[iteration]
        later = [start for start in (*self.iterations.values(), *self.evaluations) if start > begin]
        starts = self.spans["start_ns"]
        return self.spans[(starts >= begin) & (starts < min(later, default=np.iinfo(np.int64).max))]

    def only(self, iterations: Collection[int]) -> RankSpans:
        """The spans of some iterations, as far as this rank came to them."""
        own = {number: begin for number, begin in self.iterations.items() if number in iterations}
        spans = np.concatenate([self.spans[:0], *(self.of_iteration(number) for number in own)])
        return replace(self, spans=spans, iterations=own, evaluations=())


@dataclass
class SpanFile:
    """A span file that may still grow: each reading takes only what is new."""

    path: Path
    _line: bytes = b""
    _records: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, RECORD))

    def read(self) -> RankSpans:
        """All its spans; the half record that a killed process may leave at its end is ignored."""
        try:
            with readable_file(self.path, "span file").open("rb") as file:
                line = file.read(_LONGEST_HEADER).partition(b"\n")[0]
                if line != self._line or file.seek(0, os.SEEK_END) < len(line) + 1 + self._records.nbytes:  # a run that began anew
                    self._line, self._records = line, np.zeros(0, RECORD)
                file.seek(len(line) + 1 + self._records.nbytes)
                body = file.read()
        except OSError as error:
            raise InputError(f"span file '{self.path}' cannot be read: {error.strerror}.") from None
        told, new = _head(line, self.path), np.frombuffer(body[: len(body) // RECORD.itemsize * RECORD.itemsize], RECORD)
        self._records = np.concatenate([self._records, new]) if len(self._records) else new
        return _spans_of(told, self._records)


def read_spans(path: str | Path) -> RankSpans:
    """The spans of one file; the half record that a killed process may leave at its end is ignored."""
    return SpanFile(Path(path)).read()


def _head(line: bytes, path: Path) -> RankSpans:
    """Parses the first line of a span file."""
    try:
        header = json.loads(line)
        if header["format"] != FORMAT or header["version"] != VERSION:
            raise InputError(f"span file '{path}' is {short_repr(header['format'])} version {short_repr(header['version'])}; "
                             f"'{FORMAT}' version {VERSION} was expected.")  # fmt: skip
        kinds = {int(number): str(name) for name, number in header["kinds"].items()}
        return RankSpans(int(header["rank"]), kinds, np.zeros(0, RECORD), {}, {}, clock=str(header.get("clock", "")))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"'{path}' is no span file.") from None


def _spans_of(told: RankSpans, records: npt.NDArray[np.void]) -> RankSpans:
    """Spans apart from marks."""
    kind = records["kind"]
    syncs: dict[int, list[int]] = {}
    for mark in records[kind == SYNC]:
        syncs.setdefault(int(mark["micro_batch"]), []).append(int(mark["start_ns"]))
    iterations = {int(mark["micro_batch"]): int(mark["start_ns"]) for mark in records[kind == ITERATION]}
    lost = int(records["micro_batch"][kind == LOST].sum())
    return replace(
        told, spans=records[kind < FIRST_MARK], iterations=iterations, syncs=syncs, num_lost=lost,
        evaluations=tuple(records["start_ns"][kind == EVALUATION].tolist()),
    )  # fmt: skip


def read_run(folder: str | Path, ranks: Collection[int] | None = None) -> list[RankSpans]:
    """The spans of all ranks of a run (`*.spans`), by rank, on the first one's clock; of some ranks, if an earlier run had others."""
    files = [read_spans(path) for path in Path(folder).glob("*.spans")]
    found = sorted((one for one in files if ranks is None or one.rank in ranks), key=lambda one: one.rank)
    if not found:
        raise InputError(f"folder '{folder}' holds no span files (*.spans).")
    return aligned(found)


def aligned(ranks: Sequence[RankSpans]) -> list[RankSpans]:
    """All ranks on the clock of the first: those of one machine share it.

    A barrier lets all ranks go at nearly the same moment, so the median difference of their stamps is the clocks' offset then;
    between two barriers it is interpolated, since clocks drift.
    """
    return [_shifted(one, ranks[0]) for one in ranks]


def _shifted(one: RankSpans, first: RankSpans) -> RankSpans:
    """The spans of one rank in times of another's clock, by the barriers that both have stamped."""
    common = sorted(number for number in one.syncs if number in first.syncs)
    if one is first or not common or (one.clock and one.clock == first.clock):
        return one
    points = []
    for number in common:
        mine, theirs = np.array(one.syncs[number]), np.array(first.syncs[number])
        count = min(len(mine), len(theirs))
        points.append((int(mine[:count].mean()), int(np.median(theirs[:count] - mine[:count]))))
    at, offsets = np.array(sorted(points)).T

    def moved(times: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        # Relative to the first point: nanoseconds since boot need more digits than interpolation has.
        shift = np.interp(times - at[0], at - at[0], offsets - offsets[0])
        return times + offsets[0] + np.rint(shift).astype(np.int64)

    spans = one.spans.copy()
    spans["start_ns"], spans["end_ns"] = moved(one.spans["start_ns"]), moved(one.spans["end_ns"])
    starts = moved(np.array(list(one.iterations.values()), np.int64))
    evaluations = moved(np.array(one.evaluations, np.int64))
    return replace(
        one, spans=spans, iterations=dict(zip(one.iterations, starts.tolist(), strict=True)), evaluations=tuple(evaluations.tolist())
    )


def iteration_shares(one: RankSpans, iteration: int) -> npt.NDArray[np.float64]:
    """Of the time from an iteration's first span to its last, the shares of compute, wait and transfer; the rest is idle."""
    spans = one.of_iteration(iteration)
    if not len(spans):
        return np.zeros(NUM_CATEGORIES)
    whole = int(spans["end_ns"].max() - spans["start_ns"].min())
    busy = np.bincount(spans["category"], (spans["end_ns"] - spans["start_ns"]).astype(np.float64), NUM_CATEGORIES)
    return busy[:NUM_CATEGORIES] / max(1, whole)
