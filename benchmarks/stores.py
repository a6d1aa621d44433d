"""Round trip of a store: from `publish` until every rank has its program, over real processes on loopback; and its restarts.

    python benchmarks/stores.py [--ranks 8] [--iterations 1000] [--bytes 20000]
    python benchmarks/stores.py --restarts 200 [--ranks 4] [--planners 2]

Prints one JSON line per kind of store and a table: median and 99th percentile of the round trip, keys left behind after the last
iteration and after the purge, and the growth of the publisher's memory between the first and the last tenth of the run.

With `--restarts`, a Redis server is killed and started again, empty, at random moments of one job: planners and ranks are processes, and
ranks train in step, so that one without a program holds up all. Prints one JSON line and ends with status 1 unless every program was
delivered to each rank exactly once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from penstock.stores import Job
from penstock.stores.addresses import connect
from penstock.stores.ring import Ring

_KEY = bytes(32)


def read(address: str, job: Job, rank: int, iterations: int, arrivals: Any) -> None:
    """One rank: notes when each program arrived, then acknowledges it."""
    ring, times_s = Ring(connect(address, job.key), job, wait_s=60), []
    for iteration in range(iterations):
        ring.fetch(iteration, rank)
        times_s.append(time.monotonic())
        ring.acknowledge(iteration, rank)
    arrivals.put((rank, times_s))


def measure(name: str, address: str, num_ranks: int, iterations: int, size_bytes: int) -> dict[str, Any]:
    """Publishes one iteration at a time, as fast as the slowest rank reads."""
    job, context = Job("job", _KEY, num_ranks, capacity=1), multiprocessing.get_context("spawn")
    arrivals = context.Queue()
    readers = [context.Process(target=read, args=(address, job, rank, iterations, arrivals)) for rank in range(num_ranks)]
    for reader in readers:
        reader.start()
    values = connect(address, job.key)
    ring, starts_s, memory_bytes = Ring(values, job, wait_s=60), [], []
    for iteration in range(iterations):
        ring.drain()  # waiting for slow ranks is not part of the round trip
        starts_s.append(time.monotonic())
        ring.publish(iteration, {rank: bytes(size_bytes) for rank in range(num_ranks)})
        memory_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    ring.drain()
    arrived = [arrivals.get(timeout=60)[1] for _ in readers]
    for reader in readers:
        reader.join(60)
    left = len([key for key in values.names(f"penstock/{job.id}/") if "/entry/" in key])
    ring.purge()
    purged = len(values.names(f"penstock/{job.id}/"))
    ring.close()
    warm = iterations // 10
    trips_s = [max(times[i] for times in arrived) - start_s for i, start_s in enumerate(starts_s)][warm:]
    return {
        "store": name, "ranks": num_ranks, "bytes_per_rank": size_bytes, "iterations": iterations,
        "median_ms": round(1e3 * statistics.median(trips_s), 3), "p99_ms": round(1e3 * statistics.quantiles(trips_s, n=100)[98], 3),
        "entries_left": left, "keys_after_purge": purged, "memory_growth_bytes": memory_bytes[-1] - memory_bytes[warm],
    }  # fmt: skip


_PACES_S = 0.0, 0.002, 0.02, 0.1
"""What planning an iteration and loading it may take."""


def _program(iteration: int, rank: int) -> bytes:
    return b"%d of %d" % (iteration, rank)


def plan_until(address: str, job: Job, planner: int, planners: int, last: Any) -> None:
    """One planner: every `planners`-th iteration, up to the last one that the ranks are to train; now faster than they, now slower."""
    ring, pace, iteration = Ring(connect(address, job.key), job, wait_s=60), random.Random(-1 - planner), planner
    while last.value < 0 or iteration <= last.value:
        time.sleep(pace.choice(_PACES_S))
        ring.publish(iteration, {rank: _program(iteration, rank) for rank in range(job.num_ranks)})
        iteration += planners
    ring.drain()


def train_until(address: str, job: Job, rank: int, last: Any, progress: Any, in_step: Any, results: Any) -> None:
    """One rank: trains up to the iteration `last`, once that is known, some milliseconds for each; tells what it got, and its waits."""
    ring, pace, got, waits_s = Ring(connect(address, job.key), job, wait_s=60), random.Random(rank), Counter[bytes](), []
    iteration = 0
    while last.value < 0 or iteration <= last.value:
        start_s = time.monotonic()
        got[ring.fetch(iteration, rank)] += 1
        waits_s.append(time.monotonic() - start_s)
        time.sleep(pace.choice(_PACES_S))
        ring.acknowledge(iteration, rank)
        in_step.wait(120)  # a step of training ends for all or for none
        progress[rank] = iteration
        iteration += 1
    results.put((rank, got, max(waits_s)))


def restart(num_ranks: int, planners: int, restarts: int) -> dict[str, Any]:
    """Kills the server and starts it again, so many times, each a random time after the ranks have gone on since the last one."""
    from penstock.stores.server import start_redis

    server, context, moments = start_redis(), multiprocessing.get_context("spawn"), random.Random(0)
    job = replace(Job.new(num_ranks), away_s=60.0)
    last, progress = context.Value("q", -1), context.Array("q", [-1] * num_ranks)
    in_step, results = context.Barrier(num_ranks), context.Queue()
    common = server.address, job
    trained = [context.Process(target=train_until, args=(*common, rank, last, progress, in_step, results)) for rank in range(num_ranks)]
    planned = [context.Process(target=plan_until, args=(*common, planner, planners, last), daemon=True) for planner in range(planners)]
    start_s = time.monotonic()
    try:
        for process in trained + planned:
            process.start()
        for _ in range(restarts):
            _await_progress(progress, trained)
            time.sleep(moments.uniform(0, 0.1))
            server.process.kill()
            server.process.wait()
            time.sleep(moments.choice((0.0, 0.02, 0.2)))
            server = start_redis(server.host, server.port, password=server.password)
        _await_progress(progress, trained)
        last.value = max(progress) + 10 * job.capacity
        found = [results.get(timeout=120) for _ in trained]
    finally:
        for process in trained + planned:
            process.kill()
        server.stop()
    wanted = {rank: {_program(iteration, rank) for iteration in range(last.value + 1)} for rank in range(num_ranks)}
    return {
        "restarts": restarts, "ranks": num_ranks, "planners": planners, "iterations": last.value + 1,
        "delivered": sum(len(wanted[rank] & got.keys()) for rank, got, _ in found),
        "duplicated": sum(count - 1 for _, got, _ in found for count in got.values()),
        "lost": sum(len(wanted[rank] - got.keys()) for rank, got, _ in found),
        "longest_wait_s": round(max(wait_s for _, _, wait_s in found), 2), "time_s": round(time.monotonic() - start_s, 1),
    }  # fmt: skip


def _await_progress(progress: Any, trained: list[Any]) -> None:
    """Blocks until all ranks have trained an iteration from now on; a job that does not get on any more is an error."""
    before, deadline = max(progress), time.monotonic() + 120
    while min(progress) <= before:
        if time.monotonic() > deadline or any(process.exitcode is not None for process in trained):
            raise SystemExit(f"the job hangs or has failed; its ranks have trained up to iterations {list(progress)}")
        time.sleep(0.002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=None, help="8, or 4 with --restarts")
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=20_000, help="size of one rank's program")
    parser.add_argument("--restarts", type=int, default=0, help="restart a Redis server so often, instead of measuring")
    parser.add_argument("--planners", type=int, default=2, help="planner processes of --restarts")
    arguments = parser.parse_args()
    if arguments.restarts:
        found = restart(arguments.ranks or 4, arguments.planners, arguments.restarts)
        print(json.dumps(found))
        sys.exit(found["duplicated"] > 0 or found["lost"] > 0)
    from penstock.stores.server import start_redis
    from penstock.stores.tcp_server import TcpServer

    rows = []
    tcp, redis = TcpServer(_KEY), start_redis()
    try:
        for name, address in (("the launcher's", f"tcp://127.0.0.1:{tcp.port}"), ("Redis", redis.address)):
            rows.append(measure(name, address, arguments.ranks or 8, arguments.iterations, arguments.bytes))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        redis.stop()
        tcp.close()
    print("| store | ranks | bytes each | median ms | p99 ms | entries left | keys after purge | memory growth |\n" + "|---" * 8 + "|")
    for r in rows:
        figures = (r["store"], r["ranks"], r["bytes_per_rank"], r["median_ms"], r["p99_ms"], r["entries_left"], r["keys_after_purge"])
        print("| " + " | ".join(map(str, figures)) + f" | {r['memory_growth_bytes'] / 1e6:.1f} MB |")


if __name__ == "__main__":
    main()
