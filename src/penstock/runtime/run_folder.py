"""The folder of a run as others read it: the plan, and what decides which batches it trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.files import read_json, write_json
from penstock.plans.plan import Plan
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.request import PlanningSettings, TrainRequest
from penstock.runtime.settings import TrainingSettings

__all__ = ["plan_of_run", "read_request", "write_run"]

_PLAN, _FACTS = "plan.json", "run.json"
_FORMAT, _VERSION = "penstock-run", 1


@dataclass(frozen=True)
class _Facts:
    """Data, steps, seed and options: with the plan, they decide every batch of a run."""

    data: str
    steps: int
    seed: int
    prompt_loss: bool
    search_steps: int


def write_run(request: TrainRequest) -> None:
    """Makes the folder of a run, and writes down what is run."""
    out = Path(request.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"'{out}' cannot hold a run: {error.strerror}.") from None
    write_plan(out / _PLAN, request.plan)
    data = str(Path(request.data).resolve())
    facts = _Facts(data, request.steps, request.settings.seed, request.prompt_loss, request.planning.search_steps)
    write_json(out / _FACTS, {"format": _FORMAT, "version": _VERSION, **asdict(facts)})


def plan_of_run(folder: str | Path) -> Plan:
    """The plan that a run was started with last."""
    if not (Path(folder) / _PLAN).is_file():
        raise InputError(f"'{folder}' is not the folder of a run: it has no {_PLAN}. Give the one that `penstock train --out` was given.")
    return read_plan(Path(folder) / _PLAN)


def read_request(folder: str | Path) -> TrainRequest:
    """A request for the same batches as the run had; how it was updated and where it ran is not in it."""
    from penstock.runtime.request import TrainRequest

    path = Path(folder) / _FACTS
    given = read_json(path, "run")
    if not isinstance(given, dict) or (given.pop("format", None), given.pop("version", None)) != (_FORMAT, _VERSION):
        raise InputError(f"'{path}' is not version {_VERSION} of '{_FORMAT}'.")
    try:
        facts = msgspec.convert(given, _Facts)
    except msgspec.ValidationError as error:
        raise InputError(f"run '{path}': {error}.") from None
    return TrainRequest(
        plan_of_run(folder), facts.data, facts.steps, str(folder), TrainingSettings(seed=facts.seed), prompt_loss=facts.prompt_loss,
        planning=PlanningSettings(search_steps=facts.search_steps),
    )  # fmt: skip
