"""What planning a batch gives: the micro-batches of each replica, how each device runs them, time and memory to expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InputError
from penstock.files import read_json
from penstock.models.shapes import Layout, Shape
from penstock.schedules.actions import Schedule, format_schedule, parse_schedule

__all__ = ["VERSION", "BatchPlan", "MicroBatch", "ReplicaBatch", "Sample", "read_batch_plan"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a global batch: its id and how many tokens it has (on the decoder's side too, where there is one)."""

    id: int
    length: int
    dec_length: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that run together."""

    samples: tuple[int, ...]
    """Their ids, row by row (padded) or in the order in which they lie end to end (packed)."""
    layout: Layout
    lengths: tuple[int, ...]
    """Token positions that each sample really fills."""
    row_length: int = 0
    """Tokens each row is padded to; 0 for a packed micro-batch, which has no rows."""
    dec_lengths: tuple[int, ...] = ()
    dec_row_length: int = 0
    recompute: tuple[int, ...] = ()
    """For each stage, which of its recomputation patterns (`Stage.recompute`) this micro-batch uses."""
    row_sizes: tuple[int, ...] = ()
    """How many samples share each row, attending across each other; empty where each has a row of its own."""

    @property
    def num_rows(self) -> int:
        """Rows of a padded micro-batch, sequences of a packed one."""
        return len(self.row_sizes) or len(self.samples)

    @property
    def shape(self) -> Shape:
        """What the whole micro-batch costs by."""
        if self.layout == "packed":
            return Shape.packed(self.lengths, self.dec_lengths)
        return Shape.padded(self.num_rows, self.row_length, self.dec_row_length)

    @property
    def num_tokens(self) -> int:
        """Tokens that count, both sides, padding left out."""
        return sum(self.lengths) + sum(self.dec_lengths)

    @property
    def num_positions(self) -> int:
        """Tokens that are computed, padding included."""
        return self.shape.tokens + self.shape.dec_tokens

    def shares(self, dp: int) -> tuple[tuple[int, int], ...]:
        """Positions [first, last) in `samples` of each of `dp` ranks: equal rows if padded, about equal tokens if packed.

        The shares follow each other, so that stages of different dp exchange whole neighbouring pieces.
        """
        if self.row_sizes:
            ends = _running(self.row_sizes)
            rows = _equal_cuts(len(self.row_sizes), dp)
            return tuple((ends[first], ends[last]) for first, last in rows)
        if self.layout == "padded":
            return _equal_cuts(len(self.samples), dp)
        return _balanced_cuts([n + m for n, m in zip(self.lengths, self.dec_lengths or (0,) * len(self.lengths), strict=True)], dp)

    def share(self, dp: int, index: int) -> MicroBatch:
        """The part that rank `index` of `dp` works on."""
        first, last = self.shares(dp)[index]
        sizes = self.row_sizes
        if sizes:
            low, high = _equal_cuts(len(sizes), dp)[index]
            sizes = sizes[low:high]
        return replace(
            self, samples=self.samples[first:last], lengths=self.lengths[first:last], dec_lengths=self.dec_lengths[first:last],
            row_sizes=sizes,
        )  # fmt: skip


def _running(sizes: tuple[int, ...]) -> list[int]:
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    return ends


def _equal_cuts(count: int, parts: int) -> tuple[tuple[int, int], ...]:
    """[first, last) of each part, the larger ones first."""
    small, extra = divmod(count, parts)
    ends = [part * small + min(part, extra) for part in range(parts + 1)]
    return tuple(pairwise(ends))


def _balanced_cuts(weights: list[int], parts: int) -> tuple[tuple[int, int], ...]:
    """Consecutive parts, each ending where the running sum is nearest to its share."""
    ends, total, running, at = [0], sum(weights), 0, 0
    for part in range(1, parts):
        goal = total * part / parts
        while at < len(weights) and abs(running + weights[at] - goal) <= abs(running - goal):
            running += weights[at]
            at += 1
        ends.append(at)
    ends.append(len(weights))
    return tuple(pairwise(ends))


@dataclass(frozen=True)
class ReplicaBatch:
    """What one replica does in one iteration."""

    micro_batches: tuple[MicroBatch, ...]
    """In the order in which they enter the pipeline; an action's `micro_batch` is the position here."""
    schedule: Schedule
    """The actions of each device (one device group per stage)."""
    predicted_s: float
    """From the first forward to the last backward pass."""
    peak_bytes: tuple[float, ...]
    """Memory of the fullest device of each stage at its fullest moment, model state included."""
    order: str = "planned"
    """How the schedule was made: `planned`, 1F1B with the forward passes ahead that memory allows, or the order that was found better."""

    @cached_property
    def warm_up(self) -> tuple[int, ...]:
        """Forward passes that each device runs before its first backward pass."""
        firsts = ([at for at, action in enumerate(actions) if action.kind == 1] for actions in self.schedule)
        return tuple(found[0] if found else 0 for found in firsts)


@dataclass(frozen=True)
class BatchPlan:
    """One global batch, planned."""

    replicas: tuple[ReplicaBatch, ...]
    predicted_s: float
    """The slowest replica, and what follows once per iteration."""
    bound_s: float
    """No plan of this batch under these costs takes less."""
    limit_bytes: tuple[tuple[float, ...], ...]
    """Memory that may be used on each stage of each replica."""
    costs: str
    """The source of costs."""
    steps: int = 0
    """Steps of search that were spent."""
    dropped: tuple[Sample, ...] = ()
    """Samples left out because they fit nowhere."""
    truncated: tuple[Sample, ...] = ()
    """Samples cut to the length that fits, with the length they had."""
    method: str = "planned"
    """How the micro-batches were made: `planned`, or the name of a baseline."""

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of all replicas."""
        return sum(len(replica.micro_batches) for replica in self.replicas)

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        return max((peak for replica in self.replicas for peak in replica.peak_bytes), default=0.0)

    @property
    def num_tokens(self) -> int:
        """Tokens that count, in all micro-batches."""
        return sum(batch.num_tokens for replica in self.replicas for batch in replica.micro_batches)

    @property
    def padding_share(self) -> float:
        """Computed token positions that hold padding, as a share of all."""
        positions = sum(batch.num_positions for replica in self.replicas for batch in replica.micro_batches)
        return 1.0 - self.num_tokens / positions if positions else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data; a schedule is one line of text per device."""
        data: dict[str, Any] = {"version": VERSION, **msgspec.to_builtins(self)}
        for replica, plain in zip(self.replicas, data["replicas"], strict=True):
            plain["schedule"] = format_schedule(replica.schedule).split("\n") if replica.schedule else []
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the batch plan") -> BatchPlan:
        """The plan that `to_dict` wrote."""
        if data.get("version") != VERSION:
            raise InputError(f"{where} has version {data.get('version')!r}; this is version {VERSION}. Plan the batch again.")
        plain = {key: value for key, value in data.items() if key != "version"}
        try:
            plain["replicas"] = [{**one, "schedule": parse_schedule("\n".join(one["schedule"]))} for one in plain["replicas"]]
            return msgspec.convert(plain, cls)
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise InputError(f"{where} is not a batch plan: {error}. Write one with `penstock batch --out`.") from None


def read_batch_plan(path: str | Path) -> BatchPlan:
    """A batch plan from a file."""
    data = read_json(path, "batch plan")
    if not isinstance(data, dict):
        raise InputError(f"batch plan '{path}' holds {type(data).__name__}, an object was expected.")
    return BatchPlan.from_dict(data, f"batch plan '{path}'")
