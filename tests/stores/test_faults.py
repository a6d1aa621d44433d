"""A real Redis server that is really killed: short absences are survived, long ones end cleanly, strangers are refused."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from stores.conftest import require_redis

from penstock.stores import Job, StoreError
from penstock.stores.redis import RedisValues
from penstock.stores.ring import Ring
from penstock.stores.server import RedisServer, start_redis

COUNT, RANKS = 60, 3


class Fragile:
    """A server that can be killed and started again in its place, empty."""

    def __init__(self) -> None:
        self.server = start_redis()

    @property
    def address(self) -> str:
        return self.server.address

    def kill(self) -> None:
        self.server.process.kill()
        self.server.process.wait()

    def start_again(self) -> None:
        self.server = start_redis(self.server.host, self.server.port, password=self.server.password)


@pytest.fixture
def fragile() -> Iterator[Fragile]:
    require_redis()
    made = Fragile()
    yield made
    made.server.process.send_signal(signal.SIGCONT)
    made.server.stop()


def ring(server: Fragile, job: Job, away_s: float = 250.0) -> Ring:
    return Ring(RedisValues(server.address), replace(job, away_s=away_s), wait_s=250.0)


def train(server: Fragile, pace_s: float, at: dict[int, Callable[[], None]]) -> tuple[list[list[bytes]], Job]:
    """Two planners and three ranks; when rank 0 reaches an iteration of `at`, something happens to the server."""
    job = Job.new(RANKS, capacity=4)

    def plan(planner: int) -> None:
        store = ring(server, job)
        for iteration in range(planner, COUNT, 2):
            store.publish(iteration, {rank: b"%d of %d" % (iteration, rank) for rank in range(RANKS)})
        store.drain()
        store.close()

    def run(rank: int) -> list[bytes]:
        store, got = ring(server, job), []
        for iteration in range(COUNT):
            if rank == 0 and iteration in at:
                at[iteration]()
            got.append(store.fetch(iteration, rank))
            time.sleep(pace_s * (1 + rank))
            store.acknowledge(iteration, rank)
        store.close()
        return got

    with ThreadPoolExecutor(RANKS + 2) as pool:
        ranks = [pool.submit(run, rank) for rank in range(RANKS)]
        planners: list[Future[None]] = [pool.submit(plan, planner) for planner in range(2)]
        for future in planners:
            future.result(250)
        return [future.result(250) for future in ranks], job


def expected() -> list[list[bytes]]:
    return [[b"%d of %d" % (iteration, rank) for iteration in range(COUNT)] for rank in range(RANKS)]


def left_over(server: Fragile, job: Job) -> list[str]:
    names = RedisValues(server.address).names(f"penstock/{job.id}/")
    ring(server, job).purge()
    assert RedisValues(server.address).names(f"penstock/{job.id}/") == []
    return [name for name in names if "/entry/" in name]


def test_a_server_that_is_killed_and_comes_back_empty_is_filled_again(fragile: Fragile) -> None:
    def fall() -> None:
        fragile.kill()
        threading.Timer(0.3, fragile.start_again).start()

    got, job = train(fragile, 0.002, {10: fall, 11: lambda: None, 30: fall, COUNT - 1: fall})
    assert got == expected()
    assert left_over(fragile, job) == []


AWKWARD = ["publish 0", "publish 1", "fetch 0", "acknowledge 0", "publish 2", "fetch 1", "acknowledge 1", "fetch 2", "acknowledge 2"]


@pytest.mark.parametrize("wakes_first", ["planner", "rank"])
def test_a_restart_between_any_two_calls_is_survived_by_clients_that_were_not_calling(fragile: Fragile, wakes_first: str) -> None:
    """Nobody is on the line while the server restarts, so nobody sees it; then a planner and a rank go on together."""
    for before in range(1, len(AWKWARD)):
        job = Job.new(1, capacity=2)
        planner, rank, got = ring(fragile, job), ring(fragile, job), []

        def plan(steps: list[str], store: Ring = planner) -> None:
            for iteration in [int(step.split()[1]) for step in steps if step.startswith("publish")]:
                store.publish(iteration, {0: b"%d" % iteration})

        def train(steps: list[str], store: Ring = rank, got: list[bytes] = got) -> None:
            for what, iteration in [step.split() for step in steps if not step.startswith("publish")]:
                if what == "fetch":
                    got.append(store.fetch(int(iteration), 0))
                else:
                    store.acknowledge(int(iteration), 0)

        for step in AWKWARD[:before]:
            plan([step])
            train([step])
        fragile.kill()
        fragile.start_again()
        later = AWKWARD[before:]
        with ThreadPoolExecutor(2) as pool:
            order = [lambda: (plan(later), planner.drain()), lambda: train(later)]  # noqa: B023
            first, second = order if wakes_first == "planner" else order[::-1]
            ends = [pool.submit(first)]
            time.sleep(0.05)
            ends.append(pool.submit(second))
            for end in ends:
                end.result(250)
        assert got == [b"0", b"1", b"2"], AWKWARD[before]
        assert left_over(fragile, job) == [], AWKWARD[before]


def test_keys_that_are_deleted_on_a_server_that_stays_up_are_put_again(fragile: Fragile) -> None:
    """As by a fail-over behind a proxy, or somebody's FLUSHALL: no connection is lost."""
    import redis

    admin = redis.Redis.from_url(fragile.address)
    got, job = train(fragile, 0.001, dict.fromkeys(range(5, COUNT, 5), admin.flushall))
    assert got == expected()
    ring(fragile, job).purge()
    admin.close()


