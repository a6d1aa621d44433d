"""Profiling a processor as training will use it: as many processes as ranks, each with its share of the cores, all measuring at once.

One process alone would have all threads, and memory and caches to itself; training is then slower than it measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.profiling.run import Profiler
from penstock.profiling.units import Unit
from penstock.runtime.worker import Worker
from penstock.runtime.workers import WorkerPool

__all__ = ["measure_together"]


def measure_together(
    path: str | Path, units: Sequence[Unit], processes: int, *, time_budget_s: float = float("inf"), progress: Callable[[str], None]
) -> None:
    """Measures units into the profile at `path`, in step with the other processes, whose results are not kept."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    with WorkerPool(processes, threads=threads) as pool, tempfile.TemporaryDirectory() as folder:
        pool.run(_measure, str(path), folder, units, time_budget_s, listen=lambda rank, name: progress(name), timeout_s=24 * 3600.0)


def _measure(worker: Worker, path: str, folder: str, units: Sequence[Unit], time_budget_s: float) -> None:
    """A job for workers: each unit is begun by all of them together."""
    profiler = Profiler.open(Path(folder) / f"{worker.rank}.json" if worker.rank else path, "cpu")
    deadline = time.monotonic() + time_budget_s
    for unit in units:
        late = torch.tensor([time.monotonic() > deadline])
        dist.broadcast(late, 0)
        if late:
            return
        left_s = deadline - time.monotonic()
        profiler.run([unit], time_budget_s=left_s, progress=worker.tell if not worker.rank else lambda name: None)
    dist.barrier()
