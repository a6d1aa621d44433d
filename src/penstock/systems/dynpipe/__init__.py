"""DynPipe: plans as a topology and a partition file, for asynchronous pipelines of whole blocks replicated by samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from penstock.systems.system import PlanFile, PlanFiles, System

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["DYNPIPE"]


def _read(file: PlanFile, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.dynpipe.files import read_files
    from penstock.systems.dynpipe.plans import to_plan

    topology, partition = read_files(file.path, file.partition)
    plan = to_plan(
        topology, partition, model, cluster, model_ref=model_reference(file.model), cluster_ref=cluster_reference(file.cluster),
        global_batch=file.global_batch or 0, mini_batch=file.mini_batch,
    )  # fmt: skip
    return plan, []


def _write(plan: Plan, model: Model, path: Path) -> None:
    from penstock.systems.dynpipe.files import write_files
    from penstock.systems.dynpipe.plans import from_plan

    write_files(path, *from_plan(plan, model))


def _require_model(model: Model) -> None:
    from penstock.systems.dynpipe.plans import require_precision

    require_precision(model.dtype)


DYNPIPE = System(
    "dynpipe", PlanFiles(_read, _write, "hybrid_conf.json", "folder", ("model", "cluster", "global_batch", "partition", "mini_batch"),
                         ("model", "cluster", "global_batch"), "DynPipe's files do", folder_files=("topology.json", "partition.json"),
                         require_model=_require_model),
)  # fmt: skip
