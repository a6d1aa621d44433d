"""`penstock export`: a plan in the form that another system takes, or as the file that starts its training on a cluster."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.console import JsonFlag, out, print_json
from penstock.errors import InputError, near_misses, shell_words
from penstock.files import check_folder, check_writable, reserve_output
from penstock.systems import SYSTEMS

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["FOR", "LAUNCHERS", "TARGETS", "WEIGHTS", "check_model", "export", "export_plan", "export_weights", "parse_target", "refusal_of"]

_PLAN_FILES = {name: system.plans for name, system in SYSTEMS.items() if system.plans is not None}
TARGETS = ("megatron", "torchtitan", "deepspeed", *_PLAN_FILES)
LAUNCHERS = ("slurm", "kubernetes", "torchrun")
"""Not other planners: what starts the plan's processes."""
WEIGHTS = "huggingface"
"""Not for a plan: the weights of a checkpoint."""


class Target(NamedTuple):
    """A system and the file, or the folder, to write for it."""

    system: str
    path: Path


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help=f"A plan file (plan.json); for {WEIGHTS} a folder of checkpoints.")],
    to: Annotated[
        str, typer.Option(metavar="SYSTEM:PATH", help=f"What to write, and where. SYSTEM is {', '.join((*TARGETS, *LAUNCHERS, WEIGHTS))}.")
    ],
    recover: Annotated[
        bool, typer.Option("--recover", help="Of launch files: start a supervisor on each node, so that the run survives the loss of one.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Write a plan for another system, or the file that starts its training: a batch script, a manifest, a script for a list of hosts.

    Of a checkpoint, write the weights under Hugging Face's names: penstock export RUN/checkpoints --to huggingface:FOLDER

    DynPipe takes two files; PATH is then a folder, which gets topology.json and partition.json.

    What the system cannot express is refused, with the reason: status 2.

    Example: penstock export plan.json --to slurm:train.sbatch
    """
    from penstock.plans.schema import read_plan

    target = parse_target(to)
    if recover and target.system not in LAUNCHERS:
        raise InputError(f"--recover is for {', '.join(LAUNCHERS)}, which start a run; {target.system} starts none. Leave it out.")
    if target.system == WEIGHTS:
        export_weights(plan, target.path)
    else:
        found = read_plan(plan)
        try:
            export_plan(found, target, plan, recover=recover)
        except InputError as error:
            raise InputError(f"{error}{_way_out(found, target.system)}") from None
    if json:
        print_json({"plan": plan, "system": target.system, "path": target.path})
    else:
        out().print(f"wrote {target.path}", markup=False, soft_wrap=True)


def _way_out(plan: Plan, system: str) -> str:
    """How to get another plan, of the same model, that a system takes, if it takes any."""
    if system not in TARGETS:
        return ""
    try:
        check_model(system, _model(plan), (plan.schedule,))
    except InputError:
        return ""
    return f" `{shell_words('penstock', 'search', '--for', system)}` finds plans that it takes."


def parse_target(text: str, option: str = "--to") -> Target:
    """The system and the file of `SYSTEM:PATH`, if something can be written there."""
    system, colon, path = text.partition(":")
    if system not in _EXAMPLES:
        raise InputError(f"{option} is '{text}': there is no export to '{system}'. {near_misses(system, _EXAMPLES)} Write SYSTEM:PATH.")
    if not colon or not path or "\0" in path:
        raise InputError(f"{option} is '{text}'; {system}:PATH was expected, as in {system}:{_EXAMPLES[system]}.")
    inside = _PLAN_FILES[system].folder_files if system in _PLAN_FILES else ()
    in_folder = bool(inside) or system == WEIGHTS
    try:
        (check_folder if in_folder else check_writable)(path)
        for place in [Path(path) / name for name in inside] if in_folder else [path]:
            reserve_output(place)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None
    return Target(system, Path(path))


def check_model(system: str, model: Model, schedules: Sequence[str] = ()) -> None:
    """Refuses a model that a system has none like, or does not train in its dtype or by schedules, before a plan is searched for."""
    if system == "megatron":
        from penstock.interop.megatron import require_model

        require_model(model)
    elif system == "torchtitan":
        from penstock.interop.torchtitan import require_flavor, require_precision

        require_flavor(model)
        require_precision(model.dtype)
    elif system == "runtime":
        from penstock.plans.capabilities import untrainable

        for problem in untrainable(model, schedules):
            raise InputError(problem)
    elif system in _PLAN_FILES:
        _PLAN_FILES[system].require_model(model)


_EXAMPLES = {
    "megatron": "flags.txt",
    "torchtitan": "recipe.py",
    "deepspeed": "config.json",
    **{name: files.write_example for name, files in _PLAN_FILES.items()},
    "slurm": "train.sbatch",
    "kubernetes": "train.yaml",
    "torchrun": "train.sh",
    WEIGHTS: "folder",
}


def export_plan(plan: Plan, target: Target, source: Path, *, recover: bool = False) -> None:
    """Writes a plan for another system, each file in one step or not at all; launch files name the plan's own file `source`, and start
    supervisors if the run is to `recover`."""
    from penstock.files import write_text

    files = _PLAN_FILES.get(target.system)
    if files is not None:
        files.write(plan, _model(plan), target.path)
    elif target.system in LAUNCHERS:
        write_text(target.path, _launch_text(plan, target.system, source, recover))
    else:
        write_text(target.path, _text(plan, target.system, _model(plan)))


FOR = ("runtime", *TARGETS)
"""Whose limits a search can keep to."""


def refusal_of(plan: Plan, system: str) -> str:
    """Why a system cannot express a plan, or Penstock's runtime not train it; empty where it can."""
    from tempfile import TemporaryDirectory

    if system == "runtime":
        from penstock.plans.capabilities import unsupported

        return "; ".join(unsupported(plan, _model(plan)))
    with TemporaryDirectory() as folder:
        try:
            export_plan(plan, Target(system, Path(folder) / "plan"), Path("plan.json"))
        except InputError as error:
            return str(error)
    return ""


def export_weights(checkpoint: Path, folder: Path) -> None:
    """Writes the weights of a checkpoint, or of the latest in a folder, as a folder that `from_pretrained` of Hugging Face loads."""
    from penstock.models.catalog import TRACED, model_from_mapping, resolve_model
    from penstock.runtime.checkpoints.huggingface import export_hf_checkpoint
    from penstock.runtime.checkpoints.module_state import export_module
    from penstock.runtime.checkpoints.reader import Checkpoint

    opened = Checkpoint(checkpoint)
    trained = opened.state.get("model")
    if not isinstance(trained, str | dict):
        raise InputError(f"checkpoint '{opened.path}' does not say which model it is of.")
    model = resolve_model(trained) if isinstance(trained, str) else model_from_mapping(trained, f"checkpoint '{opened.path}'", "model")
    (export_module if model.family == TRACED else export_hf_checkpoint)(opened, model, folder)


def _launch_text(plan: Plan, system: str, source: Path, recover: bool) -> str:
    from penstock.interop.torchrun import torchrun_script, train_command
    from penstock.plans.references import cluster_of

    cluster = cluster_of(plan)
    if system == "kubernetes":
        from penstock.interop.kubernetes import PLAN_PATH, kubernetes_text
        from penstock.plans.schema import plan_to_dict

        text = json_module.dumps(plan_to_dict(plan), indent=2) + "\n"
        return kubernetes_text(plan, cluster, text, train_command(PLAN_PATH), supervised=recover)
    command = train_command(str(source.resolve()))
    if system == "slurm":
        from penstock.interop.slurm import slurm_script

        return slurm_script(plan, cluster, command, supervised=recover)
    return torchrun_script(plan, cluster, command, supervised=recover)


def _text(plan: Plan, system: str, model: Model) -> str:
    if system == "megatron":
        from penstock.interop.megatron import megatron_text

        return megatron_text(plan, model)
    if system == "torchtitan":
        from penstock.interop.torchtitan import torchtitan_recipe

        return torchtitan_recipe(plan, model)
    from penstock.interop.deepspeed import deepspeed_config

    return json_module.dumps(deepspeed_config(plan, model), indent=2) + "\n"


def _model(plan: Plan) -> Model:
    """The model of a plan; one made from imported tables names a chain of those."""
    from penstock.models.catalog import model_names
    from penstock.plans.references import model_of

    kind, _, folder = plan.costs.partition(":")
    chain = SYSTEMS[kind].chain if kind in SYSTEMS else None
    if chain is None or not isinstance(plan.model, str) or plan.model in model_names():
        return model_of(plan)
    return chain(folder, plan.model)
