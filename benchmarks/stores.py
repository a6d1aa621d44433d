"""Round trip of a store: from `publish` until every rank has its program, over real processes on loopback.

    python benchmarks/stores.py [--ranks 8] [--iterations 1000] [--bytes 20000]

Prints one JSON line per kind of store and a table: median and 99th percentile of the round trip, keys left behind after the last
iteration and after the purge, and the growth of the publisher's memory between the first and the last tenth of the run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from typing import Any

from penstock.stores import Job
from penstock.stores.addresses import connect
from penstock.stores.ring import Ring


def read(address: str, job: Job, rank: int, iterations: int, arrivals: Any) -> None:
    """One rank: notes when each program arrived, then acknowledges it."""
    ring, times_s = Ring(connect(address), job, wait_s=60), []
    for iteration in range(iterations):
        ring.fetch(iteration, rank)
        times_s.append(time.monotonic())
        ring.acknowledge(iteration, rank)
    arrivals.put((rank, times_s))


def measure(name: str, address: str, num_ranks: int, iterations: int, size_bytes: int) -> dict[str, Any]:
    """Publishes one iteration at a time, as fast as the slowest rank reads."""
    job, context = Job.new(num_ranks, capacity=1), multiprocessing.get_context("spawn")
    arrivals = context.Queue()
    readers = [context.Process(target=read, args=(address, job, rank, iterations, arrivals)) for rank in range(num_ranks)]
    for reader in readers:
        reader.start()
    values = connect(address)
    ring, starts_s, memory_bytes = Ring(values, job, wait_s=60), [], []
    for iteration in range(iterations):
        ring._await_freed(iteration - 1, "")  # waiting for slow ranks is not part of the round trip
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=20_000, help="size of one rank's program")
    arguments = parser.parse_args()
    from penstock.stores.server import start_redis
    from penstock.stores.tcp import serve_tcp

    rows = []
    tcp, redis = serve_tcp(), start_redis()
    try:
        for name, address in (("TCPStore", f"tcp://127.0.0.1:{tcp.port}"), ("Redis", redis.address)):
            rows.append(measure(name, address, arguments.ranks, arguments.iterations, arguments.bytes))
            print(json.dumps(rows[-1]), flush=True)
    finally:
        redis.stop()
    print("| store | ranks | bytes each | median ms | p99 ms | entries left | keys after purge | memory growth |\n" + "|---" * 8 + "|")
    for r in rows:
        figures = (r["store"], r["ranks"], r["bytes_per_rank"], r["median_ms"], r["p99_ms"], r["entries_left"], r["keys_after_purge"])
        print("| " + " | ".join(map(str, figures)) + f" | {r['memory_growth_bytes'] / 1e6:.1f} MB |")


if __name__ == "__main__":
    main()
