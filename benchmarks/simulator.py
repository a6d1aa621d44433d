"""How fast the simulators are, and what the schedules give on a few pipelines.

    python benchmarks/simulator.py              both tables
    python benchmarks/simulator.py --json       the same as one JSON object

Speed is actions per second of one core, the best of several runs in a warm process: CPU time, with wall time beside it. Pipelines have
backward passes of twice the forward time, half of it weight gradients; unequal micro-batches have log-normal costs (seeded) and hold
bytes in proportion. Memory is told in micro-batches of mean size, and limited to what 1F1B's first stage holds of equal ones, times
1.5 for unequal ones; named schedules that exceed it are shown with a star.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.ordering.adaptive import adaptive
from penstock.ordering.annealing import best_schedule
from penstock.ordering.greedy import best_greedy
from penstock.schedules.actions import Schedule
from penstock.schedules.orders import one_forward_one_backward
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import event_arrays
from penstock.timing.order_memory import in_flight, order_peak_bytes
from penstock.timing.simulator import as_arrays, simulate
from penstock.timing.workload import Workload, split_backward, workload_of

_PIPELINES = ((4, 8), (4, 32), (8, 8), (8, 32))
_RUNS = 15


def speeds(num_stages: int = 8, count: int = 4096) -> list[dict[str, Any]]:
    """Actions per second of both simulators on 1F1B."""
    numbers = np.random.default_rng(0)
    work = workload_of(
        numbers.random((2, num_stages, count)), numbers.random((2, num_stages - 1, count)) / 4, contention="pair", stored_bytes=1,
        workspace_bytes=0.5, message_bytes=0.25, limit_bytes=num_stages, after_s=1,
    )  # fmt: skip
    schedule = one_forward_one_backward(num_stages, count)
    paths = [("fixed orders, no contention", _fast(schedule, work)), ("contention and memory over time", _whole(schedule, work))]
    return [{"path": name, **_measure(run, 2 * num_stages * count)} for name, run in paths]


def _measure(run: Callable[[], Callable[[], object]], num_actions: int) -> dict[str, float]:
    """The best of several runs; `run` prepares one outside of the clock."""
    cpu = wall = float("inf")
    for _ in range(_RUNS):
        ready = run()
        wall_start, cpu_start = time.perf_counter(), time.process_time()
        ready()
        cpu, wall = min(cpu, time.process_time() - cpu_start), min(wall, time.perf_counter() - wall_start)
    return {"actions": num_actions, "actions_per_cpu_s": num_actions / cpu, "actions_per_wall_s": num_actions / wall}


def _fast(schedule: Schedule, work: Workload) -> Callable[[], Callable[[], object]]:
    from penstock.timing.clock import Orders, run_orders

    orders = Orders(*as_arrays(schedule))

    def prepare() -> Callable[[], object]:
        start, end = (np.full(work.durations_s.shape, np.inf) for _ in range(2))
        return lambda: run_orders(orders, work.durations_s, work.transfers_s, start, end)

    return prepare


def _whole(schedule: Schedule, work: Workload) -> Callable[[], Callable[[], object]]:
    from penstock.timing.event_clock import run_events

    def prepare() -> Callable[[], object]:
        arrays = event_arrays(schedule, work)
        return lambda: run_events(*arrays)

    return prepare


def pipeline(num_stages: int, count: int, unequal: bool, chunks: int = 1) -> Workload:
    """One pipeline of the table; a stage takes 3 seconds of work for a micro-batch of mean cost, a chunk its share of that."""
    costs = np.random.default_rng(count).lognormal(0, 0.6, count) if unequal else np.ones(count)
    costs /= costs.mean()
    forward = np.tile(costs / chunks, (num_stages * chunks, 1))
    return workload_of(
        split_backward(np.stack([forward, 2 * forward]), forward), forward[1:] / 50, stored_bytes=forward,
        devices=[stage % num_stages for stage in range(num_stages * chunks)],
        limit_bytes=min(num_stages, count) * (1.5 if unequal else 1.0),
    )  # fmt: skip


def comparison(num_steps: int) -> list[dict[str, Any]]:
    """Every schedule on every pipeline."""
    rows = []
    for num_stages, count in _PIPELINES:
        for unequal in (False, True):
            work = pipeline(num_stages, count, unequal)
            chunked = pipeline(num_stages, count, unequal, chunks=2)
            makers: list[tuple[str, Workload, Callable[[Workload], Schedule]]] = [
                *((name, work, lambda w, name=name: schedule_of(name, w.num_stages, w.num_micro_batches))  # type: ignore[misc]
                  for name in ("gpipe", "1f1b", "zero-bubble")),
                ("interleaved", chunked, lambda w: schedule_of("interleaved", w.num_stages, w.num_micro_batches, 2)),
                ("adaptive", work, adaptive),
                ("greedy", work, best_greedy),
                ("search", work, lambda w: best_schedule(w, num_steps).schedule),
                ("search, 2 chunks", chunked, lambda w: best_schedule(w, num_steps).schedule),
            ]  # fmt: skip
            rows += [_row(num_stages, count, unequal, name, own, make) for name, own, make in makers]
    return rows


def _row(num_stages: int, count: int, unequal: bool, name: str, work: Workload, make: Callable[[Workload], Schedule]) -> dict[str, Any]:
    make(work)
    began = time.process_time()
    schedule = make(work)
    spent = time.process_time() - began
    makespan_s = simulate(schedule, work.durations_s, work.transfers_s).makespan_s
    busy_s = max(float(work.durations_s[:2, work.stages_of(device)].sum()) for device in range(work.num_devices))
    peaks = order_peak_bytes(schedule, work)
    return {
        "stages": num_stages, "micro_batches": count, "costs": "unequal" if unequal else "equal", "schedule": name,
        "makespan_s": makespan_s, "bubble_share": 1 - busy_s / makespan_s, "in_flight": max(in_flight(schedule).by_device),
        "peak": float(peaks.max()), "fits": bool((peaks <= work.limit_bytes * (1 + 1e-9)).all()), "cpu_s": spent,
    }  # fmt: skip


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=50_000, help="steps of the schedule search")
    options = parser.parse_args()
    found = {"speed": speeds(), "schedules": comparison(options.steps)}
    if options.json:
        print(json.dumps(found))
        return
    print(f"{'simulator':34}{'actions':>9}{'M actions/CPU s':>17}{'M actions/s':>13}")
    for row in found["speed"]:
        print(f"{row['path']:34}{row['actions']:>9}{row['actions_per_cpu_s'] / 1e6:>17.1f}{row['actions_per_wall_s'] / 1e6:>13.1f}")
    print(f"\n{'pipeline':28}{'schedule':18}{'makespan':>9}{'bubble':>8}{'in flight':>11}{'peak':>7}{'CPU ms':>9}")
    for row in found["schedules"]:
        name = f"{row['stages']} stages, {row['micro_batches']} {row['costs']}"
        print(
            f"{name:28}{row['schedule']:18}{row['makespan_s']:>9.2f}{row['bubble_share']:>8.1%}{row['in_flight']:>11}"
            f"{row['peak']:>6.1f}{' ' if row['fits'] else '*'}{row['cpu_s'] * 1e3:>9.1f}"
        )


if __name__ == "__main__":
    main()
