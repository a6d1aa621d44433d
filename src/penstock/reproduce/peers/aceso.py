"""Aceso's own search of a case over the same tables: its program, with the options of its scripts."""

from __future__ import annotations

import csv
import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.files import read_text
from penstock.reproduce.aceso_cases import AcesoCase
from penstock.reproduce.peers.checkout import Peer, PeerError

__all__ = ["AcesoFound", "search_with_aceso"]

_HOPS = 7
"""As in all of its scripts."""


@dataclass(frozen=True)
class AcesoFound:
    """The best of its plans that fit, by its own estimate, and the processor time of all its searches (one for each depth)."""

    time_s: float
    plan: dict[str, Any]
    cpu_s: float


def search_with_aceso(peer: Peer, case: AcesoCase, tables: Path, budget_s: float) -> AcesoFound:
    """Searches every depth for so many seconds of wall time; fine-tuning, as its scripts ask for Wide-ResNet, takes more."""
    asked = {
        "model-name": case.model, "model-size": case.size, "global-batch-size": case.global_batch, "num-nodes": case.nodes,
        "num-gpus-per-node": case.gpus_per_node, "memory-limit": case.memory_mb, "max-num-hops": _HOPS, "time-budget-total": int(budget_s),
        "initial-point": "balance",
    }  # fmt: skip
    if case.model == "resnet":
        asked["finetune-after-trial"] = 1
        if case.folder == "eurosys":
            asked["sort-metric"] = "total_gpu_time"
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in ("plans/csv", "plans/top_configs", "log/trends"):
            (scratch / name).mkdir(parents=True)
        asked |= {"profiled-time-path": f"{tables.absolute()}/", "config-save-path": f"{scratch}/plans/", "log-path": f"{scratch}/log/"}
        options = [text for name, value in asked.items() for text in (f"--{name}", str(value))]
        sizes = ["--micro-batch-size", *map(str, case.micro_batches)]
        run = peer.run(["aceso_search.py", *options, *sizes], scratch, 4 * budget_s + 300, within="search")
        return _best(scratch / "plans", case, run.cpu_s)


def _best(folder: Path, case: AcesoCase, cpu_s: float) -> AcesoFound:
    """Of the plans it wrote, one for each depth, the fastest that fits."""
    fitting = []
    for path in sorted((folder / "csv").glob("info_*.csv")):
        stages = list(csv.DictReader(io.StringIO(read_text(path, "stages of a plan"))))
        if max(float(stage["memory(total)"]) for stage in stages) <= case.memory_mb:
            fitting.append((max(float(stage["time"]) for stage in stages) / 1e3, path.name.removeprefix("info_").removesuffix(".csv")))
    if not fitting:
        raise PeerError(f"aceso found no plan of {case.model} {case.size} that fits {case.memory_mb:g} MB.")
    time_s, name = min(fitting)
    return AcesoFound(time_s, json.loads(read_text(folder / f"{name}.json", "plan")), cpu_s)
