"""Where a job's costs come from: a profile of the model's ops on this machine, made once in at most a minute, or formulas."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, PenstockError
from penstock.jobs.cache import cache_folder, digest, only_one

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["chosen_costs"]

_BUDGET_S = 60.0
_FINISHED = ".finished"
"""Beside a profile that was given all of its time: what it lacks is modelled, not measured again in every run."""


def chosen_costs(asked: str, model: Model, cluster: Cluster, *, progress: Callable[[str], None] = lambda name: None) -> tuple[str, str]:
    """(source as `--costs` takes it, what to say of it) of `auto`, `measure`, or any source of costs."""
    device = cluster.device(0).name
    here = len(cluster.kinds) == 1 and cluster.name == "local"
    if asked not in ("auto", "measure"):
        return asked, asked
    if asked == "auto" and (device == "cpu" or not here):
        return "roofline", f"roofline: formulas and the datasheet of {'a processor' if device == 'cpu' else device}"
    if asked == "measure" and not (here or device == "cpu"):
        raise InputError(f"costs are to be measured, but {cluster.describe()} is not this machine. Use --costs roofline or profile:FILE.")
    try:
        path, was_there = _measured(model, device, cluster.num_devices, progress)
    except PenstockError as error:
        if asked == "measure":
            raise
        return "roofline", f"roofline: this model cannot be measured ({error})"
    return f"profile:{path}", f"measured on this machine{', earlier' if was_there else ''} ({path})"


def _measured(model: Model, device: str, count: int, progress: Callable[[str], None]) -> tuple[Path, bool]:
    """The profile of a model's kinds of ops, here, in this precision, by these versions; whether it was made earlier."""
    import torch

    from penstock.profiling.stamp import stamp

    where = "cpu" if device == "cpu" else "cuda"
    degrees = [1] if where == "cpu" else [tp for tp in (1, 2, 4, 8) if tp <= count]
    kinds = sorted(str(op.signature) for op in model.distinct_ops)
    shared = count if where == "cpu" else 1
    path = cache_folder("profiles") / f"{digest(kinds, model.dtype, device, degrees, shared, torch.__version__, stamp())}.json"
    finished = path.with_name(path.name + _FINISHED)
    with only_one(path):
        if finished.exists():
            return path, True
        _measure(path, model, where, degrees, shared, progress)
        finished.touch()
    return path, False


def _measure(path: Path, model: Model, device: str, degrees: list[int], processes: int, progress: Callable[[str], None]) -> None:
    """In processes of their own, as training has them: what they take of a GPU's memory goes with them."""
    from penstock.profiling.run import Profiler
    from penstock.profiling.together import measure_together
    from penstock.runtime.workers import WorkerPool

    if device == "cpu":
        units = Profiler.open(path, device).units([model], degrees)
        measure_together(path, units, processes, time_budget_s=_BUDGET_S, progress=progress)
        return
    with WorkerPool(1, device=device, threads=len(os.sched_getaffinity(0))) as pool:
        pool.run(_profile, str(path), model, degrees, listen=lambda rank, name: progress(name), timeout_s=24 * 3600.0)


def _profile(worker: Any, path: str, model: Model, degrees: list[int]) -> None:
    """A job for a worker."""
    from penstock.profiling.run import Profiler

    profiler = Profiler.open(path, "cuda")
    profiler.run(profiler.units([model], degrees), time_budget_s=_BUDGET_S, progress=worker.tell)
