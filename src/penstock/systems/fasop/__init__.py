"""FASOP: layer times of mixed clusters, result rows, its cost rules (1F1B with every message charged), and a search by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.systems.system import PlanFile, PlanFiles, System, TableAnswer, TableSearch, unknown_name

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["FASOP"]


def _read(file: PlanFile, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.fasop import found_plans
    from penstock.systems.fasop.plans import chosen_row, to_plan
    from penstock.systems.fasop.rows import read_fasop_rows

    refs: dict[str, Any] = {"model_ref": model_reference(file.model), "cluster_ref": cluster_reference(file.cluster)}
    if Path(file.path).suffix == ".json":
        if file.row is not None:
            raise InputError(f"--row is {file.row}, but '{file.path}' holds one plan and no rows. Drop it.")
        return found_plans.to_plan(found_plans.read_found_plan(file.path), model, cluster, **refs, global_batch=file.global_batch or 0), []
    rows = read_fasop_rows(file.path)
    number, remarks = chosen_row(rows, cluster, file.row)
    row = rows[number - 1]
    plan = to_plan(row, model, cluster, **refs, global_batch=file.global_batch or 0)
    estimate = "" if row.time_s is None else f", {row.time_s:.3f} s a step by FASOP's estimate"
    return plan, [f"this is row {number} of {len(rows)}{estimate}", *remarks]


def _write(plan: Plan, model: Model, path: Path) -> None:
    from penstock.systems.fasop.rows import row_of_plan, write_fasop_rows

    write_fasop_rows(path, [row_of_plan(plan, model)])


def _chain(folder: str, name: str) -> Model:
    from penstock.systems.fasop.tables import FasopTables

    return FasopTables.open(folder).model(name)


def _search(asked: TableSearch, progress: Callable[[str], None]) -> TableAnswer:
    from penstock.systems.fasop.baselines import simpler_spaces
    from penstock.systems.fasop.search import search_fasop
    from penstock.systems.fasop.tables import FasopTables

    tables = FasopTables.open(asked.folder)
    settings = tables.settings()
    if asked.model not in settings:
        raise unknown_name(tables.name, "setting", asked.model, list(settings))
    setting = settings[asked.model]
    batch = tables.models[setting.model].global_batch_size if setting.model in tables.models else None
    for name, wanted, own in (("--cluster", asked.cluster, setting.nodes), ("--global-batch", asked.global_batch, batch)):
        if wanted and wanted != own:
            raise InputError(f"{name} is {wanted}, but setting '{asked.model}' of {tables.name} has {own}. Drop it.")
    for name, given in (("--micro-batches", bool(asked.micro_batches)), ("--memory-limit", asked.memory_limit_gb is not None)):
        if given:
            raise InputError(f"{name} does not go with --costs {asked.costs}: the tables say it. Drop it.")
    answer = search_fasop(tables, asked.model)
    stages = [
        {"layers": stage["layers"], "gpus": stage["tp"] * stage["dp"], "tp": [stage["tp"]], "dp": [stage["dp"]], "samples": stage["mbs"],
         "nodes": [f"{count} of {kind} {node}" for kind, node, count in stage["devices"]]}
        for stage in answer.plan["stages"]
    ]  # fmt: skip
    return TableAnswer(
        f"best plan of {setting.model} on nodes {setting.nodes}, global batch {batch} ({asked.costs})", answer.time_s,
        answer.bound_s or 0.0, stages, {"num_gpus": answer.num_devices, "usd_per_step": answer.usd_per_step},
        plural(answer.num_devices, "GPU"), json.dumps(answer.plan, indent=2) + "\n", answer.usd_per_step,
        simpler_spaces(tables, asked.model) if asked.baselines else {},
    )  # fmt: skip


FASOP = System(
    "fasop", PlanFiles(_read, _write, "gpt2XL.csv", "rows.csv", ("model", "cluster", "global_batch", "row"),
                       ("model", "cluster", "global_batch"), "FASOP's rows and plans over its tables do"),
    search=_search, chain=_chain,
)  # fmt: skip
