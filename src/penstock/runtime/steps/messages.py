"""The one message after each step: what every process of a job tells all others, as a row of numbers. A message costs far more than its
bytes, so that all there is to agree on, and to know, goes with it; and who follows a run by it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Protocol

from penstock.models.micro_batch import MicroBatch
from penstock.runtime.request import EvalRecord
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.steps import StepRecord

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.rank import Rank

__all__ = ["StepMessage", "StepWatcher", "samples_digest", "whole_digest"]

_FIGURES = len(fields(RankFigures))
_RECORD = {name: kind for name, kind in StepRecord.__annotations__.items() if name not in ("samples", "plan")}
_DIGEST_BITS = 44
"""Sums over the replicas of a job are then exact in a float."""


@dataclass(frozen=True)
class StepMessage:
    """One process' message to all others after a step. A field keeps its default where the process does not know."""

    lost_store: bool = False
    """It gets no more programs."""
    asked_to_end: int = 0
    """The signal that asks for it; below 0: for the process' own node alone."""
    is_due: bool = False
    """It is time for a checkpoint, which the first process says."""
    is_saving: bool = False
    """It still writes the last one."""
    order_bytes: int = 0
    """The size of a plan that is to be moved to, which the first process has."""
    copied: float = math.inf
    """The newest step of which its copy is safe; of a process without work any."""
    samples: int = 0
    """Digest of the samples of a replica, told by one of its ranks."""
    figures: RankFigures = RankFigures()  # noqa: RUF009 — it is frozen
    record: StepRecord | None = None
    """Of the plan's first rank."""
    evaluated: EvalRecord | None = None

    def row(self) -> list[float]:
        """The message as a row of numbers, as it travels."""
        record = [_number(getattr(self.record, name, None)) for name in _RECORD]
        evaluated = [math.nan] * 3 if self.evaluated is None else list(astuple(self.evaluated))
        own = self.lost_store, self.asked_to_end, self.is_due, self.is_saving, self.order_bytes, self.copied, self.samples
        return [*map(float, own), *astuple(self.figures), *record, *evaluated]

    @classmethod
    def of_row(cls, row: list[float]) -> StepMessage:
        """Back from numbers."""
        lost_store, asked, is_due, is_saving, order, copied, samples, *rest = row
        figures, known, evaluated = RankFigures(*rest[:_FIGURES]), rest[_FIGURES:-3], rest[-3:]
        record = None
        if not math.isnan(known[0]):  # the step, which each record has
            values = dict(zip(_RECORD, known, strict=True))
            record = StepRecord(**{name: _value(value, _RECORD[name]) for name, value in values.items() if not math.isnan(value)})
        found = None if math.isnan(evaluated[0]) else EvalRecord(int(evaluated[0]), *evaluated[1:])
        own = bool(lost_store), int(asked), bool(is_due), bool(is_saving), int(order), copied, int(samples)
        return cls(*own, figures, record, found)


class StepWatcher(Protocol):
    """Follows a run, in every process of the job, and carries out moves to other plans. The first process says when there is one."""

    measures: bool
    """Whether it wants figures."""
    exact: bool
    """Whether what it orders is to be in force with the next step, and not the one after it."""

    def after(self, step: int, ranks: Mapping[int, RankFigures]) -> Sequence[str]:
        """Takes the figures of all processes for a step, once they have agreed to go on after it, or the one after it; what to say about it
        in the first process."""

    def order(self, step: int) -> Plan | None:
        """The plan that is to be in force from `step` on, which comes next; asked of the first process."""

    def without(self, ranks: Sequence[int]) -> Plan | None:
        """The plan to move to when these ranks leave the job; None: there is none. Asked of the first process."""

    def move(self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object], members: Sequence[int] | None = None) -> bool:
        """Moves to `plan` before `step`, in all processes, of which `members` go on; `prepare` does what else has to succeed before
        anything changes. False: the old plan is in force as before."""

    def begin(self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object]) -> bool:
        """Begins a move to `plan` that travels while `step` runs under the old one, in all processes; False: `move` is as good."""

    def finish(self, step: int) -> bool:
        """Ends such a move before `step`. False: the old plan is in force as before."""

    def cancel(self) -> None:
        """The run ends before such a move does."""

    def moved(self, step: int, plan: Plan, pause_s: float) -> Sequence[str]:
        """The move has been, and training stood still for so long; what to say about it in the first process."""

    def close(self) -> None:
        """The run has ended."""


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _value(value: float, kind: str) -> float:
    return bool(value) if kind == "bool" else int(value) if kind.startswith("int") else value


def samples_digest(micro_batches: Iterable[MicroBatch]) -> int:
    """A digest of the samples of a replica in a step, whatever micro-batches they are in."""
    ids = [sample for micro in micro_batches for sample in micro.samples]
    return sum(int.from_bytes(hashlib.blake2b(str(one).encode(), digest_size=8).digest()) for one in ids) % 2**_DIGEST_BITS


def whole_digest(messages: Iterable[StepMessage]) -> str:
    """The digest of all samples of a step: the same whatever replicas they went to."""
    return f"{sum(one.samples for one in messages) % 2**_DIGEST_BITS:011x}"
