"""What a store does for planners and ranks, and what it needs of the server that holds its values."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.errors import InputError, PenstockError, plural

__all__ = ["ConnectionLost", "Job", "KeyValues", "Store", "StoreError"]

_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_KEY_BYTES = 16


class StoreError(PenstockError):
    """The store cannot serve: its server is gone, nobody published in time, or an entry was refused."""


class ConnectionLost(Exception):
    """The server did not answer; whoever asked may connect again and repeat."""


@dataclass(frozen=True)
class Job:
    """The job that all its processes agree on; its id is the first part of every key, its key authenticates every value."""

    id: str
    key: bytes = field(repr=False)
    num_ranks: int
    capacity: int = 4
    """Iterations in store at most: a publisher that is further ahead blocks."""
    first: int = 0
    """The first iteration of this run; those before it count as done."""
    away_s: float = 60.0
    """How long the server may be away before those who wait for it give up."""
    generation: int = 0
    """How many plans were adopted since the job began. Programs of each lie apart, so that nobody reads one of a plan that is gone."""

    def __post_init__(self) -> None:
        if not _JOB_ID.fullmatch(self.id):
            raise InputError(f"job id '{self.id}' is not a name of at most 64 letters, digits, '.', '_' and '-'.")
        if len(self.key) < _MIN_KEY_BYTES:
            raise InputError(f"the key of job '{self.id}' has {plural(len(self.key), 'byte')}; at least {_MIN_KEY_BYTES} are needed.")
        for name, value, least in (("num_ranks", self.num_ranks, 1), ("capacity", self.capacity, 1), ("first", self.first, 0)):
            if value < least:
                raise InputError(f"{name} of job '{self.id}' is {value}; it must be at least {least}.")
        if not 0 <= self.away_s < float("inf"):
            raise InputError(f"the store of job '{self.id}' may be away for {self.away_s} s; a number of seconds was expected.")

    def adopted(self, first: int, num_ranks: int) -> Job:
        """This job under its next plan, which begins at iteration `first`; all who agree on this job agree on that one."""
        return replace(self, first=first, num_ranks=num_ranks, generation=self.generation + 1)

    @classmethod
    def new(cls, num_ranks: int, *, capacity: int = 4, first: int = 0) -> Job:
        """A job of its own, with a fresh id and key."""
        return cls(secrets.token_hex(8), secrets.token_bytes(32), num_ranks, capacity, first)


class Store(Protocol):
    """Programs of a few iterations, each rank's own, from any number of planners to `num_ranks` readers.

    One object belongs to one thread; each planner and each rank opens its own. Everything may be repeated: publishing an
    iteration again changes nothing for ranks that have acknowledged it.
    """

    def publish(self, iteration: int, entries: Mapping[int, bytes]) -> None:
        """Stores one entry for every rank; blocks until fewer than `capacity` iterations are in store."""

    def fetch(self, iteration: int, rank: int) -> bytes:
        """This rank's entry, as soon as it is published; who asks for it needs none before it any more. Nothing, if it was called off."""

    def call_off(self, iteration: int, rank: int) -> None:
        """Ends a wait for an entry that nobody will publish, because the plan that it would be a program of is gone."""

    def acknowledge(self, iteration: int, rank: int) -> None:
        """Says that this rank needs no iteration up to this one any more; the last rank's word frees it."""

    def done(self) -> int:
        """The last iteration that all ranks have acknowledged: where a planner that replaces another begins after."""

    def drain(self) -> None:
        """Blocks until every iteration published here is freed, and meanwhile publishes again what a server forgets."""

    def purge(self) -> None:
        """Deletes everything of this job: what its owner does last."""

    def close(self) -> None:
        """Lets go of the connection."""


class KeyValues(Protocol):
    """The few things a server must be able to do; any of them may raise `ConnectionLost`."""

    where: str
    """The server in words, for messages; never with a password."""
    may_forget: bool
    """Whether the server may lose values and go on. One that ends with the job cannot, so a wait need not look after it."""

    def put(self, values: Mapping[str, bytes]) -> None:
        """Sets all of these, replacing what was there."""

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values that are there now, None for others."""

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Which of the keys are not there; cheaper than reading what may be large."""

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        """Blocks until the key is there, a few seconds at most where the server may forget; None if it did not come. The value stays."""

    def delete(self, keys: Sequence[str]) -> None:
        """Removes keys, those that are not there included."""

    def names(self, prefix: str) -> list[str]:
        """All keys that begin so."""

    def connect(self) -> None:
        """Connects, again if need be."""

    def close(self) -> None:
        """Lets go of the connection."""
