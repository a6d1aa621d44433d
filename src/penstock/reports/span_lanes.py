"""Collects the lanes of a timeline: spans of any source, in nanoseconds from the end of the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.reports.blocks import Lane, MemoryLine, SpanKind, Spans

__all__ = ["KINDS", "LETTERS", "SpanLanes"]

KINDS: dict[str, SpanKind] = {
    "F": SpanKind("forward", "F", "forward"), "B": SpanKind("backward", "B", "backward"), "I": SpanKind("input gradient", "I", "input"),
    "W": SpanKind("weight gradient", "W", "weight"), "activation": SpanKind("activation sent", "→", "transfer"),
    "gradient": SpanKind("gradient sent", "←", "transfer"), "after": SpanKind("gradients reduced, weights updated", "U", "update"),
    "wait": SpanKind("waiting", "wait", "wait"),
}  # fmt: skip
"""Of what is simulated; those of instructions come with the span files."""
LETTERS = {
    "Forward": ("F", "forward"), "Backward": ("B", "backward"), "BackwardInput": ("I", "input"), "BackwardWeight": ("W", "weight"),
    "Step": ("U", "update"), "StepStage": ("U", "update"),
}  # fmt: skip
"""Letter and colour of instructions that have their own."""

Integers = NDArray[np.int64]
_EXACT, _TICK_NS = 1_000_000, 1000
"""Beyond so many spans times are told in microseconds: nobody sees the difference, and a page of noise takes megabytes more."""


class SpanLanes:
    """Lanes as they are added; those with the same spans are stored once."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[int, SpanKind]] = {}
        self._lanes: list[Lane] = []
        self._parts: list[tuple[Integers, ...]] = []
        self._known: dict[bytes, tuple[int, int]] = {}
        self.num_spans = 0

    def kind(self, name: str, known: SpanKind | None = None) -> int:
        """The number of a kind."""
        if name not in self._kinds:
            self._kinds[name] = len(self._kinds), known or KINDS[name]
        return self._kinds[name][0]

    def add(self, name: str, group: str, role: str, spans: Sequence[tuple[float, float, str, int, int]], begin_ns: int = 0,
            replica: int = 0) -> None:  # fmt: skip
        """A lane of (start, end, kind, stage, micro-batch) in seconds since `begin_ns`, in the order of time."""
        times = np.rint(np.array([span[:2] for span in spans], dtype=np.float64).reshape(-1, 2) * 1e9).astype(np.int64)
        kinds = np.array([self.kind(span[2]) for span in spans], dtype=np.int64)
        places = np.array([span[3:] for span in spans], dtype=np.int64).reshape(-1, 2)
        self.add_arrays(name, group, role, times[:, 0], times[:, 1], kinds, places[:, 0], places[:, 1], begin_ns, replica)

    def add_arrays(
        self, name: str, group: str, role: str, start_ns: Integers, end_ns: Integers, kind: Integers, stage: Integers,
        micro_batch: Integers, begin_ns: int = 0, replica: int = 0,
    ) -> None:  # fmt: skip
        """Adds a lane whose spans are given as arrays; `kind` has the numbers that the method of that name gives."""
        gap_ns = start_ns - np.concatenate([np.zeros(1, np.int64), end_ns])[:-1] if len(start_ns) else start_ns
        part = tuple(np.ascontiguousarray(one, dtype=np.int64) for one in (gap_ns, end_ns - start_ns, kind, stage, micro_batch))
        key = b"|".join(one.tobytes() for one in part)
        if key not in self._known:
            self._known[key] = self.num_spans, len(start_ns)
            self._parts.append(part)
            self.num_spans += len(start_ns)
        first, count = self._known[key]
        self._lanes.append(Lane(name, group, role, first, count, begin_ns, replica))

    def block(self, title: str, memory: tuple[MemoryLine, ...] = (), marks: tuple[tuple[int, str], ...] = ()) -> Spans:
        """The timeline."""
        empty = (np.zeros(0, np.int64),) * 5
        tick_ns = 1 if self.num_spans <= _EXACT else _TICK_NS
        parts = self._parts or [empty]
        if tick_ns > 1:
            parts = [(*_coarser(gap, length, tick_ns), *rest) for gap, length, *rest in parts]
        gap, length, kind, stage, micro_batch = (np.concatenate(column) for column in zip(*parts, strict=True))
        kinds = tuple(known for _, known in self._kinds.values())
        return Spans(title, kinds, tuple(self._lanes), gap, length, kind, stage, micro_batch, memory, marks, tick_ns)


def _coarser(gap_ns: Integers, length_ns: Integers, tick_ns: int) -> tuple[Integers, Integers]:
    """Gaps and lengths in ticks; moments are rounded, so that errors do not add up."""
    ends = np.cumsum(gap_ns + length_ns)
    start, end = (np.rint(moments / tick_ns).astype(np.int64) for moments in (ends - length_ns, ends))
    return start - np.concatenate([np.zeros(1, np.int64), end])[:-1], end - start
