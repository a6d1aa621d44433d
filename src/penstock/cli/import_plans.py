"""`penstock import` of other planners' plans."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.console import out, print_json
from penstock.errors import InputError, plural, shell_words
from penstock.systems import SYSTEMS, PlanFile

__all__ = ["import_plan"]


def import_plan(kind: str, source: PlanFile, path: Path, json: bool) -> None:
    """Writes the plan that a file of a system means, and tells what it is."""
    files = SYSTEMS[kind].plans
    if files is None:
        raise InputError(f"'{kind}' has no plan files.")
    for option in files.required:
        if getattr(source, option) in (None, ""):
            raise InputError(f"--{option.replace('_', '-')} is missing: {files.lack} not name it. Give it as for `penstock search`.")
    from penstock.clusters import resolve_cluster
    from penstock.models.catalog import resolve_model
    from penstock.plans.capabilities import unsupported
    from penstock.plans.references import model_of
    from penstock.plans.schema import write_plan

    model, cluster = resolve_model(source.model), resolve_cluster(source.cluster)
    plan, remarks = files.read(source, model, cluster)
    write_plan(path, plan)
    notes = [*remarks, *plan.notes, *(f"cannot be trained yet: {problem}" for problem in unsupported(plan, model_of(plan)))]
    facts = {"num_stages": plan.num_stages, "num_devices": len(plan.ranks), "num_micro_batches": plan.num_micro_batches}
    if json:
        print_json({"out": path, "model": source.model, **facts, "schedule": plan.schedule, "notes": notes})
        return
    told = ", ".join(f"{plural(stage.last - stage.first, 'op')} on {stage.num_devices * plan.num_replicas}" for stage in plan.stages)
    out().print(f"{source.model}: {plural(plan.num_stages, 'stage')} ({told}), schedule {plan.schedule}", markup=False, soft_wrap=True)
    for note in notes:
        out().print(f"note: {note}", markup=False, soft_wrap=True)
    out().print(f"wrote {path}; next: {shell_words('penstock', 'check', path)}", markup=False, soft_wrap=True)
