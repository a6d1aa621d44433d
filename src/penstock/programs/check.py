"""Proves programs safe before they run, or says everything that is wrong with them.

samples and ops complete, each exactly once              headers, flow
loss weights sum to one                                  headers
no use before receive or after free, nothing forgotten   flow
sends and receives match in shape, dtype and order       exchange
reductions and shared weights agree over ranks           exchange
no deadlock, with eager and with rendezvous sends        deadlock
the tensors, parts and weights are the model's           content, given plan and model
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import InputError, plural
from penstock.files import problem_lines
from penstock.programs.content import content_problems
from penstock.programs.deadlock import deadlock_problems
from penstock.programs.exchange import exchange_problems
from penstock.programs.flow import follow
from penstock.programs.headers import header_problems
from penstock.programs.instructions import Program
from penstock.programs.problems import Problem, picture

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["Problem", "check_programs", "require_safe"]



def check_programs(programs: Sequence[Program], plan: Plan | None = None, model: Model | None = None) -> list[Problem]:
    """The problems of the programs of all ranks of one iteration, none if they are safe.

    Where programs contradict each other in what they say of themselves, only that is told: the rest could not be judged.
    """
    if not programs:
        return [Problem(-1, -1, "there are no programs")]
    problems = list(header_problems(programs))
    if problems:
        return problems
    for program in programs:
        problems += follow(program)
    mixed = [index for index, stage in enumerate(plan.stages) if stage.runs] if plan is not None and model is not None else []
    problems += exchange_problems(programs, mixed)
    problems += deadlock_problems(programs)
    if plan is not None and model is not None and not problems:
        problems += content_problems(programs, plan, model)
    return problems


def require_safe(programs: Sequence[Program], plan: Plan | None = None, model: Model | None = None) -> None:
    """Refuses programs that are not safe: what is wrong, and where that stands in the schedule."""
    problems = check_programs(programs, plan, model)
    if not problems:
        return
    told = f"{plural(len(problems), 'problem')}:\n{problem_lines(problems)}"
    raise InputError(f"the programs have {told}\n\n{picture(programs, problems[0])}")
