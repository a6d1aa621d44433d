"""The part of `penstock check` that proves programs safe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.console import out, print_error, print_json, say, table
from penstock.errors import InputError, plural
from penstock.files import problem_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.programs.instructions import Program

__all__ = ["check_programs_at"]



def check_programs_at(path: Path, json: bool) -> None:
    """Checks the programs of a file or folder; leaves with status 2 if they are not safe."""
    from penstock.programs.check import check_programs
    from penstock.programs.files import read_programs
    from penstock.programs.flow import follow
    from penstock.programs.problems import picture

    try:
        programs = read_programs(path)
    except InputError as error:
        if not json:
            raise
        print_json({"valid": False, "problems": [str(error)]})
        raise typer.Exit(error.exit_status) from None
    alone = path.is_file() and not _is_whole(programs[0])
    problems = follow(programs[0]) if alone else check_programs(programs)
    if json:
        print_json({"valid": not problems, "problems": [str(problem) for problem in problems], **_summary(programs)})
    elif problems:
        print_error(f"'{path}' is not safe:\n{problem_lines(problems)}")
        out().print(picture(programs, problems[0]), markup=False, highlight=False, soft_wrap=True)
    else:
        _show(programs)
        if alone:
            say("note: this is one rank of several: what it exchanges was not checked. Give the folder of all ranks.")
    if problems:
        raise typer.Exit(InputError.exit_status)


def _is_whole(program: Program) -> bool:
    """Whether no other rank is needed to run it."""
    return program.num_replicas == 1 and [place.stage for place in program.places] == list(range(program.num_stages))


def _summary(programs: Sequence[Program]) -> dict[str, Any]:
    first = programs[0]
    return {
        "num_programs": len(programs),
        "iteration": first.iteration,
        "num_stages": first.num_stages,
        "num_replicas": first.num_replicas,
        "num_samples": first.num_samples,
        "num_instructions": sum(len(program.instructions) for program in programs),
    }


def _show(programs: Sequence[Program]) -> None:
    first = programs[0]
    out().print("programs are safe", style="green")
    say(
        f"iteration {first.iteration}: {plural(len(programs), 'rank')}, {plural(first.num_stages, 'stage')}, "
        f"{plural(first.num_replicas, 'replica')}, {plural(first.num_samples, 'sample')}, {plural(first.loss_tokens, 'position')} in the "
        "loss"
    )
    rows = []
    for program in programs:
        kinds = Counter(type(step).__name__ for step in program.instructions)
        stages = " ".join(str(place.stage) for place in program.places)
        sent = kinds["SendStart"] + kinds["ReceiveStart"]
        rows.append([program.rank, program.replica, stages, len(program.micro_batches), len(program.instructions), sent])
    out().print(table("programs", ["rank", "replica", "stages", "micro-batches", "instructions", "transfers"], rows))
