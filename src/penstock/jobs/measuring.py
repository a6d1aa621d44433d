"""Where a job's costs come from: a profile of the model's ops on this machine, made once in at most a minute, or formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InputError, PenstockError
from penstock.files import yaml_text
from penstock.jobs.cache import cache_folder, digest, only_one

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["chosen_costs"]

_BUDGET_S = 60
_FINISHED = ".finished"
"""Beside a profile that was given all of its time: what it lacks is modelled, not measured again in every run."""
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")


def chosen_costs(asked: str, model: Model, cluster: Cluster, source: str) -> tuple[str, str]:
    """(source as `--costs` takes it, what to say of it) of `auto`, `measure`, or any source of costs; `source` names the model."""
    device = cluster.device(0).name
    if asked not in ("auto", "measure"):
        return asked, asked
    here = len(cluster.kinds) == 1 and (cluster.name == "local" or device == "cpu")
    if asked == "auto" and (device == "cpu" or not here):
        return "roofline", f"roofline: formulas and the datasheet of {'a processor' if device == 'cpu' else device}"
    if not here:
        raise InputError(f"costs are to be measured, but {cluster.describe()} is not this machine. Use --costs roofline or profile:FILE.")
    try:
        path, was_there = _measured(model, device, cluster.num_devices, source)
    except PenstockError as error:
        if asked == "measure":
            raise
        return "roofline", f"roofline, since the model could not be measured: {error}"
    return f"profile:{path}", f"measured on this machine{', earlier' if was_there else ''} ({path})"


def _measured(model: Model, device: str, count: int, source: str) -> tuple[Path, bool]:
    """The profile of a model's kinds of ops, here, in this precision, by these versions; whether it was made earlier."""
    from importlib.metadata import version

    from penstock.profiling.stamp import stamp

    degrees = [1] if device == "cpu" else [tp for tp in (1, 2, 4, 8) if tp <= count]
    kinds = sorted(op.signature for op in model.distinct_ops)
    sharing = count if device == "cpu" else 1
    path = cache_folder("profiles") / f"{digest(kinds, model.dtype, device, degrees, sharing, version('torch'), stamp())}.json"
    finished = path.with_name(path.name + _FINISHED)
    with only_one(path):
        if finished.exists():
            return path, True
        _measure(path, model, device, degrees, sharing, source)
        finished.touch()
    return path, False


def _measure(path: Path, model: Model, device: str, degrees: list[int], sharing: int, source: str) -> None:
    """`penstock profile`, in a process of its own: what it takes of a GPU's memory goes with it, and no user's script is imported again."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        command = [
            sys.executable, "-m", "penstock", "profile", "--model", _named(model, source, Path(scratch)), "--out", str(path),
            "--device", "cpu" if device == "cpu" else "cuda", "--tp", ",".join(map(str, degrees)), "--time-budget", str(_BUDGET_S),
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name not in _OF_TORCHRUN}
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))  # as many as a rank will have
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise PenstockError(said[-1].removeprefix("error: "))


def _named(model: Model, source: str, scratch: Path) -> str:
    """The model with its precision, in a file where it is of a family; else as the user names it."""
    from penstock.models.catalog import FAMILIES

    if model.family not in FAMILIES:
        return source
    path, sizes = scratch / "model.yaml", json.loads(json.dumps(dict(model.config)))  # YAML knows no tuples
    path.write_text(yaml_text({"family": model.family, "name": model.name, **sizes, "dtype": model.dtype}), encoding="utf-8")
    return str(path)
