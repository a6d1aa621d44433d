"""The store itself: a ring of iterations over any server of key-value pairs, in which every step may be repeated.

    keys (all under penstock/JOB/)    written by                          deleted by
    entry/7/3   program of rank 3     the planner of iteration 7          rank 3, when it acknowledges 7
    done/3      7                     rank 3, when it acknowledges 7      purge
    freed/7     -                     the rank that was last to be done   the rank that frees 7 + 2 × capacity

The planner of iteration i blocks on freed/(i - capacity), a rank on its entry; nothing is polled, and nothing counted: who
was last is seen from the `done` marks. So a step that a lost connection cut short is simply done again, and a server that
restarts empty is filled again by those who use it: planners publish what was not freed yet, ranks set their marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from penstock.errors import InputError
from penstock.stores.protocol import ConnectionLost, Job, KeyValues, StoreError
from penstock.stores.sealing import open_seal, seal

__all__ = ["Ring"]

T = TypeVar("T")

_FIRST_DELAY_S, _LAST_DELAY_S = 0.01, 1.0


class Ring:
    """A `Store` over a server; see the protocol for what its methods promise."""

    def __init__(self, values: KeyValues, job: Job, *, wait_s: float = 1800.0) -> None:
        self.job = job
        self._values = values
        self._wait_s = wait_s
        self._prefix = f"penstock/{job.id}/" + (f"{job.generation}/" if job.generation else "")
        self._kept: dict[int, dict[str, bytes]] = {}
        """Sealed entries published here and not known to be freed."""
        self._done: dict[int, int] = {}
        """Marks of the ranks that read here."""

    def publish(self, iteration: int, entries: Mapping[int, bytes]) -> None:
        """Stores one entry for every rank; blocks until fewer than `capacity` iterations are in store."""
        if sorted(entries) != list(range(self.job.num_ranks)):
            raise InputError(f"iteration {iteration} has entries for ranks {sorted(entries)}; each of {self.job.num_ranks} needs one.")
        if iteration < self.job.first:
            raise InputError(f"iteration {iteration} lies before the job's first, {self.job.first}.")
        if self.done() >= iteration:
            return
        self._await_freed(iteration - self.job.capacity, f"to make room for iteration {iteration}")
        names = {rank: self._entry(iteration, rank) for rank in entries}
        self._kept[iteration] = {names[rank]: seal(self.job.key, names[rank], entry) for rank, entry in entries.items()}
        self._persist(lambda: self._put_entries([iteration]))

    def fetch(self, iteration: int, rank: int) -> bytes:
        """This rank's entry, as soon as it is published."""
        return self._await(self._entry(iteration, rank), f"rank {rank} for its program of iteration {iteration}; is a planner at work?")

    def acknowledge(self, iteration: int, rank: int) -> None:
        """Says that this rank needs no iteration up to this one any more; the last rank's word frees it."""
        before = self._done.get(rank)
        if before is None:
            before = self._persist(self._marks)[rank]
        if iteration <= before:
            return
        self._done[rank] = iteration
        self._persist(lambda: self._put_mark(rank, before))

    def done(self) -> int:
        """The last iteration that all ranks have acknowledged."""
        return min(self._persist(self._marks))

    def drain(self) -> None:
        """Blocks until every iteration published here is freed."""
        for iteration in sorted(self._kept):
            self._await_freed(iteration, "for the last iterations to be read")

    def purge(self) -> None:
        """Deletes everything of this job."""
        self._forget()
        self._persist(lambda: self._values.delete(self._values.names(self._prefix)))

    def close(self) -> None:
        """Lets go of the connection."""
        self._forget()
        self._values.close()

    def _forget(self) -> None:
        self._kept.clear()
        self._done.clear()

    def _entry(self, iteration: int, rank: int) -> str:
        return f"{self._prefix}entry/{iteration}/{rank}"

    def _freed(self, iteration: int) -> str:
        return f"{self._prefix}freed/{iteration}"

    def _sealed_number(self, key: str, number: int) -> bytes:
        return seal(self.job.key, key, str(number).encode())

    def _numbers(self, keys: list[str]) -> list[int | None]:
        values = self._values.read(keys)
        return [None if value is None else int(open_seal(self.job.key, key, value)) for key, value in zip(keys, values, strict=True)]

    def _mark(self, rank: int) -> str:
        return f"{self._prefix}done/{rank}"

    def _marks(self) -> list[int]:
        """How far each rank is, by its mark."""
        before = self.job.first - 1
        return [before if mark is None else mark for mark in self._numbers([self._mark(rank) for rank in range(self.job.num_ranks)])]

    def _put_entries(self, iterations: Iterable[int]) -> None:
        """Puts entries, then takes back those of ranks that are past them: a rank sets its mark before it deletes its entry, so
        whichever of the two comes last sees the other's work."""
        for iteration in iterations:
            self._values.put(self._kept[iteration])
            if stale := [self._entry(iteration, rank) for rank, mark in enumerate(self._marks()) if mark >= iteration]:
                self._values.delete(stale)

    def _put_mark(self, rank: int, before: int) -> None:
        """Sets a rank's mark, drops its entries after `before`, and frees what all ranks are done with since then."""
        mark, key = self._done[rank], self._mark(rank)
        self._values.put({key: self._sealed_number(key, mark)})
        self._values.delete([self._entry(iteration, rank) for iteration in range(before + 1, mark + 1)])
        if freed := range(before + 1, min(self._marks()) + 1):
            self._values.put({self._freed(i): self._sealed_number(self._freed(i), i) for i in freed})
            self._values.delete([self._freed(i - 2 * self.job.capacity) for i in freed])

    def _await_freed(self, iteration: int, why: str) -> None:
        if iteration >= self.job.first:
            self._await(self._freed(iteration), why)
        for old in [kept for kept in self._kept if kept <= iteration]:
            del self._kept[old]

    def _await(self, key: str, why: str) -> bytes:
        """The value of a key once it is there; lost connections are repaired meanwhile."""
        deadline = time.monotonic() + self._wait_s
        value = self._persist(lambda: self._values.wait(key, max(0.0, deadline - time.monotonic())))
        if value is None:
            raise StoreError(f"nothing came for {self._wait_s:g} s in {self._values.where}: waited {why}")
        return open_seal(self.job.key, key, value)

    def _persist(self, action: Callable[[], T]) -> T:
        """Does it, again after each lost connection."""
        while True:
            try:
                return action()
            except ConnectionLost as lost:
                self._reconnect(lost)

    def _reconnect(self, lost: ConnectionLost) -> None:
        """Connects again, with growing pauses, and brings back what the server may have forgotten."""
        start, delay_s = time.monotonic(), _FIRST_DELAY_S
        while True:
            try:
                self._values.connect()
                return self._restore()
            except ConnectionLost as again:
                lost = again
            if (left_s := start + self.job.away_s - time.monotonic()) <= 0:
                raise StoreError(f"{self._values.where} has not answered for {self.job.away_s:g} s: {lost}")
            time.sleep(min(delay_s, left_s))
            delay_s = min(2 * delay_s, _LAST_DELAY_S)

    def _restore(self) -> None:
        self._put_entries(sorted(self._kept))
        for rank, mark in self._done.items():
            self._put_mark(rank, max(self.job.first - 1, mark - 2 * self.job.capacity))
