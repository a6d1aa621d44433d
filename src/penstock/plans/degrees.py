"""The axes along which a stage is divided over its devices, and where a rank stands on each of them.

A stage's ranks in one replica are numbered along the axes in the order of `Axis`, the first fastest. With tp 2 and dp 3:

    index    0  1  2  3  4  5
    tp       0  1  0  1  0  1      neighbours divide each op among them, so that they share a node
    dp       0  0  1  1  2  2      the pairs divide the samples

Context and expert parallelism have their places here (degree 1 until ops know them): what is laid out, grouped or reduced elsewhere asks
`Degrees`, so that an axis is added in this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.plans.plan import Stage

__all__ = ["AVAILABLE", "Axis", "DegreeRun", "Degrees", "algos_of", "parts_of", "recomputed_in"]


class Axis(StrEnum):
    """A way to divide a stage, in the order in which ranks are numbered."""

    TP = "tp"
    """Tensor parallel: each op divided."""
    CP = "cp"
    """Context parallel: the tokens of a sequence divided."""
    EP = "ep"
    """Expert parallel: the experts of an op divided."""
    DP = "dp"
    """Data parallel: the samples of one micro-batch divided."""


AVAILABLE = (Axis.TP, Axis.DP)
"""Axes that ops and costs know; the others have degree 1."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Over how many devices each axis divides a stage."""

    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1

    def of(self, axis: Axis) -> int:
        """The degree of one axis."""
        return int(getattr(self, axis.value))

    @property
    def size(self) -> int:
        """Devices of one replica of the stage."""
        return self.tp * self.dp * self.cp * self.ep

    def coordinate(self, axis: Axis, index: int) -> int:
        """Where the rank at `index` of the stage's ranks stands on an axis."""
        return index // self._stride(axis) % self.of(axis)

    def group(self, axis: Axis, index: int, ranks: Sequence[int]) -> tuple[int, ...]:
        """Of one replica's ranks those that differ from the one at `index` along this axis alone, itself included."""
        stride = self._stride(axis)
        block = stride * self.of(axis)
        start = index // block * block
        return tuple(ranks[start + index % stride : start + block : stride])

    def groups(self, axis: Axis, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """One replica's ranks in groups along an axis."""
        stride = self._stride(axis)
        block = stride * self.of(axis)
        return [tuple(ranks[at : start + block : stride]) for start in range(0, len(ranks), block) for at in range(start, start + stride)]

    def with_same_weights(self, index: int, ranks: Sequence[int]) -> list[int]:
        """Of one replica's ranks those that hold the same weights as the one at `index`: tp and ep divide weights, cp and dp do not."""
        first = self.coordinate(Axis.TP, index) + self._stride(Axis.EP) * self.coordinate(Axis.EP, index)
        outer, inner = self._stride(Axis.DP), self._stride(Axis.CP)
        return [ranks[first + outer * share + inner * part] for share in range(self.dp) for part in range(self.cp)]

    def _stride(self, axis: Axis) -> int:
        """How far apart in the numbering neighbours along an axis are: the product of the axes that come before it."""
        return {Axis.TP: 1, Axis.CP: self.tp, Axis.EP: self.tp * self.cp, Axis.DP: self.tp * self.cp * self.ep}[axis]


@dataclass(frozen=True, slots=True)
class DegreeRun:
    """Neighbouring ops [first, last) of a stage that have equal degrees."""

    first: int
    last: int
    tp: int
    dp: int

    @property
    def degrees(self) -> Degrees:
        """The degrees of all its ops."""
        return Degrees(self.tp, self.dp)


def parts_of(stage: Stage) -> list[DegreeRun]:
    """The stage in runs of equal degrees: one, unless its ops have degrees of their own."""
    if not stage.runs:
        return [DegreeRun(stage.first, stage.last, stage.degrees.tp, stage.degrees.dp)]
    degrees = {op: (run.tp, run.dp) for op in range(stage.first, stage.last) for run in (stage.run_of(op),)}
    groups = ((key, list(ops)) for key, ops in groupby(degrees, key=lambda op: degrees[op]))
    return [DegreeRun(ops[0], ops[-1] + 1, tp, dp) for (tp, dp), ops in groups]


def algos_of(stage: Stage, run: DegreeRun) -> tuple[int, ...]:
    """The split of each op of a run."""
    if not stage.runs:
        return (0,) * (run.last - run.first)
    return tuple(stage.run_of(op).algo for op in range(run.first, run.last))


def recomputed_in(stage: Stage, run: DegreeRun, pattern: int = 0) -> frozenset[int]:
    """Positions within a run of the ops that one of the stage's patterns recomputes."""
    flags, shift = stage.recomputed(pattern), run.first - stage.first
    return flags if not stage.runs else frozenset(op - shift for op in flags if shift <= op < run.last - stage.first)
