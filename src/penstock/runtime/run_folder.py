"""The folder of a run as others read it: the plan, and what decides which batches it trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import InputError, shell_words
from penstock.files import read_json, write_json
from penstock.plans.plan import Plan
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.request import PlanningSettings, TrainRequest
from penstock.runtime.run_lock import RunLock, run_lock
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.steps import StepRecord
from penstock.timing.asked import ASKED

__all__ = [
    "CHECKPOINTS", "JOB", "STEPS", "go_back", "last_step", "own_folder", "plan_of_run", "plans_of_run", "put_in_force", "read_request",
    "refuse_other_run", "safe_step",
]  # fmt: skip

CHECKPOINTS, STEPS, JOB = "checkpoints", "steps.jsonl", "job.yaml"
_PLAN, _FACTS = "plan.json", "run.json"
_PLANS = "plans"
"""All plans that the run has had, each in a file that is named after its first step; `plan.json` is the last."""
_FORMAT, _VERSION = "penstock-run", 1
_TAIL_BYTES = 16384
"""More than any line of a step."""


@dataclass(frozen=True)
class _Facts:
    """Data, steps, seed and options: with the plan, they decide every batch of a run."""

    data: str
    steps: Annotated[int, msgspec.Meta(ge=0, le=10**15)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    prompt_loss: bool
    search_steps: Annotated[int, msgspec.Meta(ge=0, le=100_000_000)]


def last_step(folder: str | Path) -> int:
    """The newest step that a run has recorded; -1: none."""
    path = Path(folder) / STEPS
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return -1
    return msgspec.json.decode(lines[-1], type=StepRecord).step if lines else -1


@contextmanager
def own_folder(request: TrainRequest, first_step: int = 0) -> Iterator[RunLock]:
    """Makes the folder of a run, keeps others out of it while entered, and writes down what is run. A folder that holds another run is
    refused: its steps would be overwritten, and its checkpoints make room for new ones. `first_step` is where the run begins: what
    it has learned after that, when it was there before, is of no account any more."""
    from penstock.runtime.checkpoints.folder import abandon_newer, find_checkpoint  # imports torch: those who only ask do without

    out = Path(request.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"'{out}' cannot hold a run: {error.strerror}.") from None
    with run_lock(out) as lock:
        refuse_other_run(out, request.resume)
        if request.resume:
            abandon_newer(out / CHECKPOINTS, find_checkpoint(request.resume))
        (out / ASKED).unlink(missing_ok=True)  # what was asked of the run before, not of this one
        _forget_plans(out, first_step)
        put_in_force(out, first_step, request.plan)
        data = str(Path(request.data).resolve())
        facts = _Facts(data, request.steps, request.settings.seed, request.prompt_loss, request.planning.search_steps)
        write_json(out / _FACTS, {"format": _FORMAT, "version": _VERSION, **asdict(facts)})
        yield lock


def refuse_other_run(out: Path, resume: str) -> None:
    """Refuses to put a run where another has been. One that ended before its first step left nothing to lose; one that goes on from a
    checkpoint of the folder is the same run."""
    from penstock.runtime.checkpoints.folder import whole_checkpoints

    steps, saved = out / STEPS, next(reversed(whole_checkpoints(out / CHECKPOINTS)), None)
    if saved is None and not (steps.is_file() and steps.stat().st_size):
        return
    if resume and Path(resume).resolve().is_relative_to(out.resolve()):
        return
    found = "steps, but no checkpoint" if saved is None else f"checkpoints up to {saved.name}"
    go_on = "" if saved is None else f"  go on with it:       penstock train … --out {shell_words(out)} --resume {shell_words(out)}\n"
    raise InputError(
        f"'{out}' holds a run already ({found}), which this one would overwrite. Nothing was changed. Either\n{go_on}"
        f"  keep both apart:     penstock train … --out {shell_words(f'{out}-2')}"
    )


def safe_step(request: TrainRequest, first_step: int) -> str:
    """Which step of a run that has failed is on disk, and the command that goes on from it; `first_step` is where the run began."""
    from penstock.runtime.checkpoints.folder import latest_checkpoint, step_of

    out = Path(request.out)
    saved = latest_checkpoint(out / CHECKPOINTS)
    if saved is None and not request.resume:
        return f"No checkpoint had been written: there is nothing to go on from. Start it again with another --out, or remove '{out}'."
    where, step = (request.resume, first_step) if saved is None else (str(out), step_of(saved))
    if (out / JOB).is_file():
        return f"Step {step} is safe. Go on with the same command, or with: penstock train {shell_words(out / JOB)}"
    return f"Step {step} is safe. Go on with: penstock train … --out {shell_words(out)} --resume {shell_words(where)}"


def go_back(folder: str | Path, step: int, plan: Plan) -> None:
    """The run does `step` and all after it again, under `plan`; where that was in force then, it stays so."""
    _forget_plans(folder, step + 1)
    if read_plan(plans_of_run(folder)[max(plans_of_run(folder))]) != plan:
        put_in_force(folder, step, plan)


def _forget_plans(folder: str | Path, first_step: int) -> None:
    """Plans of steps that are done again."""
    for step, path in plans_of_run(folder).items():
        if step >= first_step:
            path.unlink(missing_ok=True)


def put_in_force(folder: str | Path, step: int, plan: Plan) -> None:
    """Writes down that `plan` is in force from `step` on."""
    write_plan(Path(folder) / _PLANS / f"{step:08d}.json", plan)
    write_plan(Path(folder) / _PLAN, plan)


def plans_of_run(folder: str | Path) -> dict[int, Path]:
    """The files of all plans that a run has had, by their first steps."""
    found = {int(path.stem): path for path in sorted((Path(folder) / _PLANS).glob("*.json")) if path.stem.isdecimal()}
    return found or {0: Path(folder) / _PLAN}


def plan_of_run(folder: str | Path) -> Plan:
    """The plan that is in force, or was at the end."""
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
