"""The promises of a store over every server: order, blocking, freeing, repetition, and that nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.stores import Job, StoreError, open_store
from penstock.stores.memory import MemoryValues
from penstock.stores.protocol import KeyValues
from penstock.stores.ring import Ring

Connect = Callable[[], KeyValues]


def payloads(iteration: int, num_ranks: int) -> dict[int, bytes]:
    return {rank: f"program {iteration} of {rank}".encode() + bytes(rank) for rank in range(num_ranks)}


def read_all(ring: Ring, rank: int, count: int) -> list[bytes]:
    got = []
    for iteration in range(ring.job.first, ring.job.first + count):
        got.append(ring.fetch(iteration, rank))
        ring.acknowledge(iteration, rank)
    return got


def test_every_rank_gets_its_own_in_order_from_several_planners(connect: Connect) -> None:
    job, planners, count = Job.new(3, capacity=4), 2, 24

    def plan(planner: int) -> None:
        ring = Ring(connect(), job, wait_s=250)
        for iteration in range(planner, count, planners):
            ring.publish(iteration, payloads(iteration, 3))
        ring.drain()

    with ThreadPoolExecutor(5) as pool:
        readers = [pool.submit(read_all, Ring(connect(), job, wait_s=250), rank, count) for rank in range(3)]
        planned = [pool.submit(plan, planner) for planner in range(planners)]
        for future in planned:
            future.result(250)
        for rank, reader in enumerate(readers):
            assert reader.result(250) == [payloads(iteration, 3)[rank] for iteration in range(count)]


def test_a_publisher_blocks_until_the_last_reader_of_the_oldest_iteration(connect: Connect) -> None:
    job = Job.new(2, capacity=2)
    writer, readers = Ring(connect(), job, wait_s=250), [Ring(connect(), job, wait_s=250) for _ in range(2)]
    writer.publish(0, payloads(0, 2))
    writer.publish(1, payloads(1, 2))
    published = threading.Event()
    thread = threading.Thread(target=lambda: (writer.publish(2, payloads(2, 2)), published.set()))
    thread.start()
    assert not published.wait(0.2)
    readers[0].acknowledge(0, 0)
    assert not published.wait(0.2)
    readers[1].acknowledge(0, 1)
    assert published.wait(250)
    thread.join()


def test_a_reader_waits_in_the_store_and_not_by_polling(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks once, before there is anything, and that one question is answered when there is."""
    job = Job.new(1)
    writer, values = Ring(connect(), job, wait_s=250), connect()
    reader, asked, usual = Ring(values, job, wait_s=250), threading.Semaphore(0), values.wait
    questions: list[str] = []
    monkeypatch.setattr(values, "wait", lambda key, limit_s: (questions.append(key), asked.release(), usual(key, limit_s))[2])
    for iteration in range(5):
        with ThreadPoolExecutor(1) as pool:
            woken = pool.submit(reader.fetch, iteration, 0)
            asked.acquire()
            writer.publish(iteration, {0: b"x"})
            assert woken.result() == b"x"
        reader.acknowledge(iteration, 0)
    assert len(questions) <= 5 * 2  # the first slice of a wait may be over on a busy machine; a poller would ask without end


def test_a_thousand_iterations_leave_few_keys_and_purge_leaves_none(connect: Connect) -> None:
    job, most = Job.new(2, capacity=4), 0
    ring, other = Ring(connect(), job, wait_s=250), connect()
    other.put({"penstock/another/entry/0/0": b"not ours"})
    for iteration in range(1000):
        ring.publish(iteration, payloads(iteration, 2))
        for rank in range(2):
            assert ring.fetch(iteration, rank) == payloads(iteration, 2)[rank]
            ring.acknowledge(iteration, rank)
        if iteration % 100 == 99:
            most = max(most, len(other.names(f"penstock/{job.id}/")))
    assert most <= 2 + 2 * job.capacity  # a mark for each rank, and what was freed last
    assert len(ring._kept) <= job.capacity
    ring.purge()
    assert other.names(f"penstock/{job.id}/") == []
    assert other.names("penstock/another/") == ["penstock/another/entry/0/0"]
    other.delete(["penstock/another/entry/0/0"])


def test_entries_stay_until_acknowledged_and_go_then(connect: Connect) -> None:
    job = Job.new(1)
    ring, look = Ring(connect(), job, wait_s=250), connect()
    ring.publish(0, {0: b"first"})
    assert ring.fetch(0, 0) == ring.fetch(0, 0) == b"first"
    ring.acknowledge(0, 0)
    assert [name for name in look.names(f"penstock/{job.id}/") if "/entry/" in name] == []
    ring.purge()


def test_a_job_that_resumes_does_not_wait_for_iterations_before_it(connect: Connect) -> None:
    job = Job.new(1, capacity=2, first=500)
    ring = Ring(connect(), job, wait_s=250)
    ring.publish(500, {0: b"a"})
    ring.publish(501, {0: b"b"})
    assert read_all(ring, 0, 2) == [b"a", b"b"]
    ring.publish(502, {0: b"c"})
    with pytest.raises(InputError, match="before the job's first, 500"):
        ring.publish(499, {0: b"d"})
    ring.purge()


def test_nobody_publishes(connect: Connect) -> None:
    with pytest.raises(StoreError, match=r"nothing came for 0\.2 s in .*rank 0 for its program of iteration 3"):
        Ring(connect(), Job.new(1), wait_s=0.2).fetch(3, 0)


def test_how_far_all_ranks_are(connect: Connect) -> None:
    job = Job.new(2, first=5)
    ring = Ring(connect(), job)
    assert ring.done() == 4
    ring.acknowledge(5, 0)
    assert ring.done() == 4
    ring.acknowledge(6, 1)
    assert Ring(connect(), job).done() == 5
    ring.purge()


