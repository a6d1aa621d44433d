"""`penstock search --costs aceso:DIR` and `fasop:DIR`: the best plan of another planner's own tables, by its own rules, with a bound."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_time, format_usd, out, print_json, progress, table
from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.systems.aceso.tables import AcesoTables

__all__ = ["TABLES", "TableRequest", "search_tables"]

TABLES = ("aceso", "fasop")
_REFUSED = {
    "objective": "the tables are searched for time",
    "seq_length": "they hold samples of one length",
    "lengths": "they hold samples of one length",
    "schedules": "their rules know 1F1B alone",
    "tokens": "give --steps for hours",
    "time_budget": "this search counts its work, not seconds, and ends by itself",
    "max_hops": "this search is not refined under the simulator",
    "top": "it finds one plan",
    "baselines": "the simpler searches know other costs",
    "proof": "its bound comes as one figure",
    "export": "--out writes the plan as the tables' own system has it",
}
"""Options of `penstock search` that say nothing here, and why."""


@dataclass(frozen=True)
class TableRequest:
    """What the command line asks of another planner's tables."""

    costs: str
    model: str
    cluster: str
    global_batch: int | None
    micro_batches: Sequence[int]
    memory_limit_gb: float | None
    steps: int | None
    path: Path | None
    json: bool

    def require_unused(self, options: Iterable[str]) -> None:
        """Refuses the options that were given and that the tables leave nothing to do for."""
        for name in options:
            raise InputError(f"--{name.replace('_', '-')} does not go with --costs {self.costs}: {_REFUSED[name]}. Drop it.")


def search_tables(request: TableRequest, others: Mapping[str, object]) -> None:
    """Searches, shows and writes; `others` tells which of the other options were given."""
    request.require_unused(name for name, given in others.items() if given)
    (_search_aceso if request.costs.startswith("aceso") else _search_fasop)(request)


def _search_aceso(request: TableRequest) -> None:
    from penstock.files import write_text
    from penstock.interop import AcesoTables
    from penstock.systems.aceso.plans import searched_text
    from penstock.systems.aceso.search import AcesoProblem, search_aceso

    tables = AcesoTables.open(_folder(request.costs))
    model = _chain(tables, request.model)
    nodes, per_node = _nodes(request.cluster)
    if request.global_batch is None:
        raise InputError("--global-batch is missing: Aceso's tables do not name it.")
    if request.memory_limit_gb is None:
        raise InputError("--memory-limit is missing: Aceso's tables do not say how much a GPU holds. It used 28 of GPUs with 32.")
    memory_mb = request.memory_limit_gb * 1000
    sizes = tuple(request.micro_batches) or tables.micro_batches(model)
    with progress("searching", quiet=request.json) as bar:
        answer = search_aceso(AcesoProblem(tables, model, nodes, per_node, request.global_batch, sizes, memory_mb), bar.describe)
    plan = answer.plan
    if request.path is not None:
        write_text(request.path, searched_text(plan, model))
    columns = (plan[name] for name in ("num_ops_in_each_stage", "num_gpus", "model_parallel_size_of_each_op",
                                       "data_parallel_size_of_each_op", "recompute_ops"))  # fmt: skip
    stages = [
        {"ops": ops, "gpus": gpus, "tp": sorted(set(tp)), "dp": sorted(set(dp)), "recomputed": sum(again)}
        for ops, gpus, tp, dp, again in zip(*columns, strict=True)
    ]
    facts = {"micro_batch": plan["micro_batch_size"], "num_gpus": nodes * per_node, "memory_limit_mb": memory_mb}
    note = f"at most {memory_mb:,.0f} MB (of 2²⁰ bytes, as Aceso counts) on a GPU; micro-batches of {facts['micro_batch']}"
    title = f"best plan of {model.name} on {nodes} × {per_node} GPUs, global batch {request.global_batch} ({request.costs})"
    _tell(request, title, answer.time_s, answer.bound_s, None, stages, facts, note)


def _folder(costs: str) -> str:
    kind, _, folder = costs.partition(":")
    if not folder or "\0" in folder:
        raise InputError(f"costs '{costs}': expected {kind}:DIR.")
    return folder


def _chain(tables: AcesoTables, name: str) -> Model:
    found = tables.split_name(name)
    if found is None:
        raise _unknown(tables.name, "model", name, tables.names())
    return tables.model(*found)


