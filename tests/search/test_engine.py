"""Whatever schedules may be chosen, the search answers with plans that have one of them, and with a bound that holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from penstock.files import write_json
from penstock.models.catalog import resolve_model
from penstock.models.description import model_to_description
from penstock.models.ops import Split
from penstock.schedules.rules import DEFAULT_SCHEDULE, SEARCHED_SCHEDULES
from penstock.search import Outcome, Request, search, search_plans

SHORT = str(Path(__file__).parents[1] / "short_gpt.yaml")
SETTINGS = ((SHORT, "4xt4", 8), (SHORT, "2xa100-40gb+2xv100-16gb", 8))
CHOICES = [names for size in (1, 2, 3) for names in combinations(SEARCHED_SCHEDULES, size)]


@cache
def found(setting: tuple[str, str, int], schedules: tuple[str, ...]) -> Outcome:
    return search_plans(*setting, schedules=schedules, micro_batches=(1,))


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[1])
@pytest.mark.parametrize("schedules", CHOICES, ids=",".join)
def test_any_choice_of_schedules_is_searched_and_proven(setting: tuple[str, str, int], schedules: tuple[str, ...]) -> None:
    outcome = found(setting, schedules)
    assert {choice.plan.schedule for choice in outcome.choices} <= {DEFAULT_SCHEDULE, *schedules}
    assert 0 < outcome.bound_s <= outcome.formula_s


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting[1])
def test_no_plan_is_below_the_bound_of_a_search_that_might_have_found_it(setting: tuple[str, str, int]) -> None:
    for schedules in CHOICES:
        for fewer in CHOICES:
            if set(fewer) <= {DEFAULT_SCHEDULE, *schedules}:
                assert found(setting, schedules).bound_s <= found(setting, fewer).formula_s * (1 + 1e-9)


LLAMA = "{family: llama, layers: 4, hidden: 1024, heads: 16, kv_heads: 4, ffn: 2816, vocab: 32000, seq_length: 1024}"


@pytest.mark.parametrize(("cluster", "batch", "limit_gb"), [("4xp3.2xlarge", 64, math.inf), ("2xp3.2xlarge", 128, 6.0)])
def test_a_search_of_more_is_no_slower_by_the_clock(cluster: str, batch: int, limit_gb: float, tmp_path: Path) -> None:
    """On slow networks the clock hides messages that formulas count, so that what is slow by formula, beside a plan of the grid that has
    no messages, may be the fastest."""
    model = tmp_path / "llama.yaml"
    model.write_text(LLAMA)
    request = Request.of(str(model), cluster, batch, "roofline", None, (), limit_gb * 1e9)
    with_grid, without = (search(request, top=1, prove=prove).choices[0].estimate.time_s for prove in (True, False))
    assert with_grid <= without * 1.001


def test_devices_that_a_batch_has_no_work_for_slow_nothing_down() -> None:
    """On thousands of them stages would come in such coarse steps that one device alone was the answer."""
    enough, many = (search_plans("gpt-tiny", cluster, 1, top=2) for cluster in ("16xp5.48xlarge", "300xp5.48xlarge"))
    assert many.bound_s == enough.bound_s
    assert [(choice.plan.stages, choice.estimate.time_s) for choice in many.choices] == [
        (choice.plan.stages, choice.estimate.time_s) for choice in enough.choices
    ]
    for choice in (*many.choices, many.offered):
        assert choice.plan.cluster == "300xp5.48xlarge"
        assert choice.plan.notes[-1] == "a global batch of 1 has work for 128 of the 2400 devices at most; the others idle."
        assert choice.plan.notes[-1] in choice.estimate.notes, "`penstock search` tells those"
    assert search_plans("gpt-tiny", "17xp5.48xlarge", 2, top=1).choices[0].plan.notes == enough.choices[0].plan.notes


def test_a_model_that_keeps_nothing_is_planned(tmp_path: Path) -> None:
    model = resolve_model("vgg-tiny")
    runs = [(replace(block, ops=tuple(replace(op, splits=(Split(),)) for op in block.ops)), copies) for block, copies in model.runs]
    write_json(tmp_path / "net.json", model_to_description(replace(model, runs=tuple(runs))))
    outcome = search_plans(str(tmp_path / "net.json"), "2xcpu", 8)
    assert outcome.choices and 0 < outcome.bound_s <= outcome.formula_s
