"""The store itself: a ring of iterations over any server of key-value pairs, in which every step may be repeated.

    keys (all under penstock/JOB/)    written by                          deleted by
    entry/7/3   program of rank 3     the planner of iteration 7          rank 3, when it acknowledges 7
    done/3      7                     rank 3, when it acknowledges 7      purge
    freed/7     -                     the rank that was last to be done   the rank that frees 7 + 2 × capacity

A rank blocks on its entry, the planner of iteration i until all ranks are done with i - capacity.

The server may lose any of this at any moment, by a restart, a fail-over to a replica that lags, or an old snapshot that it starts from.
So nothing is true only because the server says it. Each fact has an owner that remembers it: a rank its mark, a planner the entries that
not all ranks have acknowledged. `freed` is no fact but a knock at the planner's door; the marks tell the same. Facts only ever grow (a mark
goes up, an entry is the same whenever it is published), so saying one again is harmless, and a reader may keep what it has once seen.

Whoever waits for a server that may forget, blocks for a short while at a time, and then, as after each lost connection, looks whether the
server still has its facts and says again what is missing. Why every program arrives, once the server stays up: let i be the first
iteration that some rank lacks.

- If i was published, its planner still keeps it, for not all ranks have acknowledged it. It is bound to wait soon, for room or in `drain`,
  and then puts the entry again. Only the rank itself, or a planner that has read the rank's own mark of i, deletes it.
- If not, nobody has i or anything later. All ranks have everything before i, so nothing but i holds them up, and each comes to wait for i.
  Then their marks are said, all of i - 1. The planner waits for room for an iteration up to i, so for marks of at most i - capacity: it
  reads them and goes on.

A rank asks for one iteration after the other, so it gets each once. A wait that makes no progress for `wait_s` ends with a `StoreError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from penstock.errors import InputError
from penstock.stores.protocol import ConnectionLost, Job, KeyValues, StoreError
from penstock.stores.sealing import open_seal, seal

__all__ = ["Ring"]

T = TypeVar("T")

_FIRST_DELAY_S, _LAST_DELAY_S = 0.01, 1.0
_FIRST_SLICE_S, _LAST_SLICE_S = 0.05, 2.0
"""How long a wait blocks before it looks whether the server has forgotten something; doubled each time."""


class Ring:
    """A `Store` over a server; see the protocol for what its methods promise."""

    def __init__(self, values: KeyValues, job: Job, *, wait_s: float = 1800.0) -> None:
        self.job = job
        self._values = values
        self._wait_s = wait_s
        self._prefix = f"penstock/{job.id}/" + (f"{job.generation}/" if job.generation else "")
        self._kept: dict[int, dict[int, bytes]] = {}
        """Sealed entries published here, by iteration and rank, that are not known to be acknowledged by all ranks."""
        self._done: dict[int, int] = {}
        """Marks of the ranks that read here."""
        self._seen = [job.first - 1] * job.num_ranks
        """How far each rank is at least: its highest mark that was seen here."""

    def publish(self, iteration: int, entries: Mapping[int, bytes]) -> None:
        """Stores one entry for every rank; blocks until fewer than `capacity` iterations are in store."""
        if sorted(entries) != list(range(self.job.num_ranks)):
            raise InputError(f"iteration {iteration} has entries for ranks {sorted(entries)}; each of {self.job.num_ranks} needs one.")
        if iteration < self.job.first:
            raise InputError(f"iteration {iteration} lies before the job's first, {self.job.first}.")
        if self.done() >= iteration:
            return
        self._await_freed(iteration - self.job.capacity, f"to make room for iteration {iteration}")
        sealed = {rank: seal(self.job.key, self._entry(iteration, rank), entry) for rank, entry in entries.items()}
        self._kept[iteration] = sealed
        self._persist(lambda: self._put_entries(iteration, sealed))

    def fetch(self, iteration: int, rank: int) -> bytes:
        """This rank's entry, as soon as it is published; who asks for it needs none before it any more. Nothing, if it was called off."""
        self._done.setdefault(rank, iteration - 1)
        return self._await(self._entry(iteration, rank), f"rank {rank} for its program of iteration {iteration}; is a planner at work?")

    def call_off(self, iteration: int, rank: int) -> None:
        """Ends a wait for an entry that nobody will publish."""
        key = self._entry(iteration, rank)
        self._persist(lambda: self._values.put({key: seal(self.job.key, key, b"")}))

    def acknowledge(self, iteration: int, rank: int) -> None:
        """Says that this rank needs no iteration up to this one any more; the last rank's word frees it."""
        before = self._done.get(rank)
        if before is None:
            before = self._persist(lambda: self._mark(rank))
        if iteration <= before:
            return
        self._done[rank] = iteration
        self._persist(lambda: self._put_mark(rank, before))

    def done(self) -> int:
        """The last iteration that all ranks have acknowledged."""
        self._persist(self._look)
        return min(self._seen)

    def drain(self) -> None:
        """Blocks until every iteration published here is freed."""
        self.done()
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

    def _done_key(self, rank: int) -> str:
        return f"{self._prefix}done/{rank}"

    def _sealed_number(self, key: str, number: int) -> bytes:
        return seal(self.job.key, key, str(number).encode())

    def _marks(self, ranks: Collection[int]) -> list[int]:
        """The progress of these ranks, by the marks that the server has."""
        keys = [self._done_key(rank) for rank in ranks]
        values, none = self._values.read(keys), self.job.first - 1
        return [none if value is None else int(open_seal(self.job.key, key, value)) for key, value in zip(keys, values, strict=True)]

    def _mark(self, rank: int) -> int:
        return self._marks([rank])[0]

    def _look(self) -> None:
        """Learns how far all ranks are."""
        self._seen = list(map(max, self._seen, self._marks(range(self.job.num_ranks))))

    def _put_entries(self, iteration: int, sealed: Mapping[int, bytes]) -> None:
        """Puts entries of an iteration, then takes back those of ranks that are past it: a rank sets its mark before it deletes its entry,
        so whichever of the two comes last sees the other's work."""
        self._values.put({self._entry(iteration, rank): entry for rank, entry in sealed.items()})
        self._look()
        if stale := [self._entry(iteration, rank) for rank in sealed if self._seen[rank] >= iteration]:
            self._values.delete(stale)

    def _put_mark(self, rank: int, before: int) -> None:
        """Sets a rank's mark, drops its entries after `before`, and tells planners what all ranks are done with since then."""
        mark, key = self._done[rank], self._done_key(rank)
        self._values.put({key: self._sealed_number(key, mark)})
        self._values.delete([self._entry(iteration, rank) for iteration in range(before + 1, mark + 1)])
        self._look()
        if freed := range(before + 1, min(self._seen) + 1):
            self._values.put({self._freed(i): self._sealed_number(self._freed(i), i) for i in freed})
            self._values.delete([self._freed(i - 2 * self.job.capacity) for i in freed])

    def _await_freed(self, iteration: int, why: str) -> None:
        """Blocks until all ranks are done with an iteration, and lets go of what they need no more."""
        if self._await(self._freed(iteration), why, lambda: min(self._seen) >= iteration):
            self._seen = [max(seen, iteration) for seen in self._seen]
        self._let_go()

    def _let_go(self) -> None:
        """Forgets entries that all ranks have acknowledged."""
        for old in [iteration for iteration in self._kept if iteration <= min(self._seen)]:
            del self._kept[old]

    def _await(self, key: str, why: str, is_known: Callable[[], bool] = lambda: False) -> bytes:
        """The value of a key once it is there, or an empty one once it is known what it would tell; meanwhile, what the server has
        forgotten is said again."""
        deadline = time.monotonic() + self._wait_s
        slice_s, last_slice_s = (_FIRST_SLICE_S, _LAST_SLICE_S) if self._values.may_forget else (self._wait_s, self._wait_s)
        while not is_known():
            if (left_s := deadline - time.monotonic()) <= 0:
                raise StoreError(f"nothing came for {self._wait_s:g} s in {self._values.where}: waited {why}")
            value = self._persist(lambda: self._values.wait(key, min(slice_s, left_s)))  # noqa: B023
            if value is not None:
                return open_seal(self.job.key, key, value)
            self._persist(self._say_again)
            slice_s = min(2 * slice_s, last_slice_s)
        return b""

    def _say_again(self) -> None:
        """Puts what was said here and the server no longer has: nothing, as a rule, and everything after it has restarted."""
        for rank, mark in self._done.items():
            if self._mark(rank) < mark:
                self._put_mark(rank, max(self.job.first - 1, mark - 2 * self.job.capacity))
        if self._kept:
            self._look()
        self._let_go()
        for iteration, entries in self._kept.items():
            names = {self._entry(iteration, rank): rank for rank in entries if self._seen[rank] < iteration}
            if missing := self._values.missing(list(names)):
                self._put_entries(iteration, {names[name]: entries[names[name]] for name in missing})

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
                return self._say_again()
            except ConnectionLost as again:
                lost = again
            if (left_s := start + self.job.away_s - time.monotonic()) <= 0:
                raise StoreError(f"{self._values.where} has not answered for {self.job.away_s:g} s: {lost}")
            time.sleep(min(delay_s, left_s))
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
