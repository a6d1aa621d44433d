"""What the plans of a run expected of its steps, read back from its folder: for traces and reports.

A run keeps what that needs in `inputs/` from its start, so that a folder that is moved, or whose data and profile are gone, predicts the
same:

    inputs/data/        the lengths of the samples, without contents
    inputs/costs/       the profile of the plan, as it was
    inputs/plan.json    what model, cluster and costs of the plan become here
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.clusters import cluster_to_dict
from penstock.data.dataset import open_data
from penstock.data.kept_lengths import keep_lengths
from penstock.data.manifest import MANIFEST
from penstock.errors import InputError
from penstock.files import read_json, write_json
from penstock.models.catalog import model_names
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, cluster_reference, model_mapping, model_of
from penstock.plans.schema import read_plan
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_folder import plans_of_run, read_request
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.telemetry.predicting import predict_timelines
from penstock.timing.execution import Execution

__all__ = ["keep_inputs", "kept_plan", "kept_plans", "plan_in_force", "predicted_executions"]

_DATA, _COSTS, _PLAN = Path("inputs", "data"), Path("inputs", "costs"), Path("inputs", "plan.json")
_PROFILE = "profile:"


def keep_inputs(request: TrainRequest) -> None:
    """Writes what predictions of this run will need; a name that means the same everywhere stays a name."""
    out, plan, kept = Path(request.out), request.plan, dict[str, list[Any]]()
    keep_lengths(open_data(request.data), out / _DATA)
    if isinstance(plan.model, str) and plan.model not in model_names():
        kept["model"] = [plan.model, model_mapping(model_of(plan))]
    if isinstance(plan.cluster, str) and not isinstance(cluster_reference(plan.cluster), str):
        kept["cluster"] = [plan.cluster, cluster_to_dict(cluster_of(plan))]
    profile = Path(plan.costs.removeprefix(_PROFILE))
    if plan.costs.startswith(_PROFILE) and profile.is_file():  # one that is shipped is everywhere
        (out / _COSTS).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(profile, out / _COSTS / profile.name)
        kept["costs"] = [plan.costs, profile.name]
    write_json(out / _PLAN, kept)


def kept_plan(run: str | Path, plan: Plan) -> Plan:
    """A plan of a run with the model, the cluster and the costs that the run's folder has."""
    path = Path(run) / _PLAN
    kept = read_json(path, "inputs of a run") if path.is_file() else {}
    try:
        known = {name: now for name, (was, now) in kept.items() if getattr(plan, name) == was}
        if "costs" in known:
            known["costs"] = f"{_PROFILE}{path.resolve().parent / _COSTS.name / Path(known['costs']).name}"
        return replace(plan, **known)
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(f"'{path}' does not say what a plan's model, cluster and costs become: {error}.") from None


def kept_plans(run: str | Path) -> dict[int, Plan]:
    """All plans that a run has had, by their first steps, as `kept_plan` has them."""
    return {first: kept_plan(run, read_plan(path)) for first, path in plans_of_run(run).items()}


def plan_in_force(plans: Collection[int], steps: Iterable[int]) -> dict[int, int]:
    """For each step the first step of the plan it ran under; `plans` are the first steps of all."""
    return {step: max((first for first in plans if first <= step), default=min(plans)) for step in steps}


def predicted_executions(run: str | Path, plans: Mapping[int, Plan], steps: Mapping[int, int]) -> dict[int, list[Execution]]:
    """The timeline of each replica in each of these steps, with the micro-batches that they had; PenstockError where nobody can say, as
    without the lengths of the run's data. `steps` has the first step of the plan in force, by which `plans` has it."""
    found: dict[int, list[Execution]] = {}
    for first in sorted(set(steps.values())):
        own = [step for step, its in steps.items() if its == first]
        request = replace(read_request(run), plan=plans[first])
        if (Path(run) / _DATA / MANIFEST).is_file():
            request = replace(request, data=str(Path(run) / _DATA))
        found |= dict(zip(own, predict_timelines(*run_inputs(request), own), strict=True))
    return found
