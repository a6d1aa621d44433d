"""What a view of the report is made of: a few kinds of blocks, which the page draws, `--csv` writes as tables and `--figures` as pictures.

A block is data: numbers with the unit they are shown in, never text that was formatted. Each class is drawn by the file of the same name in
`page/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Block",
    "ChainOp",
    "ChartLine",
    "Charts",
    "Command",
    "Fact",
    "Facts",
    "Heat",
    "Lane",
    "MemoryLine",
    "OpChain",
    "Scatter",
    "SpanKind",
    "Spans",
    "Stack",
    "Subject",
    "Table",
    "Text",
    "View",
    "as_array",
]  # fmt: skip

Array = NDArray[Any]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    note: bool = False
    """Something left out or damaged, which is marked."""


@dataclass(frozen=True)
class Command:
    """A line to copy into a shell."""

    text: str


@dataclass(frozen=True)
class Fact:
    """One number, large."""

    label: str
    value: Any
    unit: str = "text"
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Numbers side by side."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True)
class Table:
    """Rows that a click on a column sorts."""

    title: str
    columns: tuple[str, ...]
    units: tuple[str, ...]
    """Of each column: text, number, count, time, bytes, usd, share."""
    rows: tuple[tuple[Any, ...], ...]
    opens: tuple[int | None, ...] = ()
    """For each row the number of the subject that it opens, if any."""


@dataclass(frozen=True)
class Stack:
    """A bar for each row, stacked of parts, with a limit where there is one."""

    title: str
    rows: tuple[str, ...]
    parts: tuple[str, ...]
    unit: str
    values: tuple[tuple[float, ...], ...]
    """[rows][parts]"""
    limits: tuple[float, ...] = ()
    cuts: tuple[tuple[float, ...], ...] = ()
    """For each row where its first part is divided: samples of a micro-batch."""


@dataclass(frozen=True)
class ChainOp:
    """Ops that follow each other alike: of one stage, recomputed or not."""

    name: str
    count: int
    stage: int
    recomputed: bool


@dataclass(frozen=True)
class OpChain:
    """The ops of a model in their order, coloured by stage."""

    title: str
    ops: tuple[ChainOp, ...]
    stages: tuple[str, ...]
    """What is said of each stage."""


@dataclass(frozen=True, eq=False)
class ChartLine:
    """Values over the x axis of its chart."""

    name: str
    unit: str
    values: Array


@dataclass(frozen=True, eq=False)
class Charts:
    """Charts below each other that share one x axis; values that are none are gaps."""

    title: str
    x_name: str
    x: Array
    charts: tuple[tuple[ChartLine, ...], ...]
    """Charts of one chart share its y axis, and a unit."""
    steps: bool = False
    """Whether a value holds until the next."""


@dataclass(frozen=True)
class Scatter:
    """Points of any two of some columns, with the front of those that no other beats in both."""

    title: str
    columns: tuple[str, ...]
    units: tuple[str, ...]
    names: tuple[str, ...]
    rows: tuple[tuple[float | None, ...], ...]
    opens: tuple[int | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Heat:
    """A colour for each row and column: dark is slow."""

    title: str
    rows: tuple[str, ...]
    x_name: str
    x: Array
    values: Array
    """[rows, columns], 1 is usual; what is not a number has no colour."""


@dataclass(frozen=True)
class SpanKind:
    """A category of spans in a timeline, such as forward passes or waits, and how it is drawn."""

    name: str
    letter: str
    """Before the number of a micro-batch."""
    colour: str
    """forward, backward, input, weight, update, wait, transfer or other."""


@dataclass(frozen=True)
class Lane:
    """A row of a timeline: spans `first` to `first + count`, in the order of time; lanes that are alike share theirs."""

    name: str
    group: str
    """Node, replica or stage under which it is shown."""
    role: str
    """measured, predicted, sends, critical (the path of the prediction) or, where times are not known, in order."""
    first: int
    count: int
    begin_ns: int = 0
    """Of its first moment; spans are counted from there."""
    replica: int = 0
    """Spans hand over to others of the same one."""


@dataclass(frozen=True, eq=False)
class MemoryLine:
    """A line of the memory that a device holds over time."""

    name: str
    time_ns: Array
    bytes: Array
    limit_bytes: float | None


@dataclass(frozen=True, eq=False)
class Spans:
    """The timeline: who does what when."""

    title: str
    kinds: tuple[SpanKind, ...]
    lanes: tuple[Lane, ...]
    gap_ns: Array
    """From the end of the span before it in the lane, or from the lane's begin."""
    length_ns: Array
    kind: Array
    stage: Array
    """-1: none."""
    micro_batch: Array
    """-1: none."""
    memory: tuple[MemoryLine, ...] = ()
    marks: tuple[tuple[int, str], ...] = ()
    """Moments with a name: where steps begin."""
    tick_ns: int = 1
    """What gaps and lengths count: nanoseconds, or of very many spans something coarser."""


Block = Text | Command | Facts | Table | Stack | OpChain | Charts | Scatter | Heat | Spans


@dataclass(frozen=True)
class View:
    """A part of the report under its own heading."""

    name: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)


@dataclass(frozen=True)
class Subject:
    """One plan or run with its views."""

    kind: str
    name: str
    views: tuple[View, ...]


def as_array(values: Any) -> Array:
    """Numbers with what is missing as NaN."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
