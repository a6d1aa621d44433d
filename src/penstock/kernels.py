"""Compiles every numba kernel once, so that no command waits for a compiler later: `python -m penstock.kernels`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

__all__ = ["KERNEL_MODULES", "borrowing", "compile_all", "compile_in_parallel"]

# Modules that import numba at the top, those that take longest first. Each has `warm()`, which calls its kernels once on tiny arrays of
# the types used in earnest; `cache=True` keeps the result on disk. Nothing but the function that needs a kernel imports these.
KERNEL_MODULES: tuple[str, ...] = (
    "penstock.batching.anneal_kernels",
    "penstock.systems.fasop.kernels",
    "penstock.systems.fasop.bound_kernels",
    "penstock.search.partition.chain_kernels",
    "penstock.search.partition.counting_kernels",
    "penstock.search.partition.partition_kernels",
    "penstock.search.partition.annealing_kernels",
    "penstock.search.space.recompute_kernels",
    "penstock.batching.kernels",
    "penstock.batching.bounds.column_kernels",
    "penstock.timing.event_clock",
    "penstock.timing.clock",
    "penstock.timing.special_clocks",
    "penstock.ordering.annealing_kernels",
    "penstock.ordering.greedy_kernels",
    "penstock.search.op_degrees.mixed_kernels",
    "penstock.search.interleaved.balance_kernels",
    "penstock.search.replicas.common_kernels",
    "penstock.search.bounds.path_kernels",
    "penstock.search.partition.simplex_kernels",
)


def borrowing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a step of a kernel that makes no arrays: it only borrows those of its caller, and costs what its lines there would.

    As an ordinary function it would count references to every array of every NamedTuple at each call, and copy their descriptions, which
    can take thirty times as long as what it does.
    """
    from numba import njit
    from numba.core.options import DefaultOptions

    # Not part of numba's documented options: a release that has none is slower, and as right.
    uncounted = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}
    compiled: Callable[..., Any] = njit(cache=True, nogil=True, forceinline=True, **uncounted)(function)
    return compiled


def compile_all(modules: Sequence[str] = KERNEL_MODULES) -> float:
    """Warms each module in turn, telling progress on stdout; returns the seconds it all took."""
    start = time.perf_counter()
    for index, name in enumerate(modules, start=1):
        print(f"[{index}/{len(modules)}] {name} ...", end=" ", flush=True)
        print(f"{_warmed(name)[1]:.1f} s", flush=True)
    time_s = time.perf_counter() - start
    print(f"{len(modules)} kernel modules ready in {time_s:.1f} s")
    return time_s


def compile_in_parallel() -> None:
    """Compiles all in as many processes as there are processors; what they leave on disk serves everyone."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    start, done = time.perf_counter(), 0
    with ProcessPoolExecutor(min(len(KERNEL_MODULES), os.cpu_count() or 1), get_context("spawn")) as pool:
        for name, took_s in pool.map(_warmed, KERNEL_MODULES):
            done += 1
            print(f"[{done}/{len(KERNEL_MODULES)}] {name} {took_s:.1f} s", flush=True)
    print(f"{len(KERNEL_MODULES)} kernel modules ready in {time.perf_counter() - start:.1f} s")


def _warmed(name: str) -> tuple[str, float]:
    start = time.perf_counter()
    import_module(name).warm()
    return name, time.perf_counter() - start


if __name__ == "__main__":
    compile_in_parallel()
