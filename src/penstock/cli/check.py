"""`penstock check`: proves a plan or programs valid, or says everything that is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.check_programs import check_programs_at
from penstock.cli.console import JsonFlag, format_bytes, format_count, format_time, format_usd, out, print_json, say, table
from penstock.cli.plan_words import plan_name, ranks_words
from penstock.errors import InfeasibleError, InputError, PenstockError, plural

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan, Stage

__all__ = ["check"]


def check(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN|PROGRAM", help="A plan (plan.json), a program, or a folder with those of all ranks."),
    ],
    json: JsonFlag = False,
) -> None:
    """Prove a plan valid and its programs within the devices' memory, or programs safe, or say what is wrong with them. Status 2 if they
    are not, 3 where memory does not suffice.

    Example: penstock check plan.json
    """
    from penstock.programs.files import holds_programs

    if holds_programs(plan):
        check_programs_at(plan, json)
        return
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.remarks import remarks
    from penstock.plans.schema import read_plan
    from penstock.plans.validity import require_valid
    from penstock.programs.memory import require_memory

    try:
        found = read_plan(plan)
        require_valid(found, where=f"plan '{plan}'")
        model, cluster = model_of(found), cluster_of(found)
        require_memory(found, model, cluster)
    except (InputError, InfeasibleError) as error:
        if not json:
            raise
        print_json({"valid": False, "problems": _lines(error), "remarks": []})
        raise typer.Exit(error.exit_status) from None
    notes = remarks(found, cluster)
    if json:
        print_json({"valid": True, "problems": [], "remarks": notes, **_summary(found, model, cluster)})
        return
    out().print("plan is valid", style="green")
    _show(found, model, cluster)
    say(*(f"note: {note}" for note in notes))


def _lines(error: PenstockError) -> list[str]:
    """The problems alone: the first of several lines only announces them, but where memory does not suffice it says all."""
    first, *rest = str(error).splitlines()
    return [first] if isinstance(error, InfeasibleError) else [line.strip() for line in rest] or [first]


def _summary(plan: Plan, model: Model, cluster: Cluster) -> dict[str, Any]:
    return {
        "model": model.name,
        "cluster": cluster.describe(),
        "num_stages": plan.num_stages,
        "num_replicas": plan.num_replicas,
        "num_devices": len(plan.ranks),
        "num_micro_batches": plan.num_micro_batches,
        "per_replica": list(plan.micro_batching.per_replica),
        "schedule": plan.schedule,
    }


def _show(plan: Plan, model: Model, cluster: Cluster) -> None:
    """The plan in a few lines and a table of its stages."""
    from penstock.plans.precision import described_training
    from penstock.plans.texts import format_counts
    from penstock.schedules.rules import SCHEDULES

    batching, counts = plan.micro_batching, plan.micro_batches_per_replica
    division = f" = {format_counts(counts)} micro-batches of {batching.samples}" if counts else ""
    # The order of passes is none where each device has the whole model.
    order = [f"schedule {plan.schedule}: {SCHEDULES[plan.schedule].about}"] if plan.num_groups > 1 else []
    facts = [
        f"{plan_name(plan)}: {model.name} ({format_count(model.num_parameters)} parameters, {described_training(plan)}) on "
        f"{cluster.describe()}",
        f"{plural(plan.num_stages, 'stage')}, {plural(plan.num_replicas, 'replica')}",
        *order,
        f"global batch {plan.global_batch}{division} ({batching.policy}, {batching.layout})",
    ]
    if plan.predicted is not None:
        price = "" if plan.predicted.price_usd is None else f", {format_usd(plan.predicted.price_usd)}"
        facts.append(f"predicted {format_time(plan.predicted.time_s)}{price} per iteration ({plan.predicted.costs})")
    say(*facts, "")
    memory = plan.predicted.memory if plan.predicted else ()
    rows = [_row(index, stage, model) for index, stage in enumerate(plan.stages)]
    for row, used in zip(rows, memory, strict=False):
        row.append(format_bytes(used.total_bytes))
    columns = ["stage", "ops", "from", "devices", "tp", "dp", "runs", "recomputed", "ZeRO", *(["memory"] if memory else [])]
    out().print(table("stages", columns, rows, more=["from"]))


def _row(index: int, stage: Stage, model: Model) -> list[Any]:
    from penstock.plans.texts import described_ops

    recomputed = described_ops(model, (op for first, last in stage.pattern() for op in range(first, last))) or "-"
    ops, start = f"{stage.first}:{stage.last}", model.ops[stage.first].name
    runs = len(stage.runs) or "-"
    return [index, ops, start, ranks_words(stage.devices), stage.degrees.tp, stage.degrees.dp, runs, recomputed, stage.zero]
