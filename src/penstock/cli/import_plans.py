"""`penstock import` of other planners' plans: DynPipe's files, Aceso's JSON, FASOP's rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.console import format_time, out, print_json
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["PlanSource", "import_plan"]

_SYSTEMS = {"dynpipe": "DynPipe's files do", "aceso": "Aceso's plan does", "fasop": "FASOP's rows do"}


@dataclass(frozen=True)
class PlanSource:
    """What the command line says of another planner's plan."""

    kind: str
    path: str
    model: str
    cluster: str
    global_batch: int | None = None
    partition: Path | None = None
    mini_batch: int | None = None
    row: int | None = None

    def require(self, *options: str) -> None:
        """Refuses a source without what only the user knows."""
        for option in options:
            if getattr(self, option) in (None, ""):
                name = option.replace("_", "-")
                raise InputError(f"--{name} is missing: {_SYSTEMS[self.kind]} not name it. Give it as for `penstock search`.")


def import_plan(source: PlanSource, path: Path, json: bool) -> None:
    """Writes the plan that the source means, and tells what it is."""
    source.require("model", "cluster", *(() if source.kind == "aceso" else ("global_batch",)))
    from penstock.clusters import resolve_cluster
    from penstock.models.catalog import resolve_model
    from penstock.plans.capabilities import unsupported
    from penstock.plans.references import model_of
    from penstock.plans.schema import write_plan

    model, cluster = resolve_model(source.model), resolve_cluster(source.cluster)
    make = {"dynpipe": _from_dynpipe, "aceso": _from_aceso, "fasop": _from_fasop}[source.kind]
    plan, remarks = make(source, model, cluster)
    write_plan(path, plan)
    notes = [*remarks, *plan.notes, *(f"cannot be trained yet: {problem}" for problem in unsupported(plan, model_of(plan)))]
    facts = {"num_stages": plan.num_stages, "num_devices": len(plan.ranks), "num_micro_batches": plan.num_micro_batches}
    if json:
        print_json({"out": path, "model": source.model, **facts, "schedule": plan.schedule, "notes": notes})
        return
    told = ", ".join(f"{stage.last - stage.first} ops on {stage.num_devices * plan.num_replicas}" for stage in plan.stages)
    count = "1 stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    out().print(f"{source.model}: {count} ({told}), schedule {plan.schedule}", markup=False, soft_wrap=True)
    for note in notes:
        out().print(f"note: {note}", markup=False, soft_wrap=True)
    out().print(f"wrote {path}; next: penstock check {path}", markup=False, soft_wrap=True)


def _from_dynpipe(source: PlanSource, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.dynpipe.files import read_files
    from penstock.systems.dynpipe.plans import to_plan

    topology, partition = read_files(source.path, source.partition)
    plan = to_plan(
        topology, partition, model, cluster, model_ref=model_reference(source.model), cluster_ref=cluster_reference(source.cluster),
        global_batch=source.global_batch or 0, mini_batch=source.mini_batch,
    )  # fmt: skip
    return plan, []


def _from_aceso(source: PlanSource, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.aceso.plans import read_aceso_plan, to_plan

    plan = to_plan(
        read_aceso_plan(source.path), model, model_ref=model_reference(source.model), cluster_ref=cluster_reference(source.cluster),
        cluster=cluster,
    )  # fmt: skip
    return plan, []


def _from_fasop(source: PlanSource, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.fasop.plans import chosen_row, to_plan
    from penstock.systems.fasop.rows import read_fasop_rows

    rows = read_fasop_rows(source.path)
    number, remarks = chosen_row(rows, cluster, source.row)
    row = rows[number - 1]
    plan = to_plan(
        row, model, cluster, model_ref=model_reference(source.model), cluster_ref=cluster_reference(source.cluster),
        global_batch=source.global_batch or 0,
    )  # fmt: skip
    estimate = "" if row.time_s is None else f", {format_time(row.time_s)} a step by FASOP's estimate"
    return plan, [f"this is row {number} of {len(rows)}{estimate}", *remarks]