def test_a_plan_that_is_adopted_has_entries_of_its_own(connect: Connect) -> None:
    """Programs of the plan before are not seen, a wait for one that never comes ends when it is called off, and purging takes them all."""
    job = Job.new(1)
    later = job.adopted(1, 2)
    before, after = Ring(connect(), job, wait_s=250), Ring(connect(), later, wait_s=250)
    before.publish(0, payloads(0, 1))
    before.publish(1, payloads(1, 1))
    after.publish(1, {0: b"new 0", 1: b"new 1"})
    assert (later.generation, later.first, later.num_ranks, later.key) == (1, 1, 2, job.key)
    assert [after.fetch(1, rank) for rank in range(2)] == [b"new 0", b"new 1"] and before.fetch(1, 0) == payloads(1, 1)[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(Ring(connect(), job, wait_s=250).fetch, 2, 0)
        before.call_off(2, 0)
        assert waiting.result(250) == b""
    before.purge()
    assert not connect().names(f"penstock/{job.id}/")


def test_jobs_do_not_see_each_other(connect: Connect) -> None:
    mine, other = Job.new(1), Job.new(1)
    writer, reader = Ring(connect(), mine), Ring(connect(), other, wait_s=0.2)
    writer.publish(0, {0: b"mine"})
    with pytest.raises(StoreError, match="nothing came"):
        reader.fetch(0, 0)
    writer.purge()


@pytest.mark.parametrize("forgery", [b"", b"short", b"PSK1" + bytes(32) + b"load rank 0"])
def test_a_forged_entry_is_refused(connect: Connect, forgery: bytes) -> None:
    job, values = Job.new(1), connect()
    values.put({f"penstock/{job.id}/entry/0/0": forgery})
    with pytest.raises(StoreError, match=r"store entry 'penstock/.*/entry/0/0'.* is refused"):
        Ring(values, job, wait_s=250).fetch(0, 0)
    values.delete([f"penstock/{job.id}/entry/0/0"])


def test_an_entry_replayed_for_another_iteration_or_cut_short_is_refused(connect: Connect) -> None:
    job, values = Job.new(1), connect()
    ring = Ring(values, job, wait_s=250)
    ring.publish(0, {0: b"program of iteration 0"})
    real = values.read([f"penstock/{job.id}/entry/0/0"])[0]
    assert real is not None
    for iteration, replayed in ((1, real), (2, real[:-1])):
        values.put({f"penstock/{job.id}/entry/{iteration}/0": replayed})
        with pytest.raises(StoreError, match=f"entry/{iteration}/0' .* its MAC does not match"):
            ring.fetch(iteration, 0)
    values.put({f"penstock/{job.id}/done/0": b"7"})
    with pytest.raises(StoreError, match=r"done/0'.* is refused"):
        ring.publish(1, {0: b""})
    values.delete(values.names(f"penstock/{job.id}/"))


def test_entries_for_the_wrong_ranks_are_refused() -> None:
    ring = Ring(MemoryValues(), Job.new(2))
    for entries in ({0: b""}, {0: b"", 2: b""}, {}):
        with pytest.raises(InputError, match="each of 2 needs one"):
            ring.publish(0, entries)


steps = st.lists(st.tuples(st.sampled_from(["publish", "again", "read", "say again"]), st.integers(0, 2)), max_size=60)


@given(capacity=st.integers(1, 3), steps=steps)
def test_any_repetition_leaves_what_a_plain_queue_would(capacity: int, steps: list[tuple[str, int]]) -> None:
    """A reference that only counts: published so far, and how far each of three ranks has read."""
    job, values = Job.new(3, capacity=capacity), MemoryValues()
    writer, readers = Ring(values, job, wait_s=0.01), [Ring(values, job, wait_s=0.01) for _ in range(3)]
    published, read = 0, [0, 0, 0]
    for what, rank in steps:
        if what == "publish" and published - min(read) < capacity:
            writer.publish(published, payloads(published, 3))
            published += 1
        elif what == "again" and published:
            writer.publish(published - 1, payloads(published - 1, 3))
        elif what == "read" and read[rank] < published:
            assert readers[rank].fetch(read[rank], rank) == payloads(read[rank], 3)[rank]
            readers[rank].acknowledge(read[rank], rank)
            read[rank] += 1
        elif what == "say again":
            writer._say_again()
            readers[rank]._say_again()
        entries = {name.split("entry/")[1] for name in values.names("") if "/entry/" in name}
        assert entries == {f"{i}/{r}" for r in range(3) for i in range(read[r], published)}
    if published - min(read) == capacity:
        with pytest.raises(StoreError):
            writer.publish(published, payloads(published, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "a/b"}, "job id 'a/b'"), ({"id": ""}, "job id ''"), ({"key": b"short"}, "has 5 bytes"),
        ({"num_ranks": 0}, "num_ranks"), ({"capacity": 0}, "capacity"), ({"first": -1}, "first"),
    ],
)  # fmt: skip
def test_a_job_must_make_sense(change: dict[str, object], message: str) -> None:
    fields = {"id": "job", "key": bytes(32), "num_ranks": 1, **change}
    with pytest.raises(InputError, match=message):
        Job(**fields)  # type: ignore[arg-type]


def test_a_jobs_key_is_not_shown() -> None:
    assert "secret" not in repr(Job("job", b"secret secret secret", 1))


@pytest.mark.parametrize("address", ["rediss", "http://localhost:80", "tcp://localhost", "tcp://localhost:x", "redis://localhost:99999/0"])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(InputError, match="address"):
        open_store(address, Job.new(1))
