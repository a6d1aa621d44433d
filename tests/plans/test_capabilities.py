"""The table of what can be run, held against what the search emits and what the runtime's tests run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from runtime_cases import DIMENSIONS, is_possible, make_case

from penstock.models.catalog import FAMILIES
from penstock.plans.build import uniform_plan
from penstock.plans.capabilities import MAX_PATTERNS, MAX_ZERO_IN_PIPELINE, unsupported
from penstock.plans.plan import Degrees, OpRun, Plan
from penstock.plans.references import model_of
from penstock.plans.spec import PlanSpec, StageSpec
from penstock.plans.validity import check_plan
from penstock.programs.lower import lower
from penstock.schedules.rules import SCHEDULES, SEARCHED_SCHEDULES
from penstock.search import search_plans

GPT = uniform_plan("gpt-tiny", "2xa100-40gb", tp=2, global_batch=8, micro_batch=2)


@pytest.mark.parametrize(
    ("model", "cluster", "batch"),
    [
        ("gpt-tiny", "4xa100-40gb", 16),
        ("llama-tiny", "1xp4d.24xlarge+1xg5.24xlarge", 48),
        ("bert-tiny", "2xg5.12xlarge", 32),
        ("t5-tiny", "4xt4", 16),
        ("resnet-tiny", "4xv100-16gb", 32),
        ("gpt-1.3b", "4xv100-16gb", 16),
    ],
)
def test_every_plan_of_a_search_can_be_run(model: str, cluster: str, batch: int) -> None:
    choices = search_plans(model, cluster, batch, top=20).choices
    assert len(choices) > 1
    for choice in choices:
        plan, described = choice.plan, model_of(choice.plan)
        assert unsupported(plan, described) == [] and check_plan(plan, described) == []
        assert plan.schedule in SEARCHED_SCHEDULES and plan.num_groups >= SCHEDULES[plan.schedule].min_groups
        assert max(len(stage.recompute) for stage in plan.stages) <= MAX_PATTERNS


def test_every_plan_that_the_runtime_is_tested_with_is_supported() -> None:
    generator = random.Random(1)
    tried = 0
    while tried < 80:
        choice = {name: generator.choice(values) for name, values in DIMENSIONS.items()}
        if not is_possible(choice):
            continue
        case = make_case(choice, tried, iterations=1)
        assert unsupported(case.plan, case.model) == [], choice
        assert check_plan(case.plan, case.model) == [], choice
        assert lower(case.plan, case.model, case.works[0], 0)
        tried += 1


def test_the_table_has_what_the_runtime_is_tested_with_and_no_more() -> None:
    tested = [SCHEDULES[name] for name in DIMENSIONS["schedule"]]
    # Programs know an order's chunks and kinds of passes, not its name: a new schedule without new ones is tested with the others.
    kinds = {(rules.chunked, rules.splits_backward) for rules in SCHEDULES.values() if not rules.asynchronous}
    assert {(rules.chunked, rules.splits_backward) for rules in tested} == kinds and not any(rules.asynchronous for rules in tested)
    [level] = [limit.le for limit in StageSpec.model_fields["zero"].metadata if hasattr(limit, "le")]
    assert max(DIMENSIONS["zero"]) == level
    assert set(FAMILIES) == set(DIMENSIONS["family"])
    zero_bubble = {"family": "gpt", "pp": 2, "tp": 1, "dp": 1, "replicas": 1, "schedule": "zero-bubble", "layout": "padded",
                   "recompute": "all", "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip
    for rules in tested:
        assert is_possible(zero_bubble | {"schedule": rules.name}) == rules.recomputes
        assert is_possible(zero_bubble | {"schedule": rules.name, "recompute": "none", "pp": 1}) == (rules.min_groups == 1)


def test_plan_files_name_the_schedules_that_there_are() -> None:
    assert PlanSpec.model_json_schema()["properties"]["schedule"]["enum"] == list(SCHEDULES)


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("pp", [1, 2])
def test_zero_levels(zero: int, pp: int) -> None:
    plan = uniform_plan("gpt-tiny", "4xa100-40gb", pp=pp, replicas=4 // pp, global_batch=8, micro_batch=1)
    plan = replace(plan, stages=tuple(replace(stage, zero=zero) for stage in plan.stages))
    assert (check_plan(plan) == []) == (pp == 1 or zero <= MAX_ZERO_IN_PIPELINE)
    assert unsupported(plan, model_of(plan)) == []


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"model": "gpt-tiny"}, ["'embedding' and 'head.logits' share a weight on two stages"]),
        ({"replicas": 2}, ["there are 2 replicas"]),
        ({"dp": 2}, []),
        ({"dp": 2, "zero": 1}, ["stages.0 has zero 1", "stages.1 has zero 1"]),
        ({"precision": "fp16"}, ["fp16's loss scale"]),
    ],
)
def test_stages_that_update_by_themselves_share_nothing(changes: dict[str, object], wanted: list[str]) -> None:
    fields = {"pp": 2, "global_batch": 8, "micro_batch": 2, "schedule": "pipedream"} | changes
    plan = uniform_plan(str(fields.pop("model", "llama-tiny")), "4xa100-40gb", **fields)  # type: ignore[arg-type]
    assert check_plan(plan) == []
    problems = unsupported(plan, model_of(plan))
    assert len(problems) == len(wanted) and all(text in problem for text, problem in zip(wanted, problems, strict=True))
    dynamic = replace(plan, micro_batching=replace(plan.micro_batching, policy="dynamic"))
    assert sum("micro-batches are dynamic" in problem for problem in unsupported(dynamic, model_of(plan))) == 1


def test_a_shared_weight_is_cut_in_one_way_within_a_stage() -> None:
    model = model_of(GPT)
    [tied] = [place for place in model.ops if place.op.tied_to]

    def with_run(plan: Plan, index: int) -> Plan:
        stages = list(plan.stages)
        stages[index] = replace(stages[index], runs=(OpRun(tied.index, tied.index + 1, 1, 2),))
        return replace(plan, stages=tuple(stages))

    wrong = with_run(GPT, 0)
    assert check_plan(wrong) == []
    [problem] = unsupported(wrong, model)
    assert f"'{tied.op.tied_to}' and '{tied.name}'" in problem and "tp 2 and 1" in problem
    apart = uniform_plan("gpt-tiny", "4xa100-40gb", pp=2, tp=2, global_batch=8, micro_batch=2)
    assert unsupported(with_run(apart, 1), model) == []
    free = replace(GPT, stages=(replace(GPT.stages[0], degrees=Degrees(1, 2), runs=(OpRun(2, 5, 2, 1),)),))
    assert unsupported(free, model) == []


def test_a_traced_model_has_nothing_to_train() -> None:
    traced = replace(model_of(GPT), family="traced")
    [problem] = unsupported(GPT, traced)
    assert "was traced" in problem and "gpt" in problem
