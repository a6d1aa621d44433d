"""A store whose server forgets: at every single step of planners and ranks, noticed or not, all of it or back to an older state."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stores import Job
from penstock.stores.protocol import ConnectionLost
from penstock.stores.ring import Ring

RANKS, PLANNERS, COUNT, CAPACITY = 2, 2, 4, 2
MOST_CALLS = 3000
"""About twenty times what an undisturbed run needs; more means that somebody waits in vain."""

Values = dict[str, bytes]
Fault = Callable[[list[Values]], Values]
"""What the server has after a fault, from what it had after each call so far."""


def everything(past: list[Values]) -> Values:
    return {}


def half_way_back(past: list[Values]) -> Values:
    return past[len(past) // 2]


def a_little_back(past: list[Values]) -> Values:
    return past[max(0, len(past) - 6)]


def every_other_key(past: list[Values]) -> Values:
    return dict(sorted(past[-1].items())[::2])


class Over(Exception):
    """Ends a planner whose ranks have all they need, as a run does."""


@dataclass
class World:
    """One server and the order in which its clients have their calls: threads that run one at a time, so that a run can be repeated."""

    order: random.Random
    faults: Mapping[int, Fault]
    noticed: bool
    """Whether clients lose their connections with it; otherwise nobody tells them."""
    past: list[Values] = field(default_factory=lambda: [{}])
    lost: set[int] = field(default_factory=set)
    clients: set[int] = field(default_factory=set)
    got: dict[int, list[bytes]] = field(default_factory=dict)
    gates: dict[int, threading.Lock] = field(default_factory=dict)
    """Of each client, closed until it is its turn."""

    def begin(self, clients: Collection[int]) -> None:
        self.clients = set(clients)
        self._next()

    @contextmanager
    def turn(self, client: int) -> Iterator[None]:
        assert self.gates[client].acquire(timeout=250)
        try:
            yield
        finally:
            self._next()

    def call(self, client: int, action: Callable[[Values], object]) -> object:
        with self.turn(client):
            return self._call(client, action)

    def _call(self, client: int, action: Callable[[Values], object]) -> object:
        values = dict(self.past[-1])
        result = action(values)
        self.past.append(values)
        calls = len(self.past) - 1
        if calls > MOST_CALLS:
            raise RuntimeError(f"nobody gets on; ranks have {self.got}")
        if calls in self.faults:
            self.past[-1] = self.faults[calls](self.past)
            self.lost = set(self.clients) if self.noticed else set()
        if client in self.lost:  # the call may have had its effect, but its answer is lost
            raise ConnectionLost("gone")
        return result

    def leave(self, client: int) -> None:
        with self.turn(client):
            self.clients.discard(client)

    def is_over(self) -> bool:
        return all(len(self.got[rank]) == COUNT for rank in range(RANKS)) and not self.clients & set(range(RANKS))

    def _next(self) -> None:
        if self.clients:
            self.gates[self.order.choice(sorted(self.clients))].release()


class Scripted:
    """One client's connection; a wait takes one turn and no time."""

    where = "a scripted server"
    may_forget = True

    def __init__(self, world: World, client: int) -> None:
        self._world, self._client = world, client

    def put(self, values: Mapping[str, bytes]) -> None:
        self._world.call(self._client, lambda there: there.update(values))

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        return self._world.call(self._client, lambda there: [there.get(key) for key in keys])  # type: ignore[return-value]

    def missing(self, keys: Sequence[str]) -> list[str]:
        return [key for key, value in zip(keys, self.read(keys), strict=True) if value is None]

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        if self._client >= RANKS and self._world.is_over():
            raise Over
        return self.read([key])[0]

    def delete(self, keys: Sequence[str]) -> None:
        self._world.call(self._client, lambda there: [there.pop(key, None) for key in keys])

    def names(self, prefix: str) -> list[str]:
        return self._world.call(self._client, lambda there: [key for key in there if key.startswith(prefix)])  # type: ignore[return-value]

    def connect(self) -> None:
        self._world.lost.discard(self._client)

    def close(self) -> None:
        pass

    def pass_turn(self) -> None:
        """Is busy elsewhere: neither says anything nor hears of a lost connection."""
        with self._world.turn(self._client):
            self._world.past.append(self._world.past[-1])
            assert len(self._world.past) < MOST_CALLS, f"nobody gets on; ranks have {self._world.got}"


def program(iteration: int, rank: int) -> bytes:
    return b"%d of %d" % (iteration, rank)


@cache
def threads() -> ThreadPoolExecutor:
    """One for each client, for thousands of jobs: to start them takes longer than most calls."""
    return ThreadPoolExecutor(RANKS + PLANNERS)


def play(faults: Mapping[int, Fault], *, noticed: bool, seed: int = 0) -> int:
    """A job whose ranks train in step: none goes on before all have their program. Returns the number of calls."""
    gates = {client: threading.Lock() for client in range(RANKS + PLANNERS)}
    for gate in gates.values():
        gate.acquire()
    world = World(random.Random(seed), faults, noticed, got={rank: [] for rank in range(RANKS)}, gates=gates)
    job = Job("job", bytes(32), RANKS, CAPACITY)

    def run(client: int, life: Callable[[Scripted, Ring, int], None]) -> None:
        values = Scripted(world, client)
        try:
            life(values, Ring(values, job, wait_s=250), client)
        except Over:
            pass
        finally:
            world.leave(client)

    def train(values: Scripted, ring: Ring, rank: int) -> None:
        for iteration in range(COUNT):
            world.got[rank].append(ring.fetch(iteration, rank))
            ring.acknowledge(iteration, rank)
            while min(map(len, world.got.values())) <= iteration - 1:  # one program is read ahead
                values.pass_turn()

    def plan(_: Scripted, ring: Ring, client: int) -> None:
        for iteration in range(client - RANKS, COUNT, PLANNERS):
            ring.publish(iteration, {rank: program(iteration, rank) for rank in range(RANKS)})
        ring.drain()

    pool = threads()
    ranks = [pool.submit(run, rank, train) for rank in range(RANKS)]
    planners = [pool.submit(run, RANKS + planner, plan) for planner in range(PLANNERS)]
    world.begin(range(RANKS + PLANNERS))
    for future in ranks + planners:
        future.result(250)
    assert world.got == {rank: [program(iteration, rank) for iteration in range(COUNT)] for rank in range(RANKS)}
    return len(world.past) - 1


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("fault", [everything, half_way_back, a_little_back, every_other_key])
def test_whatever_is_forgotten_after_any_call_every_rank_gets_every_program_once(fault: Fault, noticed: bool) -> None:
    for seed in range(3):
        for call in range(1, play({}, noticed=noticed, seed=seed) + 1):
            play({call: fault}, noticed=noticed, seed=seed)


faults = st.dictionaries(st.integers(1, 300), st.sampled_from([everything, half_way_back, a_little_back, every_other_key]), max_size=8)


@given(faults=faults, noticed=st.booleans(), seed=st.integers(0, 1000))
def test_many_faults_in_any_order_of_calls(faults: dict[int, Fault], noticed: bool, seed: int) -> None:
    play(faults, noticed=noticed, seed=seed)
