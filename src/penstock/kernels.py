"""Compiles every numba kernel once, so that no command waits for a compiler later: `python -m penstock.kernels`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module

__all__ = ["KERNEL_MODULES", "compile_all"]

# Modules that import numba at the top. Each has `warm()`, which calls its kernels once on tiny arrays of the types used in
# earnest; `cache=True` on the kernels keeps the result on disk. Nothing but the function that needs a kernel imports these.
KERNEL_MODULES: tuple[str, ...] = (
    "penstock.batching.kernels",
    "penstock.batching.anneal_kernels",
    "penstock.schedules.kernels",
    "penstock.schedules.event_kernels",
    "penstock.schedules.greedy_kernels",
    "penstock.schedules.search_kernels",
    "penstock.search.fasop_kernels",
    "penstock.search.kernels",
    "penstock.search.mixed_kernels",
)


def compile_all(modules: Sequence[str] = KERNEL_MODULES) -> float:
    """Warms each module in turn, telling progress on stdout; returns the seconds it all took."""
    start = time.perf_counter()
    for index, name in enumerate(modules, start=1):
        print(f"[{index}/{len(modules)}] {name} ...", end=" ", flush=True)
        module_start = time.perf_counter()
        import_module(name).warm()
        print(f"{time.perf_counter() - module_start:.1f} s", flush=True)
    time_s = time.perf_counter() - start
    print(f"{len(modules)} kernel modules ready in {time_s:.1f} s")
    return time_s


if __name__ == "__main__":
    compile_all()
