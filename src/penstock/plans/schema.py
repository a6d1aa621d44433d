"""Plan files: reading, writing, and the plain dicts in between. `python -m penstock.plans.schema` writes their JSON schema."""

from __future__ import annotations

import dataclasses
import json
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError
from penstock.files import read_json, write_json, write_text
from penstock.plans.degrees import AVAILABLE
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Predicted, Stage, StageMemory
from penstock.plans.texts import format_ops, format_ranks

if TYPE_CHECKING:
    from penstock.plans.spec import MicroBatchingSpec, PlanSpec, PredictedSpec, StageSpec

__all__ = ["json_schema", "plan_from_dict", "plan_to_dict", "read_plan", "write_plan"]


def read_plan(path: str | Path) -> Plan:
    """The plan of a JSON file; well formed, though perhaps not valid: see `validity`."""
    where = f"plan '{path}'"
    try:
        data = read_json(path, "plan")
    except RecursionError:
        raise InputError(f"{where} is nested too deeply to be a plan.") from None
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{where} is not valid JSON: {error}.") from None
    return plan_from_dict(data, where)


def write_plan(path: str | Path, plan: Plan) -> None:
    """Writes the plan so that `read_plan` gives an equal one; a plan that could not be read back is not written."""
    data = plan_to_dict(plan)
    plan_from_dict(data, f"the plan to write to '{path}'")
    write_json(path, data)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as dicts, lists, text and numbers; fields at their usual value are left out of stages and predictions."""
    from penstock.plans.spec import FORMAT, VERSION

    slower = {str(rank): list(factors) for rank, factors in plan.micro_batching.slower}
    links = {f"{one}-{other}": factor for one, other, factor in plan.micro_batching.slower_links}
    micro_batching = {**dataclasses.asdict(plan.micro_batching), "slower": slower, "slower_links": links}
    data = {
        "format": FORMAT,
        "version": VERSION,
        "model": plan.model if isinstance(plan.model, str) else dict(plan.model),
        "cluster": plan.cluster if isinstance(plan.cluster, str) else dict(plan.cluster),
        "precision": plan.precision,
        "optimizer": plan.optimizer,
        "global_batch": plan.global_batch,
        "seq_length": plan.seq_length,
        "dec_length": plan.dec_length,
        "num_replicas": plan.num_replicas,
        "micro_batching": {name: _plain(value) for name, value in micro_batching.items() if value not in (None, (), {})},
        "schedule": plan.schedule,
        "stages": [_stage_to_dict(stage) for stage in plan.stages],
        "costs": plan.costs,
    }
    if plan.gradients:
        data["gradients"] = plan.gradients
    if plan.predicted is not None:
        predicted = dataclasses.asdict(plan.predicted)
        data["predicted"] = {name: _plain(value) for name, value in predicted.items() if value not in (None, ())}
    if plan.notes:
        data["notes"] = list(plan.notes)
    return data


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _stage_to_dict(stage: Stage) -> dict[str, Any]:
    degrees = {axis: degree for axis, degree in dataclasses.asdict(stage.degrees).items() if axis in AVAILABLE or degree != 1}
    data: dict[str, Any] = {
        "ops": format_ops((stage.first, stage.last)),
        "devices": [format_ranks(ranks) for ranks in stage.devices],
        "degrees": degrees,
    }
    if stage.runs:
        data["runs"] = [{"ops": format_ops((run.first, run.last)), "tp": run.tp, "dp": run.dp, "algo": run.algo} for run in stage.runs]
    if stage.recompute:
        data["recompute"] = [format_ops(*pattern) for pattern in stage.recompute]
    if stage.zero:
        data["zero"] = stage.zero
    if stage.sequence_parallel:
        data["sequence_parallel"] = True
    return data


def plan_from_dict(data: Any, where: str) -> Plan:
    """The plan that the JSON value `data` describes; `where` names its origin in errors."""
    from penstock.plans.spec import validate

    _require_version(data, where)
    return _plan(validate(data, where))


def _require_version(data: Any, where: str) -> None:
    from penstock.plans.spec import FORMAT, VERSION

    if not isinstance(data, dict):
        raise InputError(f"{where} holds {reprlib.repr(data)}; an object with the fields of a plan was expected.")
    if data.get("format") != FORMAT:
        raise InputError(f"{where} is not a Penstock plan: field 'format' is {reprlib.repr(data.get('format'))}, expected '{FORMAT}'.")
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise InputError(
            f"{where}: field 'version' is {reprlib.repr(version)}, this Penstock reads {VERSION}. "
            "Use the Penstock that wrote the plan, or search again."
        )


def _plan(spec: PlanSpec) -> Plan:
    return Plan(
        model=spec.model,
        cluster=spec.cluster,
        global_batch=spec.global_batch,
        stages=tuple(_stage(stage) for stage in spec.stages),
        micro_batching=_micro_batching(spec.micro_batching),
        num_replicas=spec.num_replicas,
        schedule=spec.schedule,
        seq_length=spec.seq_length,
        dec_length=spec.dec_length,
        precision=spec.precision,
        gradients=spec.gradients,
        optimizer=spec.optimizer,
        costs=spec.costs,
        predicted=None if spec.predicted is None else _predicted(spec.predicted),
        notes=tuple(spec.notes),
    )


def _micro_batching(spec: MicroBatchingSpec) -> MicroBatching:
    slower = sorted((int(rank), (a, b, c)) for rank, (a, b, c) in spec.slower.items())
    ends = {link: tuple(map(int, link.split("-"))) for link in spec.slower_links}
    links = tuple(sorted((*ends[link], factor) for link, factor in spec.slower_links.items()))
    return MicroBatching(**{**dict(spec), "per_replica": tuple(spec.per_replica), "slower": tuple(slower), "slower_links": links})


def _stage(spec: StageSpec) -> Stage:
    return Stage(
        *spec.ops,
        devices=tuple(spec.devices),
        degrees=Degrees(**dict(spec.degrees)),
        runs=tuple(OpRun(*run.ops, run.tp, run.dp, run.algo) for run in spec.runs),
        recompute=tuple(spec.recompute),
        zero=spec.zero,
        sequence_parallel=spec.sequence_parallel,
    )


def _predicted(spec: PredictedSpec) -> Predicted:
    return Predicted(**{**dict(spec), "memory": tuple(StageMemory(**dict(memory)) for memory in spec.memory)})


def json_schema() -> str:
    """The JSON schema of plan files."""
    from penstock.plans.spec import PlanSpec

    return json.dumps(PlanSpec.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    target = Path(__file__).parents[3] / "docs" / "reference" / "plan.schema.json"
    write_text(target, json_schema())
    print(f"wrote {target}")
