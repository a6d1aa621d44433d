"""What makes a plan valid: all problems at once, each with its field, its numbers and the next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from penstock.errors import InputError, plural
from penstock.files import problem_lines
from penstock.plans import placement
from penstock.plans.batch_rules import batch_problems, length_problems
from penstock.plans.capabilities import MAX_ZERO_IN_PIPELINE
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import plan_from_dict, plan_to_dict
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["check_plan", "require_valid"]

Found = TypeVar("Found")


def require_valid(plan: Plan, model: Model | None = None, cluster: Cluster | None = None, where: str = "the plan") -> None:
    """Refuses a plan that is not valid, naming every problem."""
    problems = check_plan(plan, model, cluster)
    if problems:
        raise InputError(f"{where} has {plural(len(problems), 'problem')}:\n{problem_lines(problems)}")


def check_plan(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> list[str]:
    """The problems of a plan, none if it is valid; model and cluster are those it names unless given."""
    try:
        plan_from_dict(plan_to_dict(plan), "the plan")
    except InputError as error:
        return str(error).splitlines()[1:]
    problems: list[str] = []
    model = model or _found(lambda: model_of(plan), problems)
    cluster = cluster or _found(lambda: cluster_of(plan), problems)
    problems += placement.op_problems(plan, model.num_ops if model else None)
    problems += placement.sub_range_problems(plan)
    problems += placement.degree_problems(plan)
    problems += placement.rank_problems(plan)
    problems += batch_problems(plan)
    problems += _schedule_problems(plan)
    if plan.gradients not in ("", "fp32", plan.precision):
        problems.append(f"gradients is '{plan.gradients}', but precision is {plan.precision}. Use fp32, or leave it out.")
    if model is not None:
        problems += placement.split_problems(plan, model)
        problems += length_problems(plan, model)
    if cluster is not None:
        problems += placement.cluster_problems(plan, cluster)
        problems += placement.mixed_kind_problems(plan, cluster)
    return problems


def _found(find: Callable[[], Found], problems: list[str]) -> Found | None:
    """What `find` finds; if it refuses, its message joins the problems."""
    try:
        return find()
    except InputError as error:
        problems.append(str(error))
        return None


def _schedule_problems(plan: Plan) -> Iterator[str]:
    rules = SCHEDULES[plan.schedule]
    if rules.chunked:
        yield from _chunk_problems(plan)
    elif plan.num_stages < rules.min_groups:
        yield f"schedule '{plan.schedule}' needs {rules.min_groups} or more stages, there is {plan.num_stages}. Use '{DEFAULT_SCHEDULE}'."
    for index, stage in enumerate(plan.stages):
        if any(stage.recompute) and not rules.recomputes:
            yield (
                f"stages.{index}.recompute names ops, but the schedule '{plan.schedule}' does not recompute. Drop them, "
                f"or use '{DEFAULT_SCHEDULE}'."
            )
        if stage.zero > MAX_ZERO_IN_PIPELINE and plan.num_stages > 1:
            yield (
                f"stages.{index}.zero is {stage.zero}, but there are {plan.num_stages} stages: "
                f"ZeRO-2/3 only without a pipeline. Use zero {MAX_ZERO_IN_PIPELINE}, or one stage."
            )
    if plan.predicted is not None and len(plan.predicted.memory) not in (0, plan.num_stages):
        yield (
            f"predicted.memory has {plural(len(plan.predicted.memory), 'entry')} for {plural(plan.num_stages, 'stage')}. Give one each, "
            "or none."
        )


def _chunk_problems(plan: Plan) -> Iterator[str]:
    """Chunk c of group g is stage c × groups + g."""
    groups, least = plan.num_groups, SCHEDULES[plan.schedule].min_groups
    if groups < least or plan.num_stages < 2 * groups or plan.num_stages % groups:
        yield (
            f"schedule '{plan.schedule}' needs a multiple (2 or more) of {least} or more device groups as stages; there are "
            f"{plural(plan.num_stages, 'stage')} on {plural(groups, 'group')}. Use {2 * max(groups, least)} stages, or the schedule "
            f"'{DEFAULT_SCHEDULE}'."
        )
        return
    for index, stage in enumerate(plan.stages):
        if stage.devices != plan.stages[index % groups].devices:
            yield (
                f"stages.{index}.devices differ from those of stages.{index % groups}: with {groups} device groups '{plan.schedule}' "
                f"puts every {groups}th stage on the same devices. Give both the same ranks in the same order."
            )