def _unknown(where: str, what: str, name: str, known: Iterable[str]) -> InputError:
    """The error of a name that a folder does not have, with all that it has."""
    names = sorted(known)
    close = near_misses(name, names)
    return InputError(f"--model is '{name}', but {where} has no such {what}. {close if close.startswith('Did') else ''}".rstrip()
                      + f" It has {', '.join(names)}.")  # fmt: skip


def _nodes(text: str) -> tuple[int, int]:
    """Nodes and GPUs of each: `2x8`."""
    from penstock.systems.aceso.search import MAX_STAGES

    match = re.fullmatch(r"\s*([1-9][0-9]{0,5})\s*[x×]\s*([1-9][0-9]{0,5})\s*", text)
    if match is None:
        raise InputError(
            f"--cluster is '{text}'; nodes x GPUs, such as 2x8, were expected: Aceso's tables hold the one kind of GPUs that they were "
            "measured on, with its links."
        )
    nodes, per_node = int(match[1]), int(match[2])
    if nodes * per_node > MAX_STAGES * 8:
        raise InputError(f"--cluster is '{text}', {nodes * per_node} GPUs; Aceso's plans have up to {MAX_STAGES} stages of 8.")
    return nodes, per_node


def _search_fasop(request: TableRequest) -> None:
    from penstock.files import write_json
    from penstock.interop import FasopTables
    from penstock.systems.fasop.search import search_fasop

    tables = FasopTables.open(_folder(request.costs))
    settings = tables.settings()
    if request.model not in settings:
        raise _unknown(tables.name, "setting", request.model, settings)
    setting = settings[request.model]
    batch = tables.models[setting.model].global_batch_size if setting.model in tables.models else None
    for name, wanted, own in (("--cluster", request.cluster, setting.nodes), ("--global-batch", request.global_batch, batch)):
        if wanted and wanted != own:
            raise InputError(f"{name} is {wanted}, but setting '{request.model}' of {tables.name} has {own}. Drop it.")
    for name, given in (("--micro-batches", bool(request.micro_batches)), ("--memory-limit", request.memory_limit_gb is not None)):
        if given:
            raise InputError(f"{name} does not go with --costs {request.costs}: the tables say it. Drop it.")
    with progress("searching", quiet=request.json):
        answer = search_fasop(tables, request.model)
    plan = answer.plan
    if request.path is not None:
        write_json(request.path, plan)
    stages = [
        {"layers": stage["layers"], "gpus": stage["tp"] * stage["dp"], "tp": [stage["tp"]], "dp": [stage["dp"]], "samples": stage["mbs"],
         "nodes": [f"{count} of {kind} {node}" for kind, node, count in stage["devices"]]}
        for stage in plan["stages"]
    ]  # fmt: skip
    facts = {"num_gpus": answer.num_devices, "usd_per_step": answer.usd_per_step}
    title = f"best plan of {setting.model} on nodes {setting.nodes}, global batch {batch} ({request.costs})"
    note = f"{answer.num_devices} GPUs, {format_usd(answer.usd_per_step)} an iteration for the nodes that have work"
    _tell(request, title, answer.time_s, answer.bound_s or 0.0, answer.usd_per_step, stages, facts, note)


def _tell(
    request: TableRequest, title: str, time_s: float, bound_s: float, usd: float | None, stages: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any], note: str,
) -> None:  # fmt: skip
    gap, hours = time_s / bound_s - 1, time_s * (request.steps or 0) / 3600
    total = {} if request.steps is None else {"hours": hours, "total_usd": None if usd is None else usd * request.steps}
    if request.json:
        print_json({
            "model": request.model, "costs": request.costs, "out": request.path, "time_s": time_s, "lower_bound_s": bound_s, "gap": gap,
            **facts, **total, "stages": stages,
        })  # fmt: skip
        return
    out().print(table(title, ["stage", *stages[0]], [[index, *map(_cell, stage.values())] for index, stage in enumerate(stages)]))
    lines = [
        f"{format_time(time_s)} an iteration by the tables' own rules; {note}",
        f"no such plan takes less than {format_time(bound_s)}: this one is at most {gap:.1%} above the best possible",
    ]
    if request.steps is not None:
        price = "" if usd is None else f" and {format_usd(usd * request.steps)}"
        lines.append(f"{request.steps:,} iterations take {hours:,.2f} hours{price}")
    if request.path is not None:
        lines.append(f"wrote {request.path}")
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)


def _cell(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
