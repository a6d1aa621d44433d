"""`penstock export`: a plan in the form that another system takes."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from penstock.cli.console import JsonFlag, out, print_json
from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["TARGETS", "export", "export_plan", "parse_target"]

TARGETS = ("megatron", "torchtitan", "deepspeed", "aceso", "fasop")


class Target(NamedTuple):
    """A system and the file to write for it."""

    system: str
    path: Path


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file (plan.json).")],
    to: Annotated[str, typer.Option(metavar="SYSTEM:PATH", help=f"What to write, and where. SYSTEM is {', '.join(TARGETS)}.")],
    json: JsonFlag = False,
) -> None:
    """Write a plan for another system. What the system cannot express is refused, with the reason: status 2.

    Example: penstock export plan.json --to megatron:flags.txt
    """
    from penstock.plans.schema import read_plan

    target = parse_target(to)
    export_plan(read_plan(plan), target)
    if json:
        print_json({"plan": plan, "system": target.system, "path": target.path})
    else:
        out().print(f"wrote {target.path}", markup=False, soft_wrap=True)


def parse_target(text: str) -> Target:
    """The system and the file of `SYSTEM:PATH`."""
    system, colon, path = text.partition(":")
    if system not in TARGETS:
        raise InputError(f"--to is '{text}': there is no export to '{system}'. {near_misses(system, TARGETS)} Write SYSTEM:PATH.")
    if not colon or not path or "\0" in path:
        raise InputError(f"--to is '{text}'; {system}:PATH was expected, as in {system}:{_EXAMPLES[system]}.")
    return Target(system, Path(path))


_EXAMPLES = {
    "megatron": "flags.txt",
    "torchtitan": "recipe.py",
    "deepspeed": "config.json",
    "aceso": "plan.json",
    "fasop": "rows.csv",
}


def export_plan(plan: Plan, target: Target) -> None:
    """Writes a plan for another system, in one step or not at all."""
    from penstock.files import write_text

    if target.path.is_dir():
        raise InputError(f"--to: '{target.path}' is a directory, a file was expected.")
    write_text(target.path, _text(plan, target.system, _model(plan)))


def _text(plan: Plan, system: str, model: Model) -> str:
    if system == "megatron":
        from penstock.interop.megatron import megatron_text

        return megatron_text(plan, model)
    if system == "torchtitan":
        from penstock.interop.torchtitan import torchtitan_recipe

        return torchtitan_recipe(plan, model)
    if system == "deepspeed":
        from penstock.interop.deepspeed import deepspeed_config

        return json_module.dumps(deepspeed_config(plan, model), indent=2) + "\n"
    if system == "aceso":
        from penstock.interop.aceso_plans import aceso_text, from_plan

        return aceso_text(from_plan(plan, model))
    from penstock.interop.fasop_rows import fasop_text, row_of_plan

    return fasop_text([row_of_plan(plan, model)])


def _model(plan: Plan) -> Model:
    """The model of a plan; one made from imported tables names a chain of those."""
    from penstock.models.catalog import model_names
    from penstock.plans.references import model_of

    kind, _, folder = plan.costs.partition(":")
    if kind not in ("aceso", "fasop") or not isinstance(plan.model, str) or plan.model in model_names():
        return model_of(plan)
    from penstock.interop import AcesoTables, FasopTables

    if kind == "fasop":
        return FasopTables.open(folder).model(plan.model)
    family, _, size = plan.model.partition("_")
    size, _, layers = size.rpartition("_") if size.endswith("layers") else (size, "", "")
    number = layers.removesuffix("layers")
    return AcesoTables.open(folder).model(family, size, int(number) if number.isdecimal() else 0)