def test_dropped_connections_are_made_again(fragile: Fragile) -> None:
    import redis

    admin = redis.Redis.from_url(fragile.address)
    got, job = train(fragile, 0.001, dict.fromkeys(range(5, COUNT, 5), lambda: admin.client_kill_filter(_type="normal", skipme=True)))  # type: ignore[arg-type]
    assert got == expected()
    assert left_over(fragile, job) == []
    admin.close()


def test_a_server_that_stays_away_ends_the_wait_with_a_message(fragile: Fragile) -> None:
    job = Job.new(1)
    reader = ring(fragile, job, away_s=0.5)
    threading.Timer(0.2, fragile.kill).start()
    with pytest.raises(StoreError, match=r"Redis at 127\.0\.0\.1:\d+ has not answered for 0\.5 s"):
        reader.fetch(0, 0)


def test_a_server_that_hangs_counts_as_gone(fragile: Fragile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stores.redis._ANSWER_S", 0.3)
    monkeypatch.setattr("penstock.stores.ring._LAST_SLICE_S", 0.1)
    reader = ring(fragile, Job.new(1), away_s=0.5)
    fragile.server.process.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreError, match="has not answered"):
        reader.fetch(0, 0)


def test_a_server_that_hangs_and_goes_on_is_survived(fragile: Fragile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stores.redis._ANSWER_S", 0.3)
    monkeypatch.setattr("penstock.stores.ring._LAST_SLICE_S", 0.1)
    job = Job.new(1)
    writer, reader = ring(fragile, job), ring(fragile, job)
    fragile.server.process.send_signal(signal.SIGSTOP)
    threading.Timer(1.0, lambda: fragile.server.process.send_signal(signal.SIGCONT)).start()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(reader.fetch, 0, 0)
        writer.publish(0, {0: b"late"})
        assert got.result(250) == b"late"


def test_a_wrong_password_is_told_at_once_and_not_shown(shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stores.redis._FIRST_CONNECT_S", 1000.0)  # whoever tries again runs into the test's time-out
    assert shared_redis.password is not None
    for login in (":wrong-word@", ""):
        with pytest.raises(StoreError, match="refuses us") as refused:
            RedisValues(f"redis://{login}{shared_redis.host}:{shared_redis.port}/0")
        assert "wrong-word" not in str(refused.value) and shared_redis.password not in str(refused.value)


def test_nothing_answers(monkeypatch: pytest.MonkeyPatch, shared_redis: RedisServer) -> None:
    monkeypatch.setattr("penstock.stores.redis._FIRST_CONNECT_S", 0.2)
    with pytest.raises(StoreError, match=r"does not answer.*[^.]\. Start one with: penstock store start"):
        RedisValues("redis://:word@127.0.0.1:1/0")
