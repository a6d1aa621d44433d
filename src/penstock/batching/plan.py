"""What planning a batch gives: the micro-batches of each replica, how each device runs them, time and memory to expect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import InputError
from penstock.files import read_json
from penstock.models.micro_batch import MicroBatch
from penstock.notebooks import Shown
from penstock.schedules.actions import Schedule, format_schedule, parse_schedule

__all__ = ["VERSION", "BatchPlan", "ReplicaBatch", "SampleLengths", "read_batch_plan"]

VERSION = 1
_MOST = 1e30
"""Seconds and bytes: beyond it sums are no longer finite."""
_WRITTEN = ("samples", "layout", "lengths", "row_length", "dec_lengths", "dec_row_length", "recompute", "row_sizes")
"""What a file says of a micro-batch, by name; where it stands is its number."""


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """One sample of a global batch: its id and how many tokens it has (on the decoder's side too, where there is one)."""

    id: int
    length: int
    dec_length: int = 0


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
class BatchPlan(Shown):
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
    dropped: tuple[SampleLengths, ...] = ()
    """Samples left out because they fit nowhere."""
    truncated: tuple[SampleLengths, ...] = ()
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
    def longest(self) -> tuple[int, int]:
        """Tokens of the longest sample, and of the longest on the decoder's side."""
        all_ = [micro for replica in self.replicas for micro in replica.micro_batches]
        return max((max(one.lengths) for one in all_ if one.lengths), default=0), max((one.dec_row_length for one in all_), default=0)

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
            plain["micro_batches"] = [{name: getattr(micro, name) for name in _WRITTEN} for micro in replica.micro_batches]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "the batch plan") -> BatchPlan:
        """The plan that `to_dict` wrote."""
        if data.get("version") != VERSION:
            raise InputError(f"{where} has version {data.get('version')!r}; this is version {VERSION}. Plan the batch again.")
        plain = {key: value for key, value in data.items() if key != "version"}
        try:
            plain["replicas"] = [
                {
                    **one,
                    "schedule": parse_schedule("\n".join(one["schedule"])),
                    "micro_batches": [_array(index, micro) for index, micro in enumerate(one["micro_batches"])],
                }
                for one in plain["replicas"]
            ]
            found = msgspec.convert(plain, cls)
            _check(found)
            return found
        except (msgspec.ValidationError, KeyError, TypeError, ValueError) as error:
            raise InputError(f"{where} is not a batch plan: {error}. Write one with `penstock batch --out`.") from None


def _check(plan: BatchPlan) -> None:
    """Refuses numbers that no planner gives, and micro-batches whose samples have other numbers of lengths."""
    times = [plan.predicted_s, plan.bound_s, *(replica.predicted_s for replica in plan.replicas)]
    peaks = [peak for replica in plan.replicas for peak in replica.peak_bytes]
    limits = [limit for replica in plan.limit_bytes for limit in replica]  # of which some have none
    if wrong := [value for value in (*times, *peaks) if not 0 <= value <= _MOST] + [value for value in limits if not value >= 0]:
        raise ValueError(f"a time or a size is {wrong[0]}")
    for micro in (micro for replica in plan.replicas for micro in replica.micro_batches):
        for name, count in (("lengths", len(micro.lengths)), ("dec_lengths", len(micro.dec_lengths)), ("row_sizes", sum(micro.row_sizes))):
            if count not in (0, len(micro.samples)):
                raise ValueError(f"a micro-batch of {len(micro.samples)} samples has {name} of {count}")


def _array(index: int, written: Mapping[str, Any]) -> list[Any]:
    """A micro-batch as the array of its fields, which is how it is decoded, from what a file says of it by name."""
    fields = msgspec.structs.asdict(MicroBatch(index, (), "padded"))
    fields.update({name: written[name] for name in _WRITTEN if name in written or name in _WRITTEN[:3]})
    return list(fields.values())


def read_batch_plan(path: str | Path) -> BatchPlan:
    """A batch plan from a file."""
    data = read_json(path, "batch plan")
    if not isinstance(data, dict):
        raise InputError(f"batch plan '{path}' holds {type(data).__name__}, an object was expected.")
    return BatchPlan.from_dict(data, f"batch plan '{path}'")
