"""Aceso: profiled tables of ops, plan files with degrees of each op, its rules for time and memory, and a search by them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, near_misses, plural
from penstock.systems.system import PlanFile, PlanFiles, System, TableAnswer, TableOther, TableScore, TableSearch, parse_nodes, unknown_name

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.systems.aceso.rules import Cuts
    from penstock.systems.aceso.tables import AcesoTables

__all__ = ["ACESO"]


def _read(file: PlanFile, model: Model, cluster: Cluster) -> tuple[Plan, list[str]]:
    from penstock.plans.references import cluster_reference, model_reference
    from penstock.systems.aceso.files import read_aceso_plan
    from penstock.systems.aceso.plans import to_plan

    plan = to_plan(
        read_aceso_plan(file.path), model, model_ref=model_reference(file.model), cluster_ref=cluster_reference(file.cluster),
        cluster=cluster,
    )  # fmt: skip
    return plan, []


def _require_model(model: Model) -> None:
    from penstock.systems.aceso.plans import require_precision, size_of

    size_of(model)
    require_precision(model, model.dtype)


def _write(plan: Plan, model: Model, path: Path) -> None:
    from penstock.systems.aceso.files import write_aceso_plan
    from penstock.systems.aceso.plans import from_plan

    write_aceso_plan(path, from_plan(plan, model))


def _chain(folder: str, name: str) -> Model:
    from penstock.systems.aceso.tables import AcesoTables

    tables = AcesoTables.open(folder)
    found = tables.split_name(name)
    if found is None:
        raise unknown_name(tables.name, "model", name, list(tables.names()))
    return tables.model(*found)


def _search(asked: TableSearch, progress: Callable[[str], None]) -> TableAnswer:
    from penstock.systems.aceso.plans import is_torn, searched_text
    from penstock.systems.aceso.search import AcesoProblem, search_aceso
    from penstock.systems.aceso.tables import AcesoTables

    model = _chain(asked.folder, asked.model)
    nodes, per_node = _nodes(asked.cluster)
    if asked.global_batch is None:
        raise InputError("--global-batch is missing: Aceso's tables do not name it.")
    if asked.memory_limit_gb is None:
        raise InputError("--memory-limit is missing: Aceso's tables do not say how much a GPU holds. It used 28 of GPUs with 32.")
    memory_mb, tables = asked.memory_limit_gb * 1000, AcesoTables.open(asked.folder)
    sizes = tuple(asked.micro_batches) or tables.micro_batches(model)
    problem = AcesoProblem(tables, model, nodes, per_node, asked.global_batch, sizes, memory_mb, _cuts(asked, model))
    answer = search_aceso(problem, progress, budget_s=math.inf if asked.budget_s is None else asked.budget_s, top=asked.top)
    plan = answer.plan
    columns = (plan[name] for name in ("num_ops_in_each_stage", "num_gpus", "model_parallel_size_of_each_op",
                                       "data_parallel_size_of_each_op", "recompute_ops"))  # fmt: skip
    stages = [
        {"ops": ops, "gpus": gpus, "tp": sorted(set(tp)), "dp": sorted(set(dp)), "recomputed": sum(again)}
        for ops, gpus, tp, dp, again in zip(*columns, strict=True)
    ]
    size = plan["micro_batch_size"]
    return TableAnswer(
        f"best plan of {model.name} on {nodes} × {per_node} GPUs, global batch {asked.global_batch} ({asked.costs})",
        answer.time_s, answer.bound_s, stages, {"micro_batch": size, "num_gpus": nodes * per_node, "memory_limit_mb": memory_mb},
        f"at most {memory_mb:,.0f} MB (of 2²⁰ bytes, as Aceso counts) on a GPU; micro-batches of {size}", searched_text(plan, model),
        baselines={"Megatron-LM's grid": _best_of_grid(plan, model, tables, per_node, sizes, memory_mb)} if asked.baselines else {},
        others=[TableOther(_summary(one.plan), one.time_s, searched_text(one.plan, model)) for one in answer.others],
        is_torn=is_torn(plan, model),
    )  # fmt: skip


def _cuts(asked: TableSearch, model: Model) -> Cuts:
    """Where the plans may be cut."""
    from penstock.systems.aceso.rules import CUTS

    for cuts in CUTS:
        if cuts == asked.cuts and (cuts, model.family) != ("blocks", "resnet"):
            return cuts
    if asked.cuts == "blocks":
        raise InputError(f"--cuts is blocks, but {asked.model} is cut between any two of its ops, which are ops here too. Drop it.")
    raise InputError(f"--cuts is '{asked.cuts}'; {', '.join(CUTS[:-1])} or {CUTS[-1]} was expected. {near_misses(asked.cuts, CUTS)}")


def _summary(plan: dict[str, Any]) -> str:
    """A plan in a few words."""
    gpus = " + ".join(map(str, plan["num_gpus"]))
    return f"micro-batches of {plan['micro_batch_size']}, {plural(plan['num_stages'], 'stage')} on {gpus} GPUs"


def _best_of_grid(plan: dict[str, Any], model: Model, tables: AcesoTables, per_node: int, sizes: Sequence[int], memory_mb: float) -> float:
    """Seconds of the fastest plan of equal stages that fits, at any of the micro-batch sizes."""
    from penstock.systems.aceso.files import AcesoPlan
    from penstock.systems.aceso.plans import searched_text
    from penstock.systems.aceso.scoring import grid_plans, score_plan
    from penstock.systems.tables import validated

    best = math.inf
    found = validated(AcesoPlan, json.loads(searched_text(plan, model)), "the plan found")
    for size in (size for size in sizes if found.global_batch_size % size == 0):
        for other in grid_plans(replace(found, micro_batch_size=size), per_node):
            try:
                score = score_plan(other, tables, per_node)
            except InputError:  # degrees for which there are no tables
                continue
            best = min(best, score.time_s) if score.memory_mb <= memory_mb else best
    return best


_PER_NODE = 8
"""GPUs of a node where only a plan file says how many there are in all."""


def _score(folder: str, path: Path) -> TableScore:
    from penstock.systems.aceso.files import read_aceso_plan
    from penstock.systems.aceso.scoring import score_plan
    from penstock.systems.aceso.tables import AcesoTables

    plan = read_aceso_plan(path)
    found = score_plan(plan, AcesoTables.open(folder), _PER_NODE)
    stages = [
        {"ops": ops, "gpus": gpus, "tp": sorted(set(tp)), "dp": sorted(set(dp)), "recomputed": sum(again), "compute_s": one.compute_s,
         "recompute_s": one.recompute_s, "messages_s": one.messages_s, "memory_mb": one.memory_mb}
        for ops, gpus, tp, dp, again, one in zip(
            plan.num_ops_in_each_stage, plan.num_gpus, plan.model_parallel_size_of_each_op, plan.data_parallel_size_of_each_op,
            plan.recompute_ops, found.stages, strict=True)
    ]  # fmt: skip
    micro_batches = f"{plural(found.num_micro_batches, 'micro-batch')} of {plan.micro_batch_size}"
    note = f"the fullest GPU holds {found.memory_mb:,.0f} MB (of 2²⁰ bytes); nodes of {_PER_NODE} GPUs"
    title = f"{plan.model_name} {plan.model_size} on {plural(sum(plan.num_gpus), 'GPU')}, {micro_batches}"
    return TableScore(title, found.time_s, stages, note)


def _nodes(text: str) -> tuple[int, int]:
    """Nodes and GPUs of each: `2x8`."""
    from penstock.systems.aceso.search_uniform import MAX_STAGES

    nodes, per_node = parse_nodes(text, "Aceso's tables hold the one kind of GPUs that they were measured on, with its links.")
    if nodes * per_node > MAX_STAGES * 8:
        raise InputError(f"--cluster is '{text}', {nodes * per_node} GPUs; Aceso's plans have up to {MAX_STAGES} stages of 8.")
    return nodes, per_node


ACESO = System(
    "aceso", PlanFiles(_read, _write, "gpt_1_3B.json", "plan.json", ("model", "cluster"), ("model", "cluster"), "Aceso's plan does",
                       require_model=_require_model),
    search=_search, score=_score, chain=_chain,
)  # fmt: skip
